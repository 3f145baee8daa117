"""Loop and Fiber: virtual time, and lines of control that wait for it.

`Fiber.block` is the only place where a node of the simulator gives up control.
"""

from __future__ import annotations

import contextvars
import heapq
import time
from collections.abc import Callable
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
        self.beat: Callable[[], None] = lambda: None  # called now and then on the wall clock
        self._queue: list[tuple[float, int, Callable[..., Any], Any]] = []
        self._serial = 0
        self.hub = getcurrent()

    def at(self, moment: float, function: Callable[..., Any], argument: Any) -> None:
        """Calls the function at that moment. Events of one moment keep the order they were made in."""
        self._serial += 1
        heapq.heappush(self._queue, (moment, self._serial, function, argument))

    def run(self, until: Callable[[], bool]) -> None:
        """Lets time pass until the queue is empty or `until` holds, asked after every event."""
        self.hub = getcurrent()
        queue, pop = self._queue, heapq.heappop
        next_beat = time.monotonic() + 0.2
        while queue and not until():
            self.now, _, function, argument = pop(queue)
            self.events += 1
            function(argument)
            if not self.events & 255 and time.monotonic() > next_beat:
                self.beat()
                next_beat = time.monotonic() + 0.2


class Fiber:
    """One line of control of a node: its script, or something it spawned."""

    def __init__(self, loop: Loop, node: SimulatedNode, function: Callable[[], None]) -> None:
        self.loop, self.node = loop, node
        self.waiting: tuple[str, ...] | None = None
        self.told = 0  # how many changes of membership it knows of
        self._greenlet = greenlet(function)
        self._greenlet.gr_context = contextvars.copy_context()
        self._since = 0.0
        node.fibers = [*(fiber for fiber in node.fibers if not fiber.dead), self]

    def start(self, _: object = None) -> None:
        if self._greenlet.dead:  # its node crashed in the same moment
            return
        self.node.world.lend_random_state(self.node)
        torch.set_grad_enabled(True)
        self._greenlet.parent = self.loop.hub  # it may have been made by another fiber
        self._greenlet.switch()

    def resume(self, value: object = None) -> None:
        if not self._greenlet.dead:
            self.node.world.lend_random_state(self.node)
            self._greenlet.switch(value)

    def block(self, *what: str) -> Any:
        """Gives up control until somebody resumes this fiber. `what` says what it waits for."""
        assert not self.node.excluding, f"{self.node.me} may not wait for {' '.join(what)} inside lock()"
        self.waiting, self._since = what, self.loop.now
        grad = torch.is_grad_enabled()
        self.node.fiber = None
        value = self.loop.hub.switch()
        self.node.fiber = self
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
        self.waiting = None
        return value

    def sleep(self, seconds: float) -> None:
        self.loop.at(self.loop.now + seconds, self.resume, None)
        self.block("its own computing")

    def kill(self) -> None:
        if not self._greenlet.dead:
            self.node.fiber = self  # a loader that closes gives its lease back
            self._greenlet.parent = self.loop.hub  # where control goes afterwards
            self._greenlet.throw(GreenletExit)

    @property
    def dead(self) -> bool:
        return bool(self._greenlet.dead)

    def __str__(self) -> str:
        what = " ".join(self.waiting or ("nothing",))
        return f"{self.node.me} waits since {self._since:.6g} s for {what}"
