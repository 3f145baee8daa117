"""Passes in the middle of which a simulated worker waits for others.

The autograd engine keeps one queue of work per thread. If a worker gave up control inside a backward pass,
the next worker's pass would begin in the same queue, and each would do the other's work: in a trial four of
them hung, and beyond sixty the engine goes on in threads of its own. So a backward pass runs in a thread of
its own, hand over hand with its fiber: one of the two always stands still, and what waits is done by the
fiber.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch


class BackwardThread:
    """One function that runs beside its fiber, and asks it to wait."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._body,), name="polyrhythm backward")

    @property
    def here(self) -> bool:
        """Whether this is asked from inside the function."""
        return threading.current_thread() is self._thread

    def run(self) -> None:
        """Runs the function to its end; called by the fiber."""
        self._thread.start()
        try:
            while (wait := self._asked.get()) is not None:
                try:
                    wait()
                except BaseException as error:  # the end of the worker too: the engine has to unwind
                    self._done.put(error)
                else:
                    self._done.put(None)
        except BaseException as error:  # Ctrl-C while the function ran
            self._done.put(error)
            raise
        finally:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def wait(self, function: Callable[[], None]) -> None:
        """Has the fiber run this, and stands still meanwhile."""
        self._asked.put(function)
        error = self._done.get()
        if error is not None:
            raise error

    def _body(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._asked.put(None)


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Around a wait in a forward pass: whoever runs meanwhile must not save tensors through this one's hooks.

    They are the thread's, and checkpointing sets some around each forward. PyTorch before 2.8 does not show
    them: there a checkpointed model ends with an error, when a worker is asked to recompute for another.
    """
    own, autograd = [], torch._C._autograd
    top = getattr(autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None)
    while (pair := top(True)) is not None:
        own.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(own):
            autograd._push_saved_tensors_default_hooks(*pair)
