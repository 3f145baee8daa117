"""Works: operations of a process group that have begun, as torch waits for them.

A work that has failed must raise in `wait`, and its future must fail, too. `torch.futures.Future` can only
fail in a callback (`set_exception` stores a value, which C++ takes for a result), so the future that torch
gets is one with a callback that raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from polyrhythm.core.errors import WaitError

_POLL = 0.0005  # seconds between two looks at a work whose wait has a timeout of its own


class GroupWork(dist.Work):
    """An operation that has begun. Subclasses say how to wait for it."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.done = False
        self._error: BaseException | None = None
        self._tensors = list(tensors)
        self._settled: Future[Any] | None = None  # gets the result, or the error as a value
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    def finish(self, error: BaseException | None = None) -> None:
        """The operation is complete, or has failed."""
        with self._lock:
            self._error, self.done = error, True
            settled = self._settled
        if settled is not None:
            self._settle(settled)

    def block(self, timeout: float | None) -> None:
        """Waits until the work is done, at most so many seconds. Overridden by subclasses."""
        raise NotImplementedError

    def progress(self) -> None:
        """Called when torch asks whether the work is done."""

    # --- what torch calls ---------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.done:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            self.block(seconds if seconds > 0 else None)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self.done:
            self.progress()
        return self.done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            self._settled = Future()
            self._future = self._settled.then(_value)
            done = self.done
        if done:
            self._settle(self._settled)
        return self._future

    def _settle(self, settled: Future[Any]) -> None:
        settled.set_result(self._tensors if self._error is None else self._error)


def _value(settled: Future[Any]) -> Any:
    value = settled.value()
    if isinstance(value, BaseException):
        raise value
    return value


class DoneWork(GroupWork):
    """A work that is done."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__(tensors)
        self.done = True


class AllWork(GroupWork):
    """Several works as one."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__([tensor for work in works for tensor in work.result()])
        self._works = works

    def block(self, timeout: float | None) -> None:
        given = None if timeout is None else timedelta(seconds=timeout)
        error: BaseException | None = None
        for work in self._works:
            try:
                work.wait(given)
            except Exception as failed:
                error = error or failed
        self.finish(error)

    def progress(self) -> None:
        if all(work.is_completed() for work in self._works):
            self.block(None)

    def get_future(self) -> Future[Any]:
        self.wait()
        return super().get_future()


def poll(done: Callable[[], bool], timeout: float, what: str) -> None:
    """Waits until `done()`; raises WaitError after so many seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise WaitError(f"waited {timeout:.2f} s in {what}, the timeout of this call")
        time.sleep(_POLL)
