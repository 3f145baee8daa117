"""Linear scaling: a batch k times as large uses k times the learning rate, after a warm-up."""

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
    """Multiplies the learning rate by a factor that rises linearly from 1 to `factor`.

    lr = (lr of `after`) (1 + (factor - 1) min(t / steps, 1)) after t steps of the optimizer, which are
    counted automatically. By default `factor` is the number of workers if they step together, because their
    batch is N times as large, and 1 if each goes at its own pace. Goyal et al. 2017, Accurate, Large
    Minibatch SGD, let it rise over five epochs, because the network changes fast at first. Create it after
    `session.prepare()`, which replaces `optimizer.step` in a run.

    `after` is any scheduler of the same optimizer, or None. `step()` is its step, with the same arguments:
    call it once per batch or once per epoch, as that scheduler requires, and without one not at all. The
    scheduler sees its own rates, not the scaled ones, so it may compute the next rate from the last. Each
    parameter group has its own rate. A script that sets a rate itself sets the scaled one.

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
                "LinearScaling: create it after pr.init() and session.prepare(), because it depends on the "
                "workers of the run and counts the steps of its optimizer"
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
        self._shown: list[float] = []  # with the factor, as last written to the optimizer
        self._scale()
        self._wrapped = False  # by another LinearScaling, which then counts the steps of both
        if isinstance(after, LinearScaling):
            after._wrapped = True
        self._count_steps()

    def _count_steps(self) -> None:
        """Wraps the optimizer's step, which may be wrapped already, to advance the warm-up after it.

        PyTorch's step hooks would not do: where servers take the steps, a worker's optimizer does not step.
        """
        inner = self.optimizer.step

        @functools.wraps(inner)  # keeps the attributes that schedulers have set
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            loss = inner(*args, **kwargs)
            if not self._wrapped:
                self._warm()
            return loss

        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def _warm(self) -> None:
        """The optimizer has taken a step. After the warm-up, rates are left alone."""
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
        """The current factor."""
        if self.count >= self.steps:
            return self.factor
        return 1 + (self.factor - 1) * (self.count / self.steps)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step of `after`, with these arguments."""
        self._write(self._unscaled())
        if self.after is not None:
            self.after.step(*args, **kwargs)
        self._scale()

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group, as last written."""
        return list(self._shown)

    def state_dict(self) -> dict[str, Any]:
        """The state from which another one continues exactly."""
        after = None if self.after is None else self.after.state_dict()
        return {
            "factor": self.factor, "steps": self.steps, "count": self.count, "rates": self._unscaled(),
            "after": after,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state, whether the optimizer's own state is loaded before, after or not."""
        groups = len(self.optimizer.param_groups)
        if len(state["rates"]) != groups:
            raise UsageError(
                f"LinearScaling: the state has {len(state['rates'])} parameter groups, but the optimizer has "
                f"{groups}; create it as the saved one was created"
            )
        if (state["after"] is None) != (self.after is None):
            was, is_ = ("without", "with") if state["after"] is None else ("with", "without")
            raise UsageError(
                f"LinearScaling: the state was saved {was} a scheduler in `after`, but this one is {is_}; "
                "create it as the saved one was created"
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
        """The rates without the factor. A rate that was changed or added since is divided by the factor."""
        now = self._read()
        known = len(self._rates)
        return [
            self._rates[number] if number < known and rate == self._shown[number] else rate / self.scale
            for number, rate in enumerate(now)
        ]

    def _scale(self) -> None:
        """Multiplies the rates of the optimizer by the factor."""
        self._rates = self._read()
        self._write([rate * self.scale for rate in self._rates])
        self._shown = self._read()  # a rate that is a float32 tensor rounds


def _finite(value: Any) -> bool:
    """True for a finite number, also of NumPy."""
    return isinstance(value, numbers.Real) and math.isfinite(value)
