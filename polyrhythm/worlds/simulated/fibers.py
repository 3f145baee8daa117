"""Loop and Fiber: the event queue on virtual time, and the greenlets that wait for its events.

`Fiber.block` is the only place where a simulated node gives up control.
"""

from __future__ import annotations

import contextvars
import heapq
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from polyrhythm.worlds.simulated.node import SimulatedNode


class Loop:
    """The event queue and the virtual clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.on_progress: Callable[[], None] = lambda: None  # called every 0.2 s of wall-clock time
        self._queue: list[tuple[float, int, Callable[..., Any], Any]] = []
        self._serial = 0
        self.hub = getcurrent()

    def at(self, moment: float, function: Callable[..., Any], argument: Any) -> None:
        """Schedules a call. Events of the same moment happen in the order in which they were scheduled."""
        self._serial += 1
        heapq.heappush(self._queue, (moment, self._serial, function, argument))

    def run(self, until: Callable[[], bool]) -> None:
        """Processes events until the queue is empty or `until`, called before each event, returns True."""
        self.hub = getcurrent()
        queue, pop = self._queue, heapq.heappop
        next_report = time.monotonic() + 0.2
        while queue and not until():
            self.now, _, function, argument = pop(queue)
            self.events += 1
            function(argument)
            if not self.events & 255 and time.monotonic() > next_report:
                self.on_progress()
                next_report = time.monotonic() + 0.2


class Fiber:
    """One greenlet of a node: its script, or a function that it spawned."""

    def __init__(self, loop: Loop, node: SimulatedNode, function: Callable[[], None]) -> None:
        self.loop, self.node = loop, node
        self.waiting: tuple[object, ...] | None = None  # the words for what it waits for
        self.changes_seen = 0  # how many changes of membership `receive` has told it of
        self._greenlet = greenlet(function)
        self._greenlet.gr_context = contextvars.copy_context()
        self._since = 0.0
        node.fibers = [*(fiber for fiber in node.fibers if not fiber.dead), self]

    def start(self, _: object = None) -> None:
        if self._greenlet.dead:  # its node crashed in the same moment
            return
        torch.set_grad_enabled(True)
        self._greenlet.parent = self.loop.hub  # by default it is the fiber that created this one
        self.resume()

    def resume(self, _: object = None) -> None:
        if not self._greenlet.dead:
            if self.node.world.modules is not None:
                self.node.install_modules()
            self._greenlet.switch()

    def block(self, *what: object) -> None:
        """Gives up control until this fiber is resumed. `what` are the words for what it waits for."""
        assert not self.node.locked, f"{self.node.me} may not wait for {_words(what)} inside lock()"
        self.waiting, self._since = what, self.loop.now
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.node.fiber = None
        if inference:
            with torch.inference_mode(False):  # or others would be in it
                self.loop.hub.switch()
        else:
            self.loop.hub.switch()
        self.node.fiber = self
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
        self.waiting = None

    def sleep(self, seconds: float) -> None:
        self.loop.at(self.loop.now + seconds, self.resume, None)
        self.block("its own computing")

    def kill(self) -> None:
        if not self._greenlet.dead:
            self.node.fiber = self  # closing a loader returns its lease
            self.node.install_modules()
            self._greenlet.parent = self.loop.hub  # control returns there
            self._greenlet.throw(GreenletExit)

    @property
    def frame(self) -> FrameType | None:
        """Where it waits; None if it runs."""
        frame: FrameType | None = self._greenlet.gr_frame
        return frame

    @property
    def dead(self) -> bool:
        return bool(self._greenlet.dead)

    def __str__(self) -> str:
        return f"{self.node.me} waits since {self._since:.6g} s for {_words(self.waiting or ('nothing',))}"


def _words(what: tuple[object, ...]) -> str:
    return " ".join(map(str, what))
