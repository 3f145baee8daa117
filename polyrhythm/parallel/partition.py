"""Partition: a captured model cut into segments, each of which runs at one place with its own parameters.

The workers that hold one model together each have a *place*, and run the segments of their place in order. Of
a pipeline each stage is one segment, or several if they are interleaved. A value goes by message to another
place, and stays here for a later segment of the same place.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.assignment import assign_eval
from polyrhythm.parallel.graph import ModeGraph, ModelGraph, Result
from polyrhythm.parallel.sizes import copy_size, size_leaves, source
from polyrhythm.parallel.tracing import value_name

Mode = Literal["train", "eval"]


@dataclass(frozen=True)
class GraphSegment:
    """A part of one mode's graph that runs at one place, without values of other places in between."""

    place: int
    module: Callable[..., tuple[Any, ...]]  # takes the values of `inputs`, returns those of `outputs`
    inputs: tuple[str, ...]  # inputs of the model ("input 0", ...) and values of earlier segments
    outputs: tuple[
        str, ...
    ]  # the values that later segments or the caller need; sizes (int) may be among them


@dataclass(frozen=True)
class Partition:
    """A model cut into segments, in an order in which they can run."""

    train: tuple[GraphSegment, ...]
    eval: tuple[GraphSegment, ...]
    results: Mapping[Mode, Result]
    users: Mapping[str, tuple[int, ...]]  # parameter or buffer: the places that use it; (): none does
    operations: tuple[int, ...]  # by position in the train graph: the segment of each operation

    def segments(self, mode: Mode) -> tuple[GraphSegment, ...]:
        return self.train if mode == "train" else self.eval

    def build_output(self, mode: Mode, values: Mapping[str, Any]) -> Any:
        """The model's output, from the values that its segments have returned and the model's inputs."""
        return self.results[mode].build(values)

    def run(self, mode: Mode, values: Mapping[str, Any]) -> Any:
        """Runs all segments in this process, on inputs as `ModelGraph.values` returns them."""
        known = dict(values)
        for segment in self.segments(mode):
            made = segment.module(*[known[name] for name in segment.inputs])
            known.update(zip(segment.outputs, made, strict=True))
        return self.build_output(mode, known)


def split(graph: ModelGraph, cuts: Sequence[int], places: int | None = None) -> Partition:
    """Cuts a model before the operations at these positions of its train graph.

    The segments are dealt to the places in turn. None: each has a place of its own.
    """
    check_cuts(graph, cuts)
    segments = [sum(cut <= position for cut in cuts) for position in range(len(graph.train.operations))]
    count = len(cuts) + 1
    return partition(graph, segments, [number % (places or count) for number in range(count)])


def partition(graph: ModelGraph, segments: Sequence[int], places: Sequence[int]) -> Partition:
    """Divides a model: the segment of each operation of the train graph, and the place of each segment.

    No operation takes a value of a later segment.
    """
    train = {node: segments[position] for node, position in graph.train.positions.items()}
    evaluation = train if graph.eval is graph.train else assign_eval(graph, train)
    users: dict[str, set[int]] = {name: set() for name, first in graph.names.items() if name == first}
    for mode, segment_of in ((graph.train, train), (graph.eval, evaluation)):
        for node in mode.operations:
            for name in mode.tensors_of(node):
                first = graph.names.get(name)  # None: a constant in the code of forward
                if first is not None:
                    users[first].add(places[segment_of[node]])
    return Partition(
        build_segments(graph.train, train, places),
        build_segments(graph.eval, evaluation, places),
        {"train": graph.train.result, "eval": graph.eval.result},
        {name: tuple(sorted(found)) for name, found in users.items()},
        tuple(segments),
    )


def check_cuts(graph: ModelGraph, cuts: Sequence[int]) -> None:
    last = len(graph.train.operations)
    for cut in cuts:
        if not 0 < cut < last:
            raise UsageError(f"cannot cut at position {cut}: the model has positions 1 to {last - 1}")
        if reason := graph.illegal.get(cut):
            where = graph.train.module_of(cut) or "the model"
            legal = [c for c in range(1, last) if c not in graph.illegal]
            near = sorted(legal, key=lambda other: abs(other - cut))[:2]
            hint = f"position {' or '.join(map(str, near))} works" if near else "no position works"
            raise UsageError(f"cannot cut at position {cut}, in {where}: {reason}; {hint}")
    if list(cuts) != sorted(set(cuts)):
        raise UsageError(f"the cuts {list(cuts)} are not in increasing order")


def build_segments(
    mode: ModeGraph, segment_of: Mapping[fx.Node, int], places: Sequence[int]
) -> tuple[GraphSegment, ...]:
    """Makes a module of the operations of each segment."""
    returned = set(mode.graph.output_node().all_input_nodes)
    parts = [_Part(mode, segment_of, number) for number in range(len(places))]
    for part in parts:
        for leaf in part.missing_sizes():
            tensor = leaf.args[0]
            assert isinstance(tensor, fx.Node)
            if tensor in segment_of:
                parts[segment_of[tensor]].sizes.add(leaf)
                part.received.add(leaf)
            else:
                part.take(leaf)
    for node in returned:
        if node in mode.sizes:
            home = max((segment_of.get(leaf.args[0], 0) for leaf in size_leaves(node)), default=0)  # type: ignore[arg-type]
            parts[home].sizes.add(node)
        elif node.op == "get_attr":
            # A parameter that is itself an output of the model comes from the first segment that uses it.
            parts[_home(node, segment_of)].held.add(node)
    return tuple(part.segment(returned, place) for part, place in zip(parts, places, strict=True))


