"""Lane: the collectives of one process group, which are executed one after the other.

All members of a group begin the same collectives in the same order, so a lane is a queue. A thread executes
it, so that collectives overlap with what the script computes. A caller that waits does not wait for that
thread: it executes the queue itself, as far as it needs. So a collective that is waited for at once, as most
are, costs no switch between threads.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyrhythm.collectives.shared_memory import be_patient
from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.integrations.process_group.works import GroupWork, poll


class LaneWork(GroupWork):
    """A collective in a lane."""

    def __init__(self, lane: Lane, what: str, execute: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self.what, self.execute = what, execute
        self._lane = lane

    def block(self, timeout: float | None) -> None:
        if timeout is None:
            self._lane.execute_until(self)
        else:  # the thread of the lane executes it: no other way to stop waiting
            poll(lambda: self.done, timeout, self.what)


class Lane:
    """A queue of collectives.

    After an error all later ones fail with it, because the other members wait for the one that failed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: deque[LaneWork] = deque()
        # Held while a collective is executed. Reentrant: a callback of a future may begin another one.
        self._executing = threading.RLock()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, what: str, execute: Callable[[], None], tensors: Sequence[Tensor]) -> LaneWork:
        """Appends a collective."""
        work = LaneWork(self, what, execute, tensors)
        self._queue.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"polyrhythm {self._name}", daemon=True)
            self._thread.start()
        self._wake.put(True)
        return work

    def run(self, what: str, execute: Callable[[], None], tensors: Sequence[Tensor]) -> LaneWork:
        """Executes a collective in this thread, after all that are in the queue."""
        work = LaneWork(self, what, execute, tensors)
        self._queue.append(work)
        self.execute_until(work)
        return work

    def execute_until(self, work: LaneWork) -> None:
        """Executes collectives in this thread until `work` is done."""
        while not work.done:
            with self._executing:  # waits for the one that another thread executes
                if not work.done:
                    self._execute_next()

    def abort(self) -> None:
        """Lets all collectives that have not begun fail."""
        self._failure = self._failure or PolyrhythmError(f"{self._name} was aborted")

    def close(self) -> None:
        """Executes what is left, and ends the thread."""
        while self._queue:
            with self._executing:
                self._execute_next()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake.put(False)
            self._thread.join()
        self._thread = None

    def _work(self) -> None:
        be_patient()
        while self._wake.get():
            with self._executing:
                self._execute_next()

    def _execute_next(self) -> None:
        if not self._queue:
            return
        work = self._queue.popleft()
        if self._failure is None:
            try:
                with torch.no_grad():
                    work.execute()
            except BaseException as error:
                self._failure = error
        work.execute = _nothing  # it refers to tensors
        work.finish(self._failure)


def _nothing() -> None:
    pass
