"""ResultFile: the file with the final parameters, which the workers that hold one model write in parts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.core.result_part import ResultPart

BLOCK = 1 << 20  # bytes that are read at a time


class ResultFile:
    """A file that is written in parts, in any order. `finished` is called with it when it is complete."""

    def __init__(self, file: BinaryIO, finished: Callable[[BinaryIO], None]) -> None:
        self._file, self._finished = file, finished

    def write(self, part: ResultPart, content: Sequence[bytes | memoryview]) -> None:
        """Writes bytes where they belong. PolyrhythmError if that fails."""
        whole = memoryview(content[0] if len(content) == 1 else b"".join(content))
        try:
            at = 0
            for start, stop in part.places(len(whole)):
                self._file.seek(start)
                self._file.write(whole[at : at + stop - start])
                at += stop - start
        except (OSError, ValueError) as error:
            raise _failed(error) from None

    def finish(self, order: Iterable[tuple[int, int]]) -> str:
        """The file is complete. Returns the SHA-256 of these ranges of it, in their order."""
        digest = hashlib.sha256()
        try:
            for start, stop in order:
                self._file.seek(start)
                for at in range(start, stop, BLOCK):
                    digest.update(self._file.read(min(BLOCK, stop - at)))
            self._finished(self._file)
        except OSError as error:
            raise _failed(error) from None
        return digest.hexdigest()


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

    return ResultFile(file, finish)


def _failed(error: Exception) -> PolyrhythmError:
    return PolyrhythmError(f"the final parameters could not be written: {getattr(error, 'strerror', error)}")
