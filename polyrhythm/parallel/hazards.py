"""Where a graph must not be cut: in-place operations, shared statistics, and values that are not tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

Span = tuple[int, int, str]  # no cut c with first < c <= last, and why


def mutated_arguments(node: fx.Node, attributes: Mapping[str, Any]) -> set[fx.Node]:
    """The arguments that an operation changes in place."""
    if node.meta.get("changes"):  # a module of a chain
        return set(node.all_input_nodes)
    if node.op != "call_function":
        return set()
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _mutated_by_region(node, attributes)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return set()
    found: set[fx.Node] = set()
    for number, argument in enumerate(schema.arguments):
        value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        # BatchNorm updates its statistics although its schema does not say so.
        written |= argument.name in ("running_mean", "running_var")
        if written:
            found.update(_nodes(value))
    return found


def _mutated_by_region(node: fx.Node, attributes: Mapping[str, Any]) -> set[fx.Node]:
    """The same for an operation that runs a graph of its own, such as a `torch.no_grad()` block."""
    found: set[fx.Node] = set()
    for argument in node.args:
        if not isinstance(argument, fx.Node) or argument.op != "get_attr":
            continue
        region = attributes.get(str(argument.target))
        if not isinstance(region, fx.GraphModule):
            continue
        inside = {entry: entry for entry in region.graph.nodes if entry.op == "placeholder"}
        changed: set[fx.Node] = set()
        parts = {name: value for name, value in region.named_modules() if name}
        for inner in region.graph.nodes:
            changed |= mutated_arguments(inner, parts)
        groups = alias_groups(region.graph)
        values = node.args[list(node.args).index(argument) + 1 :]
        for entry, value in zip(inside, values, strict=False):
            if any(groups[entry] == groups[other] for other in changed if other in groups):
                found.update(_nodes(value))
    return found


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _nodes(part)


def alias_groups(graph: fx.Graph) -> dict[fx.Node, int]:
    """A number for every node; nodes whose tensors may share memory have the same one."""
    parent: dict[fx.Node, fx.Node] = {node: node for node in graph.nodes}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    storages: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for value in _tensors(node.meta.get("val")):
            other = storages.setdefault(value.untyped_storage()._cdata, node)
            parent[root(node)] = root(other)
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(returned.alias_info is not None for returned in schema.returns):
            for number, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and number < len(node.args):
                    for other in _nodes(node.args[number]):
                        parent[root(node)] = root(other)
        if node.target is operator.getitem:
            parent[root(node)] = root(node.args[0])
    numbers: dict[fx.Node, int] = {}
    return {node: numbers.setdefault(root(node), len(numbers)) for node in graph.nodes}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def mutated_groups(graph: fx.Graph, attributes: Mapping[str, Any]) -> dict[int, list[fx.Node]]:
    """The alias groups that some operation changes in place, each with the operations that do."""
    groups = alias_groups(graph)
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for changed in mutated_arguments(node, attributes):
            found.setdefault(groups[changed], []).append(node)
    return found


def bound_nodes(graph: fx.Graph, attributes: Mapping[str, Any]) -> list[tuple[set[fx.Node], str]]:
    """Sets of operations that must run in one stage, each with the reason."""
    groups = alias_groups(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    found = []
    for group, writers in mutated_groups(graph, attributes).items():
        members = [node for node in order if groups[node] == group]
        held = any(node.op == "get_attr" for node in members)
        last = max(order[node] for node in writers)
        together = set(writers)
        for node in members:
            together |= {user for user in node.users if held or order[user] <= last}
            if order[node] <= last:
                together.add(node)
        together = {node for node in together if node.op in ("call_function", "call_module")}
        found.append((together, f"{writers[0].name} changes a value in place"))
    for node in order:
        if isinstance(node.meta.get("val"), tuple | list):
            whole = {
                user for user in node.users if user.target is not operator.getitem and user.op != "output"
            }
            if whole:
                found.append((whole | {node}, f"{node.name} is not a tensor"))
    return [*found, *_counters(graph)]


def _counters(graph: fx.Graph) -> list[tuple[set[fx.Node], str]]:
    """Operations that no value depends on, such as the counter of BatchNorm, each with one of its module."""
    found, last = [], dict[str, fx.Node]()
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        module = str(node.meta.get("module", ""))
        if node.users or any(other.op != "get_attr" for other in node.all_input_nodes):
            last[module] = node
        elif module in last:
            found.append(({node, last[module]}, f"{node.name} counts for {module}"))
    return found
