"""How two strangers on a new connection become peers, and the keys that they then share.

Both send a hello of fixed size (nonce, X25519 public key, who they are), then a proof: the HMAC-SHA256 under
the run key of the side they are on and of both hellos. So each proof is fresh, binds what both said, and
cannot be sent back to its maker. Until it is right, nothing in the hello is believed and no more is read.

Between hosts, HKDF-SHA256 of the X25519 secret, salted by the run key, gives one AES-256-GCM key per
direction.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from polyrhythm.core.errors import UsageError, WireError
from polyrhythm.core.peer import Peer

TIMEOUT = 5.0
VERSION = 1
_MAGIC = b"PRHS"
_HELLO = struct.Struct("!4sBB32s32s16s16sI64s")
_DIALED, _ACCEPTED = b"polyrhythm: the side that dialed", b"polyrhythm: the side that accepted"


@dataclass(frozen=True)
class Identity:
    """Who a node is. `host` names the arenas it can see; `instance` differs after every restart."""

    peer: Peer
    host: str = ""
    instance: bytes = bytes(16)

    def check(self) -> None:
        if len(self.peer.role.encode()) > 16 or len(self.host.encode()) > 64:
            raise UsageError(f"{self.peer} on host {self.host!r}: a role has at most 16 bytes, a host id 64")


@dataclass(frozen=True)
class Keys:
    """AES-256-GCM keys of a connection."""

    sending: bytes
    receiving: bytes


def shake(
    sock: socket.socket,
    me: Identity,
    key: bytes,
    *,
    dialed: bool,
    encrypt: bool,
    where: str,
    timeout: float = TIMEOUT,
) -> tuple[Identity, Keys | None]:
    """Proves to the other end that we know the run key and has it prove the same; who it is, and the keys."""
    deadline = time.monotonic() + timeout
    private, public = _ephemeral() if encrypt else (None, bytes(32))
    mine = _HELLO.pack(
        _MAGIC,
        VERSION,
        encrypt,
        os.urandom(32),
        public,
        me.instance,
        me.peer.role.encode(),
        me.peer.rank,
        me.host.encode(),
    )
    sock.settimeout(timeout)
    sock.sendall(mine)
    theirs = _read(sock, _HELLO.size, deadline)
    magic, version, encrypted, _, public, instance, role, rank, host = _HELLO.unpack(theirs)
    if magic != _MAGIC or version != VERSION:
        raise WireError(f"{where} did not greet as a polyrhythm node of version {VERSION}")

    transcript = mine + theirs if dialed else theirs + mine
    my_side, their_side = (_DIALED, _ACCEPTED) if dialed else (_ACCEPTED, _DIALED)
    sock.sendall(hmac.digest(key, my_side + transcript, "sha256"))
    proof = _read(sock, 32, deadline)
    if not hmac.compare_digest(proof, hmac.digest(key, their_side + transcript, "sha256")):
        raise WireError(f"{where} does not have the key of this run")
    if bool(encrypted) != encrypt:
        raise WireError(
            f"{where} {'encrypts' if encrypted else 'does not encrypt'} and this node does the opposite"
        )
    try:
        them = Identity(Peer(role.rstrip(b"\0").decode(), rank), host.rstrip(b"\0").decode(), instance)
    except UnicodeDecodeError:
        raise WireError(f"{where} gave a name that is not text") from None
    keys = None
    if private is not None:
        secret = _agree(private, public, where)
        out, back = (_derive(secret, key, side + transcript) for side in (my_side, their_side))
        keys = Keys(out, back)
    sock.settimeout(None)
    return them, keys


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left)
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed during the handshake")
        data += more
    return data


def _ephemeral() -> tuple[Any, bytes]:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw()


def _agree(private: Any, public: bytes, where: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        secret: bytes = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise WireError(f"{where} sent a public key that no honest node sends") from None
    return secret


def _derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869) of one block."""
    return hmac.digest(hmac.digest(salt, secret, "sha256"), hashlib.sha256(info).digest() + b"\x01", "sha256")
