"""The bytes of a connection: plain within a host, encrypted between hosts.

Within a host bytes are plain, because a process that could read them could also read the node's memory.
Between hosts they travel as records

    plaintext length u32 | AES-256-GCM ciphertext and tag

The nonce counts records and the length is authenticated, so no record can be changed, dropped or repeated.
"""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from polyrhythm.core.errors import WireError
from polyrhythm.wire.sockets import receive_into

MAX_RECORD = 1 << 20
_RECORD = 1 << 18  # plaintext bytes per record that we write: larger records measured no faster
_SMALL = 1 << 16  # a message up to this size becomes one record
_TAG = 16
_READ_AHEAD = 1 << 11
_WAKE_AT = 1 << 17  # received bytes for which it pays to wake up in the middle of a message
_LENGTH = struct.Struct("!I")


class StreamReader(ABC):
    """Reads the incoming bytes of a connection. Bytes read too early are kept in `buffered`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.buffered = memoryview(b"")

    @abstractmethod
    def read_some(self, view: memoryview, wait: bool) -> int:
        """Fills the start of `view` and returns the number of bytes; 0 only if not told to wait."""

    @abstractmethod
    def low_water_mark(self, nbytes: int) -> int:
        """How many bytes should arrive before it pays to read on, if `nbytes` of a message are missing."""

    def _take_buffered(self, view: memoryview) -> int:
        size = min(len(self.buffered), view.nbytes)
        view[:size] = self.buffered[:size]
        self.buffered = self.buffered[size:]
        return size


class PlainReader(StreamReader):
    """Reads plain bytes: small reads through a buffer, so that a small message costs one system call."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._memory = memoryview(bytearray(_READ_AHEAD))

    def read_some(self, view: memoryview, wait: bool) -> int:
        if not self.buffered:
            if view.nbytes >= _READ_AHEAD:
                return receive_into(self._sock, view, socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT)
            received = receive_into(self._sock, self._memory, 0 if wait else socket.MSG_DONTWAIT)
            self.buffered = self._memory[:received]
        return self._take_buffered(view)

    def low_water_mark(self, nbytes: int) -> int:
        return min(nbytes, _WAKE_AT)


class RecordReader(StreamReader):
    """Decrypts records, straight into the destination if they fit there."""

    def __init__(self, key: bytes, sock: socket.socket, peer: str) -> None:
        super().__init__(sock)
        self._cipher = _cipher(key)
        self._decrypt_into = getattr(self._cipher, "decrypt_into", None)
        self._peer = peer
        self._count = 0
        self._record = memoryview(bytearray(_LENGTH.size + _RECORD + _TAG))
        self._received = 0  # bytes of the record
        self._needed = _LENGTH.size

    def read_some(self, view: memoryview, wait: bool) -> int:
        if not self.buffered:
            while not self._is_complete():
                flags = socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT
                received = receive_into(self._sock, self._record[self._received : self._needed], flags)
                if not received:
                    return 0
                self._received += received
            if self._needed - _LENGTH.size - _TAG <= view.nbytes:
                return self._decrypt(view)
            plain = memoryview(bytearray(self._needed - _LENGTH.size - _TAG))
            self._decrypt(plain)
            self.buffered = plain
        return self._take_buffered(view)

    def low_water_mark(self, nbytes: int) -> int:
        # The rest of the message may be shorter than a record, and part of it may have been received.
        return min(nbytes, self._needed - self._received, _WAKE_AT)

    def _is_complete(self) -> bool:
        """True if a whole record has been received. Learns its size from its length field."""
        if self._received < self._needed or self._needed > _LENGTH.size:
            return self._received == self._needed
        (size,) = _LENGTH.unpack(self._record[: _LENGTH.size])
        if not 0 < size <= MAX_RECORD:
            raise WireError(f"{self._peer} sent a record of {size} bytes, not of 1 to {MAX_RECORD}")
        self._needed = _LENGTH.size + size + _TAG
        if len(self._record) < self._needed:
            length, self._record = self._record, memoryview(bytearray(_LENGTH.size + MAX_RECORD + _TAG))
            self._record[: _LENGTH.size] = length[: _LENGTH.size]
        return False

    def _decrypt(self, view: memoryview) -> int:
        """Decrypts the record into `view` and returns the number of bytes."""
        length, sealed = bytes(self._record[: _LENGTH.size]), self._record[_LENGTH.size : self._needed]
        plain = view[: len(sealed) - _TAG]
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        self._received, self._needed = 0, _LENGTH.size
        try:
            if self._decrypt_into:
                self._decrypt_into(nonce, sealed, length, plain)
            else:
                plain[:] = self._cipher.decrypt(nonce, sealed, length)
        except Exception:  # InvalidTag, which is not imported here
            raise WireError(f"bytes from {self._peer} were changed on the way") from None
        return len(plain)


class RecordWriter:
    """Encrypts messages into records."""

    def __init__(self, key: bytes) -> None:
        self._cipher = _cipher(key)
        self._encrypt_into = getattr(self._cipher, "encrypt_into", None)
        self._count = 0
        self._memory = memoryview(bytearray(_LENGTH.size + _RECORD + _TAG))

    def records(self, chunks: list[memoryview]) -> Iterator[memoryview]:
        """Yields the records of a message. Each overwrites the previous one."""
        if sum(chunk.nbytes for chunk in chunks) <= _SMALL:
            chunks = [memoryview(b"".join(chunks))]
        for chunk in chunks:
            for start in range(0, chunk.nbytes, _RECORD):
                yield self._record(chunk[start : start + _RECORD])

    def _record(self, plain: memoryview) -> memoryview:
        length = _LENGTH.pack(plain.nbytes)
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        record = self._memory[: _LENGTH.size + plain.nbytes + _TAG]
        record[: _LENGTH.size] = length
        if self._encrypt_into:
            self._encrypt_into(nonce, plain, length, record[_LENGTH.size :])
        else:
            record[_LENGTH.size :] = self._cipher.encrypt(nonce, plain, length)
        return record


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
