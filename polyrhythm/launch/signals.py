"""Signals that end a run, and exit statuses in words."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from polyrhythm.core.errors import Interrupted

TERMINATION = (signal.SIGINT, signal.SIGTERM)  # sent by users and process managers to end a run
STOP = 30.0  # seconds at most for an interrupted run to end in order
HINT = "interrupted: the model is saved after the present step; Ctrl-C again ends the run at once"


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Turns Ctrl-C and SIGTERM into `Interrupted`."""

    def interrupt(number: int, _: object) -> None:
        for each in TERMINATION:
            signal.signal(each, signal.SIG_IGN)  # ignore further signals during cleanup
        raise Interrupted("interrupted")

    return handled_by(interrupt)


@contextlib.contextmanager
def stoppable(stop: Callable[[], bool], say: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM calls `stop`, which arranges for an end in order; False if it cannot.

    The next one interrupts, and so does the end of the time for it. Only for what runs in the main thread.
    """
    done = threading.Event()
    watches: list[threading.Thread] = []

    def watch() -> None:
        say(HINT)  # not in the handler, which may have interrupted a print
        if not done.wait(STOP):
            os.kill(os.getpid(), signal.SIGINT)

    def handle(number: int, _: object) -> None:
        if watches or not stop():
            raise KeyboardInterrupt
        watches.append(threading.Thread(target=watch, name="polyrhythm stop", daemon=True))
        watches[0].start()

    try:
        with handled_by(handle):
            yield
    finally:
        done.set()
        for each in watches:
            each.join()


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