class _Part:
    """The nodes of one segment, and what crosses its borders."""

    def __init__(self, mode: ModeGraph, segment_of: Mapping[fx.Node, int], number: int) -> None:
        self.mode, self.segment_of, self.number = mode, segment_of, number
        self.nodes = [node for node in mode.graph.nodes if segment_of.get(node) == number]
        inside = set(self.nodes)
        arguments = {argument for node in self.nodes for argument in node.all_input_nodes} - inside
        self.wanted = {node for node in arguments if node.op != "get_attr" and node not in mode.sizes}
        self.needed_sizes = arguments & mode.sizes
        self.available = {*self.wanted, *self.nodes}
        self.sizes: set[fx.Node] = set()  # that this segment returns
        self.received: set[fx.Node] = set()  # sizes that it takes from another segment
        self.held: set[fx.Node] = set()  # parameters that it returns

    def missing_sizes(self) -> list[fx.Node]:
        """The sizes that no tensor of this segment has."""
        leaves = [leaf for node in self.needed_sizes for leaf in size_leaves(node)]
        order = {node: number for number, node in enumerate(self.mode.graph.nodes)}
        return sorted({leaf for leaf in leaves if self._find(leaf) is None}, key=order.__getitem__)

    def _find(self, leaf: fx.Node) -> Any:
        """A tensor of this segment with this size: the one that the graph asks, or one that it takes."""
        if leaf.args[0] in self.available:
            return leaf.args
        return source(leaf, [node for node in self.mode.graph.nodes if node in self.wanted])

    def take(self, leaf: fx.Node) -> None:
        """Takes an input of the model to know its size."""
        tensor = leaf.args[0]
        assert isinstance(tensor, fx.Node)
        self.wanted.add(tensor)
        self.available.add(tensor)

    def segment(self, returned: set[fx.Node], place: int) -> GraphSegment:
        # To return a size the segment needs a tensor that has it.
        for leaf in (leaf for node in self.sizes for leaf in size_leaves(node)):
            if self._find(leaf) is None and leaf not in self.received:
                self.take(leaf)
        everything = list(self.mode.graph.nodes)
        inputs = [node for node in everything if node in self.wanted or node in self.received]
        outputs = [
            node
            for node in self.nodes
            if node in returned or any(_later(user, self.number, self.segment_of) for user in node.users)
        ]
        outputs += [node for node in everything if node in self.sizes or node in self.held]
        module = self._module(inputs, outputs)
        return GraphSegment(place, module, tuple(map(value_name, inputs)), tuple(map(value_name, outputs)))

    def _module(self, inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
        graph, attributes = fx.Graph(), {}
        copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}
        inside = set(self.nodes)
        for held in self.mode.graph.nodes:
            if held.op == "get_attr" and (held in outputs or any(user in inside for user in held.users)):
                copies[held] = graph.get_attr(str(held.target))
                attributes[str(held.target)] = self.mode.attributes[str(held.target)]
        for node in self.nodes:
            for argument in node.all_input_nodes:
                if argument in self.mode.sizes:
                    copy_size(argument, graph, copies, self._find)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_module":
                attributes[str(node.target)] = self.mode.attributes[str(node.target)]
        for node in outputs:
            if node in self.mode.sizes:
                copy_size(node, graph, copies, self._find)
        graph.output(tuple(copies[node] for node in outputs))
        return fx.GraphModule(holder(attributes), graph, "GraphSegment")


def _later(user: fx.Node, number: int, segment_of: Mapping[fx.Node, int]) -> bool:
    return segment_of.get(user, number) > number


def _home(held: fx.Node, segment_of: Mapping[fx.Node, int]) -> int:
    return min((segment_of[user] for user in held.users if user in segment_of), default=0)


def holder(attributes: Mapping[str, Any]) -> nn.Module:
    """A module that has tensors and modules by dotted names, as they are."""
    root = nn.Module()
    for name, value in attributes.items():
        *parents, last = name.split(".")
        module = root
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        if isinstance(value, nn.Parameter):
            module.register_parameter(last, value)
        elif isinstance(value, torch.Tensor):
            module.register_buffer(last, value)
        else:
            module.add_module(last, value)
    return root


def operations_of(graph: ModelGraph, name: str) -> list[int]:
    """The positions of the operations of a named submodule."""
    if name not in graph.modules:
        near = difflib.get_close_matches(name, graph.modules, n=3, cutoff=0.3) or list(graph.modules[:3])
        raise UsageError(f"the model has no submodule {name!r}; similar ones: {', '.join(near)}")
    found = [
        position
        for position in range(len(graph.train.operations))
        if f"{graph.train.module_of(position)}.".startswith(f"{name}.")
    ]
    if not found:
        raise UsageError(f"the submodule {name!r} computes nothing in forward; name one that does")
    return found


def cuts_at(graph: ModelGraph, names: Sequence[str]) -> list[int]:
    """The cuts at which a stage begins with the first operation of each named submodule."""
    cuts: list[int] = []
    for name in names:
        found = operations_of(graph, name)
        if found[0] == 0:
            raise UsageError(f"{name!r} begins with the model; the first stage needs no name")
        if cuts and found[0] <= cuts[-1]:
            raise UsageError(
                f"{name!r} does not come after {names[len(cuts) - 1]!r}; "
                "name submodules in the order in which they run"
            )
        cuts.append(found[0])
    check_cuts(graph, cuts)
    return cuts
