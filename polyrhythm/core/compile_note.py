"""Says in one line that loops are compiled, so that nobody takes half a minute for a run that hangs."""

from __future__ import annotations

import sys


class CompileNote:
    """Said at most once by this process in each run."""

    def __init__(self) -> None:
        self._due = True

    def say(self, lasting: bool) -> None:
        """Called before a loop is compiled; `lasting`: the result is kept for the next process."""
        if self._due:
            self._due = False
            often = "once on this machine" if lasting else "in every process, because no cache can be written"
            print(f"compiling loops with numba, {often}: this can take half a minute", file=sys.stderr)

    def begin_run(self, says: bool) -> None:
        """A run begins in this process. Of many processes one says it."""
        self._due = says


compile_note = CompileNote()
