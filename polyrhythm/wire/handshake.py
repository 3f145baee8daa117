"""The handshake on a new connection: mutual authentication and key agreement.

Both ends send a hello of fixed size (nonce, X25519 public key, identity), then a proof: the HMAC-SHA256,
under the run key, of which end they are (dialing or accepting) and of both hellos. So a proof cannot be
replayed or reflected, and nothing in the hellos can be changed. Until the proof is verified nothing in the
hello is trusted and nothing more is read.

Between hosts, HKDF-SHA256 of the X25519 secret, salted with the run key, yields one AES-256-GCM key per
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
    """Identifies a node. `host` names the arenas that it can see; `instance` is random for each process."""

    peer: Peer
    host: str = ""
    instance: bytes = bytes(16)

    def check(self) -> None:
        if len(self.peer.role.encode()) > 16 or len(self.host.encode()) > 64:
            raise UsageError(f"{self.peer} on host {self.host!r}: a role may have 16 bytes, a host id 64")


@dataclass(frozen=True)
class Keys:
    """The AES-256-GCM keys of a connection, one per direction."""

    sending: bytes
    receiving: bytes


def authenticate(
    sock: socket.socket,
    me: Identity,
    key: bytes,
    *,
    dialed: bool,
    encrypt: bool,
    where: str,
    timeout: float = TIMEOUT,
) -> tuple[Identity, Keys | None]:
    """Authenticates both ends by the run key. Returns the identity of the other end and the session keys."""
    deadline = time.monotonic() + timeout
    private, public = _key_pair() if encrypt else (None, bytes(32))
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
        raise WireError(f"{where} is not a polyrhythm node with handshake version {VERSION}")

    transcript = mine + theirs if dialed else theirs + mine
    my_side, their_side = (_DIALED, _ACCEPTED) if dialed else (_ACCEPTED, _DIALED)
    sock.sendall(hmac.digest(key, my_side + transcript, "sha256"))
    proof = _read(sock, 32, deadline)
    if not hmac.compare_digest(proof, hmac.digest(key, their_side + transcript, "sha256")):
        raise WireError(f"{where} does not have the key of this run")
    if bool(encrypted) != encrypt:
        raise WireError(
            f"{where} {'encrypts' if encrypted else 'does not encrypt'}; this node does the opposite"
        )
    try:
        them = Identity(Peer(role.rstrip(b"\0").decode(), rank), host.rstrip(b"\0").decode(), instance)
    except UnicodeDecodeError:
        raise WireError(f"{where} sent a name that is not valid UTF-8") from None
    keys = None
    if private is not None:
        secret = _shared_secret(private, public, where)
        sending, receiving = (_derive(secret, key, side + transcript) for side in (my_side, their_side))
        keys = Keys(sending, receiving)
    sock.settimeout(None)
    return them, keys


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake timed out")
        sock.settimeout(left)
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed during the handshake")
        data += more
    return data


def _key_pair() -> tuple[Any, bytes]:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw()


def _shared_secret(private: Any, public: bytes, where: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        secret: bytes = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise WireError(f"{where} sent an invalid public key") from None
    return secret


def _derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """One block of HKDF-SHA256 (RFC 5869)."""
    return hmac.digest(hmac.digest(salt, secret, "sha256"), hashlib.sha256(info).digest() + b"\x01", "sha256")
