"""Holds Ctrl-C and SIGTERM back while numba compiles, and delivers them right after.

LLVM calls back into Python while it emits code, through ctypes. Python runs signal handlers between any two
bytecodes of the main thread, so also in such a callback, and there ctypes prints and drops what a handler
raises: the KeyboardInterrupt is lost, and often numba then fails because the callback did not do its work.
In a sweep over compiling `topk`, that happened to 1 of 10 signals.
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
    """Stands in for the handler of a signal: remembers that the signal came, or passes it on once released.

    It passes signals on because an exception from another handler can keep `held` from taking it out again.
    """

    def __init__(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.number, self.handler = number, handler
        self.holding, self.came = True, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.holding:
            self.came = True
        else:
            self.handler(number, frame)


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
    handlers = [(number, signal.getsignal(number)) for number in SIGNALS]
    helds = [
        _Held(number, handler)
        for number, handler in handlers
        if callable(handler) and not (isinstance(handler, _Held) and handler.holding)
    ]
    try:
        for each in helds:
            signal.signal(each.number, each)
        yield
    finally:
        for each in helds:
            each.holding = False
        for each in helds:
            signal.signal(each.number, each.handler)
        for each in helds:
            if each.came:
                each.handler(each.number, sys._getframe())
