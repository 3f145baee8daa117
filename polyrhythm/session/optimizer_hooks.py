"""Hooks on the optimizer that trains a part of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from polyrhythm.core.worker import FetchOptimizerState
from polyrhythm.session.arguments import refuse_groups
from polyrhythm.session.grad_scaler import keep_from_scaler
from polyrhythm.session.loading import refuse_state
from polyrhythm.session.part import TrainingPart


def watch_optimizer(
    part: TrainingPart, late: bool, blocking: Callable[[], AbstractContextManager[None]]
) -> None:
    """Registers the hooks. `late`: this worker replaces one that died."""
    worker, optimizer = part.worker, part.optimizer
    refuse_groups(optimizer)
    keep_from_scaler(optimizer)
    if isinstance(worker, FetchOptimizerState):

        def fetch(_: object) -> None:
            with blocking():
                worker.fetch_optimizer_state()

        optimizer.register_state_dict_pre_hook(fetch)
    if worker.strategy.traits.uses_servers:
        refuse_state(optimizer)
    if late:  # it skips past epochs without a step, and schedulers would warn
        optimizer._opt_called = True  # type: ignore[attr-defined]
