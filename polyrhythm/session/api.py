"""init() and Session: the three lines a user adds.

Alone (`python train.py`) a session does nothing: `prepare` gives back the very objects it got. In a run,
`prepare` is where the roles part: a server serves inside it and never returns; a worker gets its model on
flat vectors, an optimizer whose `step()` is the strategy's, and its share of the loader.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import parse
from polyrhythm.core.strategy import Strategy
from polyrhythm.session import batch_norm as norms
from polyrhythm.session.context import session, world_context


def init(strategy: str | Strategy | None = None, *, batch_norm: str | None = None) -> Session:
    """Enters the run that this process belongs to, or makes a session for one process alone.

    `strategy` is the way the workers keep time, such as "async" or "local:8". One given on the command line
    wins over it. So it is with `batch_norm`, what becomes of BatchNorm's statistics: "local" (each worker's
    own, as a rule), "rank0", "mean", "sync" or "recompute".
    """
    if batch_norm is not None:
        norms.named(batch_norm)
    text = str(parse(strategy) if isinstance(strategy, str) else strategy) if strategy is not None else None
    here = world_context.get()
    if here is None:
        mine = Session()
    else:
        from polyrhythm.session.distributed import DistributedSession  # which needs what is above

        mine = DistributedSession(here, text, batch_norm)
    session.set(mine)
    return mine


class Session:
    """What `init()` returns. This one is for a process alone: plain PyTorch."""

    rank: int = 0
    workers: int = 1
    strategy: Strategy | None = None
    batch_norm: str = norms.DEFAULT

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._copy: nn.Module | None = None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, *loaders: DataLoader[Any]) -> Any:
        """Call once, with the model, its optimizer and the training loader; go on with what it returns."""
        self._model = model
        return (model, optimizer, *loaders)

    def epochs(self, count: int) -> Iterator[int]:
        """Counts epochs like `range(count)`, and lets the progress line know."""
        yield from range(count)

    def log(self, **metrics: Any) -> None:
        """Records numbers: in the run folder and the summary, or alone on the screen."""
        print("  ".join(f"{name} {plain(value)}" for name, value in metrics.items()), flush=True)

    def accumulating(self) -> AbstractContextManager[None]:
        """Around all but the last `backward()` before a step: gradients are added up, and nothing is sent.

        Without it the result is the same; it saves the exchange, under strategies that exchange gradients.
        """
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """What this worker remembers besides its model and its optimizer, such as what a codec has not sent.

        Each worker has its own, to save beside the others': `torch.save(session.state_dict(), ...)`.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with what was saved; after `prepare()`, under the same strategy and with the same model."""
        if state:
            raise UsageError(
                f"this state was saved under {state.get('strategy')}, and a process alone has no strategy: "
                "load it in a run, or leave it"
            )

    def consensus(self) -> nn.Module:
        """The one model the run has agreed on: the server's parameters, or the average of the replicas.

        It is a copy; training does not touch it. All workers call it at the same places of the script.
        """
        if self._model is None:
            raise UsageError("session.consensus() comes after session.prepare(model, optimizer, loader)")
        if self._copy is None:
            self._copy = copy.deepcopy(self._model)
        self._copy.load_state_dict(self._model.state_dict())
        return self._copy.train(self._model.training)


def plain(value: Any) -> Any:
    """A number or text that JSON can hold."""
    if isinstance(value, Tensor | np.generic):
        value = value.item()
    if isinstance(value, float):
        return round(value, 6)
    return value if isinstance(value, int | str | bool | None) else str(value)
