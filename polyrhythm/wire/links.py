"""The connections of a node: made when first needed, or when a peer makes one."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from polyrhythm.core.errors import UsageError, WireError
from polyrhythm.core.peer import Peer
from polyrhythm.wire.channel import Channel, dial, hang_up, listen, open_channel, unlink
from polyrhythm.wire.frame import Bounds
from polyrhythm.wire.handshake import Identity

LINGER = 2.0  # seconds for reading what a peer sent before it went
_STRANGERS = 64  # connections that may be shaking hands at once


class Link:
    """What a node knows of a peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.address = ""
        self.gone: str | None = None
        self.channel: Channel | None = None
        self.dialing = threading.Lock()


class Links:
    """All links of a node. `adopt` gets every connection that is ready for use, and owns it from then on."""

    def __init__(
        self,
        me: Identity,
        key: bytes,
        address: str,
        adopt: Callable[[Channel], None],
        on_error: Callable[[str], None],
        *,
        encrypt: bool,
        bounds: Bounds,
        wait: float,
    ) -> None:
        self.closing = threading.Event()
        self._me = me
        self._key = key
        self._adopt = adopt
        self._on_error = on_error
        self._encrypt = encrypt
        self._bounds = bounds
        self._wait = wait
        self._links: dict[Peer, Link] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._strangers = threading.Semaphore(_STRANGERS)
        self._listener, self.address = listen(address)
        self.spawn(self._accept)

    def __getitem__(self, peer: Peer) -> Link:
        link = self._links.get(peer)
        return link if link is not None else self._links.setdefault(peer, Link(peer))

    def channel(self, link: Link) -> Channel:
        """The connection to a peer, made anew if there is none. Raises OSError if it cannot be made now."""
        if link.gone is not None or self.closing.is_set():
            raise ConnectionError("there is nobody to connect to")
        if link.channel is not None and not link.channel.broken:
            return link.channel
        with link.dialing:
            if link.channel is not None and not link.channel.broken:
                return link.channel
            if link.address:
                number, sock = next(self._numbers), dial(link.address)
                return self._open(sock, number, f"{link.peer} at {link.address}", link.peer)
        if link.channel is None:
            raise UsageError(f"{self._me.peer} does not know where {link.peer} is")
        raise ConnectionError(f"{link.peer} has not connected again")

    def end_soon(self, channel: Channel) -> None:
        """Ends the connection to a peer that is gone: by itself, as a rule, once all is read."""
        self.spawn(self._end, channel)

    def _end(self, channel: Channel) -> None:
        self.closing.wait(LINGER)
        link = self[channel.peer]
        if link.gone is None and link.channel is channel:
            return  # word that its former life had ended came late: this is the present one's
        channel.close()

    def close(self) -> None:
        """Ends all connections and threads."""
        self.closing.set()
        with self._lock:
            sockets, threads = list(self._sockets), list(self._threads)
        with contextlib.suppress(OSError):
            dial(self.address, 1.0).close()  # wakes accept(), which shutting down alone does not everywhere
        for sock in (self._listener, *sockets):
            hang_up(sock)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        self._listener.close()
        unlink(self.address)

    def _open(self, sock: socket.socket, number: int, where: str, expected: Peer | None = None) -> Channel:
        """Makes a new socket a connection that others may use."""
        try:
            with self._lock:
                self._sockets.add(sock)
            if self.closing.is_set():
                raise ConnectionError("this node is closed")
            channel = open_channel(
                sock,
                self._me,
                self._key,
                dialed=expected is not None,
                where=where,
                encrypt=self._encrypt,
                bounds=self._bounds,
                wait=self._wait,
            )
            if expected not in (None, channel.peer) or channel.peer == self._me.peer:
                raise WireError(f"{where} is {channel.peer}")
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._sockets.discard(sock)
        channel.number = number
        link = self[channel.peer]
        with self._lock:
            if link.channel is None or link.channel.broken or link.channel.number < number:
                link.channel = channel
        self._adopt(channel)
        return channel

    def _accept(self) -> None:
        self._listener.settimeout(1.0)  # in case `close` cannot reach it
        while not self.closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                self.closing.wait(0.05)
                continue
            if not _ours(sock):
                sock.close()
            elif self._strangers.acquire(blocking=False):
                # Numbered here, in the order in which they were made: handshakes may overtake each other.
                self.spawn(self._greet, sock, next(self._numbers))
            else:
                sock.close()

    def _greet(self, sock: socket.socket, number: int) -> None:
        try:
            self._open(sock, number, f"a process that connected to {self._me.peer}")
        except WireError as error:
            self._on_error(str(error))
        except OSError:
            pass
        finally:
            self._strangers.release()

    def spawn(self, function: Callable[..., None], *args: Any) -> None:
        with self._lock:
            closing = self.closing.is_set()
            if not closing:
                name = f"polyrhythm {self._me.peer}"
                thread = threading.Thread(target=function, args=args, name=name, daemon=True)
                self._threads = [old for old in self._threads if old.is_alive()]
                self._threads.append(thread)
                thread.start()
        if closing:  # nobody would join the thread; here all that is left is to tidy up
            function(*args)


def _ours(sock: socket.socket) -> bool:
    """Whether a connection within the host is from a process of the same user; others need not even try."""
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())
