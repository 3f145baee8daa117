"""ReceivedResult: the final parameters as workers send them. The recorder writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polyrhythm.coordination.ports import Recorder
from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.core.result_part import ResultPart
from polyrhythm.record.result_file import ResultFile


class ReceivedResult:
    """Takes a whole model of one worker, or the parts of one that several workers hold."""

    def __init__(self, record: Recorder, fail: Callable[[str], None]) -> None:
        self._record, self._fail = record, fail
        self._file: ResultFile | None = None  # of which parts have arrived
        self._over = False  # no more parts are taken

    def add(self, part: ResultPart, content: Sequence[memoryview]) -> None:
        """A worker has sent a part, lent until this returns."""
        if self._over:
            return
        try:
            self._file = self._file or self._record.consensus_file(part.size)
            self._file.write(part, content)
        except PolyrhythmError as error:
            self.discard()
            self._fail(str(error))

    def complete(self, digest: str, file: Sequence[memoryview]) -> str:
        """A worker has sent the parts of a whole file. Returns the digest of the parameters; "" if it fails.

        Without a digest the parts are there, and these are the beginning and end of each parameter in the
        file, as numbers of 64 bits.
        """
        try:
            if digest:
                self._record.consensus(file)
                return digest
            if self._file is None:
                raise PolyrhythmError("the parts of the final parameters were not received")
            places = iter(memoryview(b"".join(file)).cast("q"))
            found = self._file.finish(zip(places, places, strict=True))
        except PolyrhythmError as error:
            self.discard()
            self._fail(str(error))
            return ""
        self._file, self._over = None, True
        return found

    def discard(self) -> None:
        """The run has failed: parts that have arrived are removed, and those that follow are ignored."""
        if self._file is not None:
            self._file.discard()
        self._file, self._over = None, True
