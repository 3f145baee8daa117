"""One connection between two nodes. Long, until sealing is split off: framing and sealing share buffers.

It is a stream socket that carries messages straight from and to memory.

Addresses are `unix:@name` (Linux abstract sockets), `unix:/path` (elsewhere) and `tcp:host:port`. Within a
host the bytes are plain: who could read them could read the node's memory. Between hosts they travel as
records

    plaintext length u32 | AES-256-GCM ciphertext and tag

whose nonces are counters and whose length is authenticated, so that none can be changed, dropped or repeated.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.core.errors import UsageError, WireError
from polyrhythm.wire.frame import PREFIX_SIZE, UNSHARED, Bounds, Header, decode_header, encode, header_length
from polyrhythm.wire.handshake import TIMEOUT, Identity, Keys, shake

HOST = "host"  # the role of a launcher on another host
STALL = 10.0  # seconds after which a message that stopped half-way breaks its connection
RECORD = 1 << 20
_WRITE = 1 << 18  # plaintext per record that we write: larger ones measured no faster
_SMALL = 1 << 16  # a message up to this size becomes one record
_TAG = 16
_AHEAD = 1 << 11
_VECTORS = 1024
_SOCKET_BUFFER = 1 << 20
_GOOD_PART = 1 << 17  # bytes for which it pays to wake up in the middle of a message
_AT_ONCE = 1 << 30  # some systems refuse to read more than 2 GiB in one call
_VANISHED = 30_000  # ms without a word from a launcher to which something was sent; keepalive sees the rest
_LENGTH = struct.Struct("!I")


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
        self.number = 0  # a higher one is newer
        self.sent = 0  # bytes that the socket has taken, headers and encryption included
        self.broken = False  # no more can be sent
        self.drained = False  # and no more will be received
        self._sock = sock
        self._file = sock.fileno()  # also when it is closed: to be told from others
        self._name = str(them.peer)
        self.wait = wait  # seconds for which nobody may read what is sent
        # How to wait until more can be sent. Whoever does may have to read meanwhile, see `engine`.
        self.until_writable: Callable[[Channel, float], bool] = writable
        self._lock = threading.RLock()  # for the connection may end while its sender reads
        self._low = 1
        self._prefix = memoryview(bytearray(PREFIX_SIZE))
        self._seal = _Seal(keys.sending) if keys else None
        self._in = _Open(keys.receiving, sock, self._name) if keys else _Plain(sock)
        # A blocking socket with a timeout costs no poll() per call, as settimeout would.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _interval(STALL))

    def fileno(self) -> int:
        return self._file

    @property
    def ahead(self) -> bool:
        """Whether bytes of a next message have been read already."""
        return self._in.ahead

    def available(self) -> int:
        """How many bytes have arrived and are not yet read."""
        size = array.array("i", [0])
        fcntl.ioctl(self._sock, termios.FIONREAD, size)
        return size[0]

    def send(self, header: Header, buffers: Sequence[memoryview] = ()) -> None:
        """Sends a message. Raises OSError if the connection broke, and BlockingIOError if nobody reads."""
        chunks = [memoryview(encode(header)), *(view for view in buffers if view.nbytes)]
        with self._lock:
            if self.broken:
                raise ConnectionError("the connection is closed")
            try:
                if self._seal:
                    for record in self._seal.records(chunks):
                        self._send_all([record])
                else:
                    self._send_all(chunks)
            except BaseException:
                self.close()  # half a message may be out: nothing sensible can follow it
                raise

    def _send_all(self, chunks: list[memoryview]) -> None:
        first = 0
        while True:
            try:
                sent = self._sock.sendmsg(chunks[first : first + _VECTORS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not self.until_writable(self, self.wait):
                    raise
                continue
            self.sent += sent
            while first < len(chunks) and sent >= chunks[first].nbytes:
                sent -= chunks[first].nbytes
                first += 1
            if first == len(chunks):
                return
            chunks[first] = chunks[first][sent:]

    def receive_header(self) -> Header:
        """The header of the next message. Its inline tensors must then be received, in order."""
        self.receive_into(self._prefix)
        body = bytearray(header_length(self._prefix, self._name))
        self.receive_into(memoryview(body))
        return decode_header(body, self._name, self.bounds)

    def receive_into(self, view: memoryview) -> None:
        """Fills the bytes of `view`."""
        done = 0
        while done < view.nbytes:
            done += self._in.read_some(view[done:], wait=True)

    def receive_some(self, view: memoryview) -> int:
        """Fills as much of `view` as has arrived; how many bytes that were."""
        return self._in.read_some(view, wait=False)

    def expect(self, nbytes: int) -> None:
        """Counts as readable when a good part of so many bytes is there (1: whatever comes)."""
        low = max(1, self._in.wanted(nbytes))
        if low != self._low:
            self._low = low
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)

    def close(self) -> None:
        """Ends the connection for both directions; a thread that is blocked in it gets an OSError."""
        self.broken = True
        hang_up(self._sock)

    def release(self) -> None:
        """Closes the socket itself. For the thread that receives, so that no other is using its number."""
        self.close()
        with self._lock:
            self._sock.close()


def writable(channel: Channel, timeout: float) -> bool:
    """Waits until a connection takes more, or is broken; False when time is over."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLOUT)
    return bool(poll.poll(min(timeout, 1e6) * 1000))


