"""Stream sockets: addresses, listening, dialing and tuning.

Addresses are `unix:@name` (Linux abstract sockets), `unix:/path` (other systems) and `tcp:host:port`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import tempfile

from polyrhythm.core.errors import UsageError
from polyrhythm.wire.handshake import TIMEOUT

_SOCKET_BUFFER = 1 << 20
_MAX_READ = 1 << 30  # some systems refuse to read more than 2 GiB in one call


def listen(address: str) -> tuple[socket.socket, str]:
    """Opens a listening socket. Returns it with the address at which others can reach it."""
    kind, location = parse_address(address)
    if kind == "tcp":
        host, _, port = location.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
        reachable = socket.gethostname() if host in ("", "0.0.0.0", "[::]") else host
        return sock, f"tcp:{reachable}:{sock.getsockname()[1]}"
    if not location:
        name = f"polyrhythm-{os.urandom(8).hex()}"
        location = f"@{name}" if sys.platform == "linux" else f"{tempfile.mkdtemp()}/{name[-8:]}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_unix_path(location))
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    return sock, f"unix:{location}"


def unlink(address: str) -> None:
    """Removes the file of a listening unix socket. Abstract sockets, as on Linux, have none."""
    kind, location = parse_address(address)
    if kind == "unix" and not location.startswith("@"):
        with contextlib.suppress(OSError):
            os.unlink(location)
            os.rmdir(os.path.dirname(location))


def dial(address: str, timeout: float = TIMEOUT) -> socket.socket:
    """Connects to an address."""
    kind, location = parse_address(address)
    if kind == "tcp":
        host, _, port = location.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(_unix_path(location))
    except OSError:
        sock.close()
        raise
    return sock


def parse_address(address: str) -> tuple[str, str]:
    """Splits an address into its kind (`tcp` or `unix`) and its location."""
    kind, _, location = address.partition(":")
    if kind == "tcp":
        _, colon, port = location.rpartition(":")
        if not colon:
            return kind, f"{location}:0"
        if port.isdecimal():
            return kind, location
    elif kind == "unix":
        return kind, location
    raise UsageError(f"{address!r} is not an address; use unix: or unix:@name or tcp:host:port")


def is_same_user(sock: socket.socket) -> bool:
    """False if the other end of a unix socket is a process of another user."""
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def tune(sock: socket.socket) -> None:
    """Sends small TCP messages without delay and detects a vanished host within half a minute."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def set_receive_timeout(sock: socket.socket, seconds: float) -> None:
    """Limits how long a blocking read waits. Unlike `settimeout` it costs no poll() per call."""
    seconds = max(seconds, 0.001)
    interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)


def receive_into(sock: socket.socket, view: memoryview, flags: int) -> int:
    """Receives into `view` and returns the number of bytes, which may be 0 only with MSG_DONTWAIT."""
    try:
        received = sock.recv_into(view[:_MAX_READ], 0, flags)
    except BlockingIOError:
        if flags & socket.MSG_DONTWAIT:
            return 0
        raise
    if not received:
        raise ConnectionError("the connection was closed")
    return received


def wait_writable(fd: int, timeout: float) -> bool:
    """Waits until a socket accepts more bytes or is broken. False on timeout."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(min(timeout, 1e6) * 1000))


def shut_down(sock: socket.socket) -> None:
    """Unblocks every thread that uses the socket and makes later calls fail."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _unix_path(location: str) -> str:
    return "\0" + location[1:] if location.startswith("@") else location
