"""Linear scaling: k times the batch takes k times the learning rate, reached step by step."""

from __future__ import annotations

import functools
import math
import numbers
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.session.context import session, world_context


class LinearScaling:
    """Multiplies the learning rate, whoever sets it, by a number that rises linearly from 1 to `factor`.

    lr = (lr of `after`) (1 + (factor - 1) min(t / steps, 1)) after t steps of the optimizer, which are
    counted by themselves. N workers that step together have a batch N times as large, so `factor` is their
    number if not given. Where each goes at its own pace the batch is one worker's: there it is 1. Goyal et
    al. 2017, Accurate, Large Minibatch SGD, let it rise over five epochs: at first the network changes too
    fast. Made after `session.prepare()`, for that is what `optimizer.step` comes from in a run.

    `after` is any scheduler of the same optimizer, or none. `step()` is its step, and has its arguments: call
    it once per batch or once per epoch, as that scheduler wants it, and without one not at all. It sees its
    own rates, never the scaled ones, so one that computes a rate from the last is not disturbed. Each
    parameter group has its own rate. A script that sets a rate itself sets the one in effect.

    >>> import torch, polyrhythm as pr
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.5)
    >>> scheduler = pr.LinearScaling(optimizer, factor=3, steps=2)
    >>> for _ in range(3):
    ...     optimizer.step()
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
        here = session.get()
        if world_context.get() is not None and getattr(here, "_replica", None) is None:
            raise UsageError(
                "LinearScaling: make it after pr.init() and session.prepare(), for it depends on the run's "
                "workers, and counts the steps that the run's optimizer takes"
            )
        if factor is None:
            together = here is not None and here.strategy is not None and here.strategy.traits.lockstep
            factor = here.workers if here is not None and together else 1
        if not _finite(factor) or factor <= 0:
            raise UsageError(f"LinearScaling: factor is {factor!r}; it must be a finite number above 0")
        if not _finite(steps) or steps < 0 or steps != int(steps):
            raise UsageError(f"LinearScaling: steps is {steps!r}; it must be a whole number, 0 or more")
        if after is not None and getattr(after, "optimizer", None) is not optimizer:
            raise UsageError("LinearScaling: `after` must be a scheduler of the same optimizer")
        self.optimizer, self.factor, self.steps, self.after = optimizer, factor, steps, after
        self.count = 0
        self._rates: list[float] = []  # without the factor, as `after` left them
        self._shown: list[float] = []  # with it, as this left them in the optimizer
        self._scale()
        self._wrapped = False  # by another one, which then says when this counts a step
        if isinstance(after, LinearScaling):
            after._wrapped = True
        self._count_steps()

    def _count_steps(self) -> None:
        """Lets the optimizer's step, whoever has replaced it so far, be followed by one of the warm-up.

        PyTorch's own hooks do not do: where servers step, a worker's optimizer does not.
        """
        inner = self.optimizer.step

        @functools.wraps(inner)  # with what schedulers have noted on it
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            loss = inner(*args, **kwargs)
            if not self._wrapped:
                self._warm()
            return loss

        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def _warm(self) -> None:
        """The optimizer has taken a step. When all is warm, rates are left alone."""
        if self._warming:
            self._write(self._unscaled())
            if isinstance(self.after, LinearScaling):
                self.after._warm()
            self.count += 1
            self._scale()

    @property
    def _warming(self) -> bool:
        return self.count < self.steps or (isinstance(self.after, LinearScaling) and self.after._warming)

    @property
    def scale(self) -> float:
        """The factor at present."""
        if self.count >= self.steps:
            return self.factor
        return 1 + (self.factor - 1) * (self.count / self.steps)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step of `after`, which gets the arguments."""
        self._write(self._unscaled())
        if self.after is not None:
            self.after.step(*args, **kwargs)
        self._scale()

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group, as this left it last."""
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


def _finite(value: Any) -> bool:
    """Whether it is a number, NumPy's too, and a finite one."""
    return isinstance(value, numbers.Real) and math.isfinite(value)
