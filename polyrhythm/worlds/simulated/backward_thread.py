"""Forward and backward passes in the middle of which a simulated worker waits for others.

The autograd engine keeps one queue of work per thread. If a worker gave up control inside a backward pass,
the next worker's pass would use the same queue, and each would execute nodes of the other's graph: four such
workers hung, and beyond sixty nested passes the engine switches to threads of its own. So such a backward
pass runs in its own thread, in turns with its fiber: one of the two is always blocked, and the fiber does the
waiting.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch


class BackwardThread:
    """Runs a function in a thread. The function lets its fiber wait for other nodes."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._body,), name="polyrhythm backward")

    @property
    def here(self) -> bool:
        """True if the caller is inside the function."""
        return threading.current_thread() is self._thread

    def run(self) -> None:
        """Runs the function to its end. Called by the fiber."""
        self._thread.start()
        try:
            while (wait := self._asked.get()) is not None:
                try:
                    wait()
                except BaseException as error:  # also GreenletExit: the engine has to unwind
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
        """Lets the fiber call this, and blocks until it returns. Called by the function."""
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
    """Removes the saved-tensor hooks of this thread during a wait in a forward pass.

    Checkpointing sets such hooks around each forward pass. Other workers run in this thread during the wait,
    and must not save their tensors with the hooks of this one. PyTorch before 2.8 cannot list the hooks, and
    there a simulated checkpointed model fails when a worker is asked to recompute another's forward pass.
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
