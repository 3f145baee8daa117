"""Linear scaling: k times the batch takes k times the learning rate, reached step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import UsageError
from polyrhythm.session import session


class LinearScaling:
    """Multiplies the learning rate, whoever sets it, by a number that rises linearly from 1 to `factor`.

    lr = (lr of `after`) (1 + (factor - 1) min(t / steps, 1)) after t calls of `step()`. N workers have a
    batch N times as large, so `factor` is the number of the session's workers if not given. Goyal et al.
    2017, Accurate, Large Minibatch SGD, let it rise over five epochs: at first the network changes too fast.

    `after` is any scheduler of the same optimizer, or none; what `step()` gets is passed on to it. It sees
    its own rates, never the scaled ones, so one that computes a rate from the last is not disturbed. Each
    parameter group has its own rate. A script that sets a rate itself sets the one in effect.

    >>> import torch, polyrhythm as pr
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.5)
    >>> scheduler = pr.LinearScaling(optimizer, factor=3, steps=2)
    >>> for _ in range(3):
    ...     optimizer.step()
    ...     scheduler.step()
    ...     print(scheduler.get_last_lr())
    [1.0]
    [1.5]
    [1.5]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: float | None = None,
        steps: int = 0,
        after: Any = None,
    ) -> None:
        if factor is None:
            here = session.get()
            factor = 1 if here is None else here.workers
        if not 0 < factor < math.inf:
            raise UsageError(f"LinearScaling: factor is {factor}; it must be a number above 0")
        if steps < 0 or steps != int(steps):
            raise UsageError(f"LinearScaling: steps is {steps}; it must be a whole number, 0 or more")
        if after is not None and getattr(after, "optimizer", None) is not optimizer:
            raise UsageError("LinearScaling: `after` must be a scheduler of the same optimizer")
        self.optimizer, self.factor, self.steps, self.after = optimizer, factor, steps, after
        self.count = 0
        self._rates: list[float] = []  # without the factor, as `after` left them
        self._shown: list[float] = []  # with it, as this left them in the optimizer
        self._scale()

    @property
    def scale(self) -> float:
        """The factor at present."""
        if self.count >= self.steps:
            return self.factor
        return 1 + (self.factor - 1) * (self.count / self.steps)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step of the warm-up and of `after`, which gets the arguments."""
        self._write(self._unscaled())
        if self.after is not None:
            self.after.step(*args, **kwargs)
        self.count += 1
        self._scale()

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group, as the last call of `step()` left it."""
        return list(self._shown)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly from here."""
        after = None if self.after is None else self.after.state_dict()
        return {
            "factor": self.factor, "steps": self.steps, "count": self.count, "rates": self._unscaled(),
            "after": after,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another one was, whether the optimizer's own state is loaded before, after or not."""
        groups = len(self.optimizer.param_groups)
        if len(state["rates"]) != groups:
            raise UsageError(
                f"LinearScaling: the state is of {len(state['rates'])} parameter groups, and the optimizer "
                f"has {groups}; make it as the saved one was made"
            )
        if (state["after"] is None) != (self.after is None):
            was, is_ = ("without", "with") if state["after"] is None else ("with", "without")
            raise UsageError(
                f"LinearScaling: the state is of one {was} a scheduler in `after`, and this is {is_}; make "
                "it as the saved one was made"
            )
        if self.after is not None:
            self.after.load_state_dict(state["after"])
        self.factor, self.steps, self.count = state["factor"], state["steps"], state["count"]
        self._write(state["rates"])
        self._scale()

    def _read(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _write(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _unscaled(self) -> list[float]:
        """The rates without the factor. One that was changed, or came later, is taken as it is in effect."""
        now = self._read()
        known = len(self._rates)
        return [
            self._rates[number] if number < known and rate == self._shown[number] else rate / self.scale
            for number, rate in enumerate(now)
        ]

    def _scale(self) -> None:
        """Takes the rates of the optimizer for those without the factor, and puts in the scaled ones."""
        self._rates = self._read()
        self._write([rate * self.scale for rate in self._rates])
        self._shown = self._read()  # a rate that is a tensor of 32 bits rounds
