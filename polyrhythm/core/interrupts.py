"""Holds Ctrl-C and SIGTERM back while numba compiles, and delivers them right after.

LLVM calls back into Python while it emits code, through ctypes. Python runs signal handlers between any two
bytecodes of the main thread, so also in such a callback, and there ctypes prints and drops what a handler
raises: the KeyboardInterrupt is lost, and often numba then fails because the callback did not do its work.
In a sweep over compiling `topk`, that happened to 5 of 60 signals.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Held:
    """Stands in for the handler of a signal while it is held, and remembers that the signal came."""

    def __init__(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.number, self.handler = number, handler
        self.holding, self.came = True, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.holding:
            self.came = True
        else:
            self.handler(number, frame)

    def release(self) -> None:
        """Puts the handler back, and calls it if its signal came."""
        self.holding = False  # from here on it passes on what comes before the handler is back
        current: object = signal.getsignal(self.number)
        if current is self:
            signal.signal(self.number, self.handler)
        if self.came:
            self.handler(self.number, sys._getframe())


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delays Python's handlers of SIGINT and SIGTERM to the end of this context.

    Does nothing outside the main thread, where no handler ever runs. Inside another `held`, the outer one
    delivers. Signals that Python does not handle, such as a SIGTERM that just ends the process, still act at
    once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.ExitStack() as stack:  # which releases each signal, even if the handler of another raises
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and not (isinstance(handler, _Held) and handler.holding):
                stack.callback((each := _Held(number, handler)).release)
                signal.signal(number, each)
        yield