def _interval(seconds: float) -> bytes:
    seconds = max(seconds, 0.001)
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


class _Seal:
    """Turns messages into encrypted records."""

    def __init__(self, key: bytes) -> None:
        self._cipher = _cipher(key)
        self._into = getattr(self._cipher, "encrypt_into", None)
        self._count = 0
        self._scratch = memoryview(bytearray(_LENGTH.size + _WRITE + _TAG))

    def records(self, chunks: list[memoryview]) -> Any:
        """The records of a message, one after another in the same memory."""
        if sum(chunk.nbytes for chunk in chunks) <= _SMALL:
            chunks = [memoryview(b"".join(chunks))]
        for chunk in chunks:
            for start in range(0, chunk.nbytes, _WRITE):
                yield self._record(chunk[start : start + _WRITE])

    def _record(self, plain: memoryview) -> memoryview:
        length = _LENGTH.pack(plain.nbytes)
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        record = self._scratch[: _LENGTH.size + plain.nbytes + _TAG]
        record[: _LENGTH.size] = length
        if self._into:
            self._into(nonce, plain, length, record[_LENGTH.size :])
        else:
            record[_LENGTH.size :] = self._cipher.encrypt(nonce, plain, length)
        return record


class _Plain:
    """Reads small pieces ahead, so that a small message costs one system call, and large ones directly."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ahead = memoryview(bytearray(_AHEAD))
        self._rest = self._ahead[:0]

    @property
    def ahead(self) -> bool:
        return bool(self._rest)

    def read_some(self, view: memoryview, wait: bool) -> int:
        """How many bytes are in `view` now: all or most that it takes if told to wait, else what is there."""
        if not self._rest:
            if view.nbytes >= _AHEAD:
                return receive(self._sock, view, socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT)
            got = receive(self._sock, self._ahead, 0 if wait else socket.MSG_DONTWAIT)
            self._rest = self._ahead[:got]
        return _move(self, view)

    def wanted(self, nbytes: int) -> int:
        return min(nbytes, _GOOD_PART)


class _Open:
    """Reads encrypted records as one stream of bytes, where possible straight into their destination."""

    def __init__(self, key: bytes, sock: socket.socket, name: str) -> None:
        self._cipher = _cipher(key)
        self._into = getattr(self._cipher, "decrypt_into", None)
        self._sock = sock
        self._name = name
        self._count = 0
        self._record = memoryview(bytearray(_LENGTH.size + _WRITE + _TAG))
        self._got = 0  # bytes of the record
        self._need = _LENGTH.size
        self._rest = memoryview(b"")

    @property
    def ahead(self) -> bool:
        return bool(self._rest)

    def read_some(self, view: memoryview, wait: bool) -> int:
        """How many bytes are in `view` now: some if told to wait, else what is there."""
        if not self._rest:
            while not self._complete():
                flags = socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT
                got = receive(self._sock, self._record[self._got : self._need], flags)
                if not got:
                    return 0
                self._got += got
            if self._need - _LENGTH.size - _TAG <= view.nbytes:
                return self._decrypt(view)
            plain = memoryview(bytearray(self._need - _LENGTH.size - _TAG))
            self._decrypt(plain)
            self._rest = plain
        return _move(self, view)

    def wanted(self, nbytes: int) -> int:
        # Less than a record may be left of the message, and part of that may be here.
        return min(nbytes, self._need - self._got, _GOOD_PART)

    def _complete(self) -> bool:
        """Whether a record is here to its end."""
        if self._got < self._need or self._need > _LENGTH.size:
            return self._got == self._need
        (size,) = _LENGTH.unpack(self._record[: _LENGTH.size])
        if not 0 < size <= RECORD:
            raise WireError(f"{self._name} sent a record of {size} bytes, not of 1 to {RECORD}")
        self._need = _LENGTH.size + size + _TAG
        if len(self._record) < self._need:
            length, self._record = self._record, memoryview(bytearray(_LENGTH.size + RECORD + _TAG))
            self._record[: _LENGTH.size] = length[: _LENGTH.size]
        return False

    def _decrypt(self, view: memoryview) -> int:
        """Puts the text of the record into `view`; how many bytes that are."""
        length, sealed = bytes(self._record[: _LENGTH.size]), self._record[_LENGTH.size : self._need]
        plain = view[: len(sealed) - _TAG]
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        self._got, self._need = 0, _LENGTH.size
        try:
            if self._into:
                self._into(nonce, sealed, length, plain)
            else:
                plain[:] = self._cipher.decrypt(nonce, sealed, length)
        except Exception:  # InvalidTag, which is not imported here
            raise WireError(f"bytes from {self._name} were changed on the way") from None
        return len(plain)


def _move(source: _Plain | _Open, view: memoryview) -> int:
    """Takes bytes that were read ahead."""
    size = min(len(source._rest), view.nbytes)
    view[:size] = source._rest[:size]
    source._rest = source._rest[size:]
    return size


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def receive(sock: socket.socket, view: memoryview, flags: int) -> int:
    """Bytes received into `view`; with MSG_DONTWAIT there may be none."""
    try:
        got = sock.recv_into(view[:_AT_ONCE], 0, flags)
    except BlockingIOError:
        if flags & socket.MSG_DONTWAIT:
            return 0
        raise
    if not got:
        raise ConnectionError("the connection was closed")
    return got


def hang_up(sock: socket.socket) -> None:
    """Wakes whoever is blocked in this socket, and makes every later use of it fail."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address where others find it."""
    kind, rest = split(address)
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
        reachable = socket.gethostname() if host in ("", "0.0.0.0", "[::]") else host
        return sock, f"tcp:{reachable}:{sock.getsockname()[1]}"
    if not rest:
        name = f"polyrhythm-{os.urandom(8).hex()}"
        rest = f"@{name}" if sys.platform == "linux" else f"{tempfile.mkdtemp()}/{name[-8:]}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_unix_name(rest))
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    return sock, f"unix:{rest}"


