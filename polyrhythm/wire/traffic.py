"""Traffic: how many bytes a node has sent."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from polyrhythm.core.peer import Peer
from polyrhythm.wire.buffers import Buffer
from polyrhythm.wire.channel import Channel


class Traffic:
    """Counts the bytes of tensors that a node sends, and the bytes that its sockets take.

    Tensors count in full even if they are sent by reference to shared memory.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.bytes_between = 0  # of these, to other sites
        self.other_site_peers: frozenset[Peer] = frozenset()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._closed: Counter[Peer] = Counter()  # bytes sent over connections that have ended

    def count(self, nbytes: int, between: int = 0) -> None:
        """Adds bytes that the node sends by other means, `between` of them to other sites."""
        with self._lock:
            self.bytes_sent += nbytes
            self.bytes_between += between

    @contextlib.contextmanager
    def counting(self, to: Peer, buffers: Sequence[Buffer]) -> Iterator[None]:
        """Counts a message that is sent inside the context, unless sending fails.

        It is counted before it is sent. Otherwise the receiver could end the run, and another thread read the
        total, before the sending thread continues.
        """
        if not buffers:
            yield
            return
        nbytes = sum(buffer.view.nbytes for buffer in buffers)
        between = nbytes if self.other_site_peers and to in self.other_site_peers else 0
        self.count(nbytes, between)
        try:
            yield
        except BaseException:
            self.count(-nbytes, -between)
            raise

    def open(self, channel: Channel) -> None:
        """Includes a new connection in `by_peer`."""
        with self._lock:
            self._channels.add(channel)

    def close(self, channel: Channel) -> None:
        """Keeps the bytes of a connection that has ended."""
        with self._lock:
            self._channels.discard(channel)
            self._closed[channel.peer] += channel.bytes_sent

    def by_peer(self) -> dict[Peer, int]:
        """The bytes that sockets took for each peer: headers and encryption included, TCP/IP overhead not."""
        with self._lock:
            total = Counter(self._closed)
            for channel in self._channels:
                total[channel.peer] += channel.bytes_sent
        return dict(total)
