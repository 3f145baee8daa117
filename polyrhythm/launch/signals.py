"""Signals that end a run, and exit statuses in words."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from polyrhythm.core.errors import Interrupted

TERMINATION = (signal.SIGINT, signal.SIGTERM)  # sent by users and process managers to end a run


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Turns Ctrl-C and SIGTERM into `Interrupted`."""

    def interrupt(number: int, _: object) -> None:
        for each in TERMINATION:
            signal.signal(each, signal.SIG_IGN)  # ignore further signals during cleanup
        raise Interrupted("interrupted")

    return handled_by(interrupt)


@contextlib.contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Installs a handler for both signals. Only the main thread can do that; other threads get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in TERMINATION}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def cause(status: int) -> str:
    """Describes the exit status of a process."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return "ended before it had finished" if status == 0 else f"ended with exit code {status}"
