"""ResultFile: the file with the final parameters, which the workers that hold one model write in parts."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.core.result_part import ResultPart

BLOCK = 1 << 20  # bytes that are read at a time


class ResultFile:
    """A file of `size` bytes that is written in parts, in any order, some perhaps more than once.

    `finished` is called with it when it is complete, or `discarded` if it will never be.
    """

    def __init__(
        self,
        file: BinaryIO,
        size: int,
        finished: Callable[[BinaryIO], None],
        discarded: Callable[[], None] = lambda: None,
    ) -> None:
        self._file, self._size, self._finished, self._discarded = file, size, finished, discarded
        self._written: set[tuple[ResultPart, int]] = set()  # with the number of bytes

    def write(self, part: ResultPart, content: Sequence[bytes | memoryview]) -> None:
        """Writes bytes where they belong. PolyrhythmError if that fails."""
        whole = memoryview(content[0] if len(content) == 1 else b"".join(content))
        try:
            if part.size != self._size:
                raise ValueError(f"a part of a file of {part.size} bytes is not of one of {self._size}")
            at = 0
            for start, stop in part.places(len(whole)):
                self._file.seek(start)
                self._file.write(whole[at : at + stop - start])
                at += stop - start
            self._written.add((part, len(whole)))
        except (OSError, ValueError) as error:
            raise _failed(error) from None

    def finish(self, order: Iterable[tuple[int, int]]) -> str:
        """All parts are written. Returns the SHA-256 of these ranges of the file, in their order.

        PolyrhythmError if a part is missing.
        """
        digest = hashlib.sha256()
        try:
            if (end := self._complete_to()) < self._size:
                raise ValueError(f"of {self._size} bytes, those from byte {end} on did not all arrive")
            for start, stop in order:
                self._file.seek(start)
                for at in range(start, stop, BLOCK):
                    digest.update(self._file.read(min(BLOCK, stop - at)))
            self._finished(self._file)
        except (OSError, ValueError) as error:
            raise _failed(error) from None
        return digest.hexdigest()

    def discard(self) -> None:
        """The file will not be complete: removes it."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._discarded()

    def _complete_to(self) -> int:
        """The number of bytes before the first one that is missing."""
        end = 0
        for start, stop in heapq.merge(*(part.places(nbytes) for part, nbytes in self._written)):
            if start > end:
                break
            end = max(end, stop)
        return end


def open_result(path: Path, size: int) -> ResultFile:
    """A file of this size, which has its name when it is complete. OSError if there is no room for it."""
    unfinished = path.with_name(f"{path.name}.part")
    file = unfinished.open("w+b")
    try:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))
    except OSError:
        file.close()
        unfinished.unlink()
        raise

    def finish(file: BinaryIO) -> None:
        file.close()
        os.replace(unfinished, path)

    return ResultFile(file, size, finish, lambda: unfinished.unlink(missing_ok=True))


def _failed(error: Exception) -> PolyrhythmError:
    return PolyrhythmError(f"the final parameters could not be written: {getattr(error, 'strerror', error)}")
