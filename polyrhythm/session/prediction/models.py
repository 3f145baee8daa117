"""Predictor: the model that predicts, whole on this worker or divided over several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from polyrhythm.parallel.example import Call
from polyrhythm.session.context import WorldContext
from polyrhythm.session.loading import checksum
from polyrhythm.session.stage_link import FORWARD


class Predictor(Protocol):
    """A model in evaluation mode, for whole batches, without gradients."""

    model: nn.Module  # whose forward says what it takes from a batch
    ahead: int  # how many batches may be begun before the output of the first is waited for

    @property
    def digest(self) -> str:
        """A hash of its tensors on this worker, which workers compare."""

    def active(self) -> AbstractContextManager[None]:
        """A context in which batches may be begun and waited for."""

    def begin(self, call: Call) -> Callable[[], Any]:
        """Begins a batch. The function that it returns waits for the output.

        Workers that hold one model together begin the same batches in the same order.
        """


class WholeModel:
    """A model that is whole on this worker. `context`: of the run, None in a single process."""

    ahead = 0

    def __init__(self, model: nn.Module, context: WorldContext | None = None) -> None:
        self.model, self._context = model, context

    @property
    def digest(self) -> str:
        return digest_of(self.model)

    def active(self) -> AbstractContextManager[None]:
        return evaluating(self.model)

    def begin(self, call: Call) -> Callable[[], Any]:
        args, kwargs = call
        output = self.model(*args, **kwargs)
        if self._context is not None and (seconds := self._context.compute_time() * FORWARD):
            with self._context.blocking():
                self._context.advance_time(seconds)
        return lambda: output


def digest_of(model: nn.Module) -> str:
    """A hash of the tensors of a model that are on this worker."""
    state = (*model.named_parameters(), *model.named_buffers())
    seen = repr([(name, checksum(each)) for name, each in state if not each.is_meta])
    return hashlib.sha256(seen.encode()).hexdigest()[:16]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts all modules of a model into evaluation mode, without gradients, and restores their modes."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
