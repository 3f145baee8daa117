"""One connection between two nodes: a stream socket that sends and receives messages straight from memory."""

from __future__ import annotations

import array
import fcntl
import socket
import termios
import threading
from collections.abc import Callable, Sequence

from polyrhythm.wire.frame import PREFIX_SIZE, UNSHARED, Bounds, Header, decode_header, encode, header_length
from polyrhythm.wire.handshake import TIMEOUT, Identity, Keys, authenticate
from polyrhythm.wire.sockets import set_receive_timeout, shut_down, tune, wait_writable
from polyrhythm.wire.streams import PlainReader, RecordReader, RecordWriter, StreamReader

HOST = "host"  # the role of a launcher on another host
STALL = 10.0  # seconds after which a message that stopped half-way breaks its connection
_MAX_CHUNKS = 1024  # in one sendmsg call
_USER_TIMEOUT = 30_000  # ms for a launcher to acknowledge sent bytes; keepalive covers idle connections


class Channel:
    """An authenticated connection. Any thread may send; one thread receives."""

    def __init__(
        self,
        sock: socket.socket,
        them: Identity,
        keys: Keys | None = None,
        bounds: Bounds = UNSHARED,
        wait: float = 300.0,
    ) -> None:
        self.peer = them.peer
        self.host = them.host
        self.instance = them.instance
        self.bounds = bounds
        self.number = 0  # a newer connection has a higher number
        self.bytes_sent = 0  # as taken by the socket, headers and encryption included
        self.broken = False  # nothing more can be sent
        self.drained = False  # nothing more will be received
        self.wait = wait  # seconds until a send fails because the peer does not read
        # Waits until the socket accepts more bytes. The poller replaces it, to read while it waits.
        self.wait_writable: Callable[[Channel, float], bool] = _wait_writable
        self._sock = sock
        self._fd = sock.fileno()  # kept after closing, to identify the channel
        self._name = str(them.peer)
        self._lock = threading.RLock()  # reentrant: the connection may end while its sender reads
        self._low_water_mark = 1
        self._prefix = memoryview(bytearray(PREFIX_SIZE))
        self._writer = RecordWriter(keys.sending) if keys else None
        self._reader: StreamReader = (
            RecordReader(keys.receiving, sock, self._name) if keys else PlainReader(sock)
        )
        set_receive_timeout(sock, STALL)

    def fileno(self) -> int:
        return self._fd

    @property
    def has_buffered(self) -> bool:
        """True if bytes of the next message have been read already."""
        return bool(self._reader.buffered)

    def available(self) -> int:
        """The number of bytes that have arrived at the socket and are not read."""
        size = array.array("i", [0])
        fcntl.ioctl(self._sock, termios.FIONREAD, size)
        return size[0]

    def send(self, header: Header, buffers: Sequence[memoryview] = ()) -> None:
        """Sends a message. OSError if the connection broke, BlockingIOError if the peer does not read."""
        chunks = [memoryview(encode(header)), *(view for view in buffers if view.nbytes)]
        with self._lock:
            if self.broken:
                raise ConnectionError("the connection is closed")
            try:
                if self._writer:
                    for record in self._writer.records(chunks):
                        self._send_all([record])
                else:
                    self._send_all(chunks)
            except BaseException:
                self.close()  # part of a message may be out, and nothing can follow it
                raise

    def _send_all(self, chunks: list[memoryview]) -> None:
        at = 0
        while True:
            try:
                sent = self._sock.sendmsg(chunks[at : at + _MAX_CHUNKS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not self.wait_writable(self, self.wait):
                    raise
                continue
            self.bytes_sent += sent
            while at < len(chunks) and sent >= chunks[at].nbytes:
                sent -= chunks[at].nbytes
                at += 1
            if at == len(chunks):
                return
            chunks[at] = chunks[at][sent:]

    def receive_header(self) -> Header:
        """Receives the header of the next message. The caller then receives its inline tensors in order."""
        self.receive_into(self._prefix)
        body = bytearray(header_length(self._prefix, self._name))
        self.receive_into(memoryview(body))
        return decode_header(body, self._name, self.bounds)

    def receive_into(self, view: memoryview) -> None:
        """Fills `view`, waiting for its bytes."""
        done = 0
        while done < view.nbytes:
            done += self._reader.read_some(view[done:], wait=True)

    def receive_available(self, view: memoryview) -> int:
        """Fills the start of `view` with what has arrived and returns the number of bytes."""
        return self._reader.read_some(view, wait=False)

    def expect(self, nbytes: int) -> None:
        """Makes the socket readable only when a good part of `nbytes` has arrived (1: any byte)."""
        mark = max(1, self._reader.low_water_mark(nbytes))
        if mark != self._low_water_mark:
            self._low_water_mark = mark
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)

    def close(self) -> None:
        """Ends the connection in both directions. Threads blocked in it get an OSError."""
        self.broken = True
        shut_down(self._sock)

    def release(self) -> None:
        """Closes the socket. Only the receiving thread may: no other thread may still use its descriptor."""
        self.close()
        with self._lock:
            self._sock.close()


def _wait_writable(channel: Channel, timeout: float) -> bool:
    return wait_writable(channel.fileno(), timeout)


def open_channel(
    sock: socket.socket,
    me: Identity,
    key: bytes,
    *,
    dialed: bool,
    where: str,
    encrypt: bool = True,
    bounds: Bounds = UNSHARED,
    wait: float = 300.0,
    timeout: float = TIMEOUT,
) -> Channel:
    """Performs the handshake on a new socket. Only peers that see the same arenas share memory."""
    tune(sock)
    tcp = sock.family != socket.AF_UNIX
    them, keys = authenticate(
        sock, me, key, dialed=dialed, encrypt=encrypt and tcp, where=where, timeout=timeout
    )
    if tcp and HOST in (me.peer.role, them.peer.role) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT)
    if not me.host or them.host != me.host:
        bounds = Bounds(bounds.inline)
    return Channel(sock, them, keys, bounds, wait)
