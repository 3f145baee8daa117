"""Links: the connections of a node, opened when first needed or accepted from peers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable

from polyrhythm.core.errors import UsageError, WireError
from polyrhythm.core.peer import Peer
from polyrhythm.wire.channel import Channel, open_channel
from polyrhythm.wire.handshake import Identity
from polyrhythm.wire.options import TransportOptions
from polyrhythm.wire.sockets import dial, is_same_user, listen, shut_down, unlink
from polyrhythm.wire.threads import ThreadGroup

LINGER = 2.0  # seconds to read what a lost peer had sent
_MAX_HANDSHAKES = 64  # at once, with processes that are not authenticated yet


class Link:
    """What a node knows about a peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.address = ""
        self.lost: str | None = None  # the reason, if the peer is lost
        self.channel: Channel | None = None
        self.dialing = threading.Lock()


class Links:
    """The links to all peers. `on_connect` gets every authenticated connection and owns it from then on."""

    def __init__(
        self,
        me: Identity,
        key: bytes,
        options: TransportOptions,
        threads: ThreadGroup,
        on_connect: Callable[[Channel], None],
    ) -> None:
        self._me = me
        self._key = key
        self._options = options
        self._threads = threads
        self._closing = threads.closing
        self._on_connect = on_connect
        self._links: dict[Peer, Link] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._handshaking: set[socket.socket] = set()
        self._handshakes = threading.Semaphore(_MAX_HANDSHAKES)
        self._listener, self.address = listen(options.listen)

    def start(self) -> None:
        """Starts to accept connections."""
        self._threads.spawn(self._accept)

    def __getitem__(self, peer: Peer) -> Link:
        link = self._links.get(peer)
        return link if link is not None else self._links.setdefault(peer, Link(peer))

    def channel(self, link: Link) -> Channel:
        """Returns the connection to a peer, dialing if there is none. OSError if it cannot be opened now."""
        if link.lost is not None or self._closing.is_set():
            raise ConnectionError("the peer is lost or this node is closed")
        if link.channel is not None and not link.channel.broken:
            return link.channel
        with link.dialing:
            if link.channel is not None and not link.channel.broken:
                return link.channel
            if link.address:
                number, sock = next(self._numbers), dial(link.address)
                return self._open(sock, number, f"{link.peer} at {link.address}", link.peer)
        if link.channel is None:
            raise UsageError(f"{self._me.peer} does not know the address of {link.peer}")
        raise ConnectionError(f"{link.peer} has not reconnected")

    def close_later(self, channel: Channel) -> None:
        """Closes the connection to a lost peer after a while. Usually it ends earlier, once all is read."""
        self._threads.spawn(self._linger, channel)

    def _linger(self, channel: Channel) -> None:
        self._closing.wait(LINGER)
        link = self[channel.peer]
        if link.lost is None and link.channel is channel:
            return  # the report was about the previous incarnation of the peer
        channel.close()

    def close(self) -> None:
        """Stops accepting connections and ends all threads."""
        self._closing.set()
        with self._lock:
            sockets = list(self._handshaking)
        with contextlib.suppress(OSError):
            dial(self.address, 1.0).close()  # unblocks accept(), which shutdown alone does not on all systems
        for sock in (self._listener, *sockets):
            shut_down(sock)
        self._threads.join()
        self._listener.close()
        unlink(self.address)

    def _open(self, sock: socket.socket, number: int, where: str, expected: Peer | None = None) -> Channel:
        """Performs the handshake on a new socket and hands the connection over."""
        try:
            with self._lock:
                self._handshaking.add(sock)
            if self._closing.is_set():
                raise ConnectionError("this node is closed")
            channel = open_channel(
                sock,
                self._me,
                self._key,
                dialed=expected is not None,
                where=where,
                encrypt=self._options.encrypt,
                bounds=self._options.bounds,
                wait=self._options.wait,
            )
            if expected not in (None, channel.peer) or channel.peer == self._me.peer:
                raise WireError(f"{where} is {channel.peer}")
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._handshaking.discard(sock)
        channel.number = number
        link = self[channel.peer]
        with self._lock:
            if link.channel is None or link.channel.broken or link.channel.number < number:
                link.channel = channel
        self._on_connect(channel)
        return channel

    def _accept(self) -> None:
        self._listener.settimeout(1.0)  # in case `close` cannot unblock it
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                self._closing.wait(0.05)
                continue
            if is_same_user(sock) and self._handshakes.acquire(blocking=False):
                # Numbered here, in the order of connecting: handshakes may complete out of order.
                self._threads.spawn(self._open_accepted, sock, next(self._numbers))
            else:
                sock.close()

    def _open_accepted(self, sock: socket.socket, number: int) -> None:
        try:
            self._open(sock, number, f"a process that connected to {self._me.peer}")
        except WireError as error:
            self._options.on_error(str(error))
        except OSError:
            pass
        finally:
            self._handshakes.release()
