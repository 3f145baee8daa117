"""Captures: one capture for all simulated workers whose models are the same program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from polyrhythm.parallel.fingerprint import Incomparable, fingerprint
from polyrhythm.parallel.graph import ModeGraph, ModelGraph
from polyrhythm.parallel.tracing import NotExportable

Export = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], ModelGraph]


class Captures:
    """What was captured in a simulation, by the fingerprint of the model."""

    def __init__(self) -> None:
        self.count = 0  # of captures that were made
        self._known: list[tuple[list[Any], ModelGraph | str]] = []

    def export(
        self, export: Export, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ModelGraph:
        """The graph of a model; raises NotExportable."""
        try:
            tokens = fingerprint(model, args, kwargs)
        except Incomparable:
            self.count += 1
            return export(model, args, kwargs)
        for known, found in self._known:
            if known == tokens:
                if isinstance(found, str):
                    raise NotExportable(found)
                return _bound(found, _tensors(model))
        self.count += 1
        try:
            graph = export(model, args, kwargs)
        except NotExportable as error:
            self._known.append((tokens, str(error)))
            raise
        if all(_is_free(each, _tensors(model)) for each in (graph.train, graph.eval)):
            self._known.append((tokens, _bound(graph, {})))
        return graph


captures: ContextVar[Captures | None] = ContextVar("captures", default=None)  # None: every model by itself


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_free(mode: ModeGraph, tensors: Mapping[str, Tensor]) -> bool:
    """True if a graph holds nothing of a model except its parameters and buffers.

    Constants in its code may be changed by one worker, and outputs may be of classes that others do not have.
    """
    held = all(name in tensors or isinstance(each, fx.GraphModule) for name, each in mode.attributes.items())
    return held and _is_plain(mode.result.spec)


def _is_plain(spec: pytree.TreeSpec) -> bool:
    return spec.type in (None, tuple, list, dict) and all(map(_is_plain, spec.children()))


def _bound(graph: ModelGraph, tensors: Mapping[str, Tensor]) -> ModelGraph:
    """The same operations on the tensors of another model; on none, to keep."""

    def bound(mode: ModeGraph) -> ModeGraph:
        held = {
            name: each if isinstance(each, fx.GraphModule) else tensors.get(name)
            for name, each in mode.attributes.items()
        }
        return replace(mode, attributes=held)

    return replace(graph, train=bound(graph.train), eval=bound(graph.eval))
