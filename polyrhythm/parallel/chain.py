"""Capture of a chain of modules that torch.export does not take: module by module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from polyrhythm.parallel.graph import Input, ModeGraph, ModelGraph, Result
from polyrhythm.parallel.tracing import first_names
from polyrhythm.parallel.trees import flatten, flatten_call
from polyrhythm.parallel.untouched import attributes_kept, random_states_kept, tensors_kept


def chain_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str
) -> ModelGraph | None:
    """Captures a model that calls modules one after another on one tensor; None if it is no such model."""
    leaves, spec = flatten_call(args, kwargs)
    if len(leaves) != 1 or not isinstance(leaves[0], torch.Tensor) or leaves[0].dim() == 0 or kwargs:
        return None
    if not _is_plain(model):  # another forward method may do more than an example shows
        return None
    value = leaves[0]
    with attributes_kept(model), tensors_kept(model.buffers()), random_states_kept(), torch.no_grad():
        trace = _Trace(model, list(_links(model, "")), value)
    entry = Input(dtype=value.dtype, shape=tuple(value.shape), rows=(0, math.inf))
    note = f"captured module by module, because {reason}"
    modules = tuple(path for path, _ in model.named_modules() if path)
    graph = trace.graph()
    return ModelGraph(graph, graph, (entry,), spec, first_names(model), note, modules)


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Sequential and len(module) > 0 and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    kinds = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(kinds)


def _links(module: nn.Module, path: str) -> Iterator[str]:
    for name, child in module._modules.items():
        inner = f"{path}.{name}" if path else name
        if child is not None and _is_plain(child):
            yield from _links(child, inner)
        else:
            yield inner


class _Trace:
    """One run of the chain: which values are single tensors, and which are changed in place later."""

    def __init__(self, model: nn.Module, paths: list[str], value: torch.Tensor) -> None:
        self.model, self.paths = model, paths
        current: Any = value.clone()
        values, versions = [current], [current._version]
        for path in paths:
            current = model.get_submodule(path)(current)
            values.append(current)
            versions.append(current._version if isinstance(current, torch.Tensor) else None)
        self.leaves, self.spec = flatten(current)
        self.single = [isinstance(each, torch.Tensor) for each in values]
        self.changed = [
            isinstance(each, torch.Tensor) and each._version != version
            for each, version in zip(values, versions, strict=True)
        ]

    def graph(self) -> ModeGraph:
        graph, attributes = fx.Graph(), {}
        node = graph.placeholder("input_0")
        calls: list[fx.Node] = []
        for path in self.paths:
            attributes[path] = self.model.get_submodule(path)
            node = graph.call_module(path, (node,))
            node.meta = {"module": path, "changes": self.changed[len(calls)]}
            calls.append(node)
        if self.single[-1]:
            names: list[str | None] = [node.name]
            graph.output((node,))
        else:
            parts = graph.call_function(_leaves, (node,))
            parts.meta = {"module": self.paths[-1]}
            picked = [graph.call_function(_pick, (parts, number)) for number in range(len(self.leaves))]
            graph.output(tuple(picked))
            names = [each.name for each in picked]
            calls.append(parts)
            calls += picked
        result = Result(self.spec, tuple(names), (None,) * len(names))
        made = ModeGraph(graph, attributes, result)
        bound = made.bound  # shared statistics are found below, by the modules' buffers
        for number, call in enumerate(calls[: len(self.paths)]):
            before = {calls[number - 1]} if number else set()
            if self.changed[number]:
                bound.append((before | {call}, f"{self.paths[number]} changes its input in place"))
            elif not self.single[number]:
                bound.append((before | {call}, f"the output of {self.paths[number - 1]} is not a tensor"))
        if not self.single[-1]:
            bound.append((set(calls[len(self.paths) - 1 :]), "the output of the last module is not a tensor"))
        users: dict[int, set[fx.Node]] = {}
        for path, call in zip(self.paths, calls, strict=False):
            for buffer in self.model.get_submodule(path).buffers():
                users.setdefault(id(buffer), set()).add(call)
        bound += [(nodes, "modules share a buffer") for nodes in users.values() if len(nodes) > 1]
        return made


def _leaves(value: Any) -> list[Any]:
    return flatten(value)[0]


def _pick(leaves: list[Any], number: int) -> Any:
    return leaves[number]