def unlink(address: str) -> None:
    """Removes what a listening unix socket leaves in the file system: nothing on Linux."""
    kind, rest = split(address)
    if kind == "unix" and not rest.startswith("@"):
        with contextlib.suppress(OSError):
            os.unlink(rest)
            os.rmdir(os.path.dirname(rest))


def dial(address: str, timeout: float = TIMEOUT) -> socket.socket:
    """A socket connected to an address."""
    kind, rest = split(address)
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(_unix_name(rest))
    except OSError:
        sock.close()
        raise
    return sock


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
    """Shakes hands on a new connection. Arenas are only offered to a peer that sees the same ones."""
    tcp = sock.family != socket.AF_UNIX
    if tcp:
        _tune(sock)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    them, keys = shake(sock, me, key, dialed=dialed, encrypt=encrypt and tcp, where=where, timeout=timeout)
    if tcp and HOST in (me.peer.role, them.peer.role) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED)
    if not me.host or them.host != me.host:
        bounds = Bounds(bounds.inline)
    return Channel(sock, them, keys, bounds, wait)


def split(address: str) -> tuple[str, str]:
    """The kind of an address and the rest of it."""
    kind, _, rest = address.partition(":")
    if kind == "tcp":
        _, colon, port = rest.rpartition(":")
        if not colon:
            return kind, f"{rest}:0"
        if port.isdecimal():
            return kind, rest
    elif kind == "unix":
        return kind, rest
    raise UsageError(f"{address!r} is no address: write unix: or unix:@name or tcp:host:port")


def _unix_name(rest: str) -> str:
    return "\0" + rest[1:] if rest.startswith("@") else rest


def _tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a host that vanished is noticed within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
