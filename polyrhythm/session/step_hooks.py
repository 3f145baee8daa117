"""StepHooks: runs the hooks that the script registers on its optimizer.

PyTorch runs them around the optimizer's own step. Under servers that step is taken elsewhere, on a part of
the parameters, and under other strategies workers exchange parameters after it. So hooks run around the whole
step of a worker: pre-hooks see the gradient that it uses, post-hooks the parameters that it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as registry

from polyrhythm.core.errors import UsageError


class StepHooks:
    """The hooks of one optimizer, also those that are registered after `prepare`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, own_step: bool, install_random_state: Callable[[], None]
    ) -> None:
        """`own_step`: this process takes the steps of this optimizer, and of no other worker's."""
        self._optimizer, self._own_step = optimizer, own_step
        self._install_random_state = install_random_state
        self._accepted: tuple[int, ...] = ()  # the numbers of global hooks
        self._refuse_global()

    def before_step(self, *args: Any) -> bool:
        """Runs the pre-hooks, with the arguments of `optimizer.step()`; False if there are none."""
        self._refuse_global()
        return self._run(self._optimizer._optimizer_step_pre_hooks, args)

    def after_step(self, *args: Any) -> None:
        """Runs the post-hooks."""
        self._run(self._optimizer._optimizer_step_post_hooks, args)

    def _run(self, registered: Mapping[int, Callable[..., Any]], args: Sequence[Any]) -> bool:
        if not registered:
            return False
        self._install_random_state()
        with torch.enable_grad():
            hooks = list(registered.values())
            results = [hook(self._optimizer, (self._optimizer, *args), {}) for hook in hooks]
        if registered is self._optimizer._optimizer_step_pre_hooks and any(
            each is not None for each in results
        ):
            raise UsageError(
                "a hook of optimizer.register_step_pre_hook() returned other arguments for step(): in a run "
                "it must return None; pass the arguments to optimizer.step()"
            )
        return True

    def _refuse_global(self) -> None:
        """Hooks of all optimizers of a process would run on servers, or for all workers of a simulation."""
        before, after = registry._global_optimizer_pre_hooks, registry._global_optimizer_post_hooks
        numbers = *before, *after  # no two hooks of a process have the same
        if self._own_step or numbers == self._accepted:
            return
        found = chain(before.values(), after.values())
        ours = "torch.", "polyrhythm."
        if any(not getattr(hook, "__module__", "").startswith(ours) for hook in found):
            raise UsageError(
                "register_optimizer_step_pre_hook() and register_optimizer_step_post_hook() do not work "
                "under servers or in simulation, where a process takes steps of others: register the hook on "
                "your optimizer, as in optimizer.register_step_post_hook(hook)"
            )
        self._accepted = numbers
