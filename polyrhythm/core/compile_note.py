"""Says in one line that this process compiles, so that nobody takes half a minute for a run that hangs."""

from __future__ import annotations

import sys

_silent = False


def say_once(lasting: bool) -> None:
    """Called before a loop is compiled; `lasting`: the result is kept for the next process."""
    global _silent
    if not _silent:
        _silent = True
        often = "once on this machine" if lasting else "in every process, because no cache can be written"
        print(f"compiling loops with numba, {often}: this can take half a minute", file=sys.stderr, flush=True)


def begin_run(says: bool) -> None:
    """Called when a run begins in this process: of many processes one says it."""
    global _silent
    _silent = not says
