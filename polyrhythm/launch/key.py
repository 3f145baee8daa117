"""The key of a run that several hosts share: 32 bytes in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from polyrhythm.core.errors import UsageError

SIZE = 32


def make(path: Path) -> bytes:
    """Reads the key in this file; makes the file if it does not exist."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read(path)
    except OSError as error:
        raise UsageError(f"cannot write the key {path}: {error.strerror}") from None
    key = secrets.token_bytes(SIZE)
    with os.fdopen(file, "wb") as writer:
        writer.write(key)
    return key


def read(path: Path) -> bytes:
    """Reads the key in this file; refuses a file that other users can read."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            key = file.read(SIZE + 1) if stat.S_ISREG(status.st_mode) else b""
    except FileNotFoundError:
        raise UsageError(
            f"there is no key {path}; copy it from the host where `polyrhythm run` has made it"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror}") from None
    if status.st_mode & 0o077:
        raise UsageError(f"other users can read the key {path}; restrict it (chmod 600 {path})")
    if status.st_uid != os.geteuid():
        raise UsageError(f"the key {path} is another user's; use one of your own")
    if len(key) != SIZE:
        raise UsageError(
            f"{path} is not a key: it does not have {SIZE} bytes; `polyrhythm run --key` makes one"
        )
    return key
