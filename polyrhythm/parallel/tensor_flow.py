"""Where a graph is divided if some of its linear layers are: the analysis behind tensor parallelism.

A column layer divides its outputs over the workers, and a row layer its inputs; between the two, every
operation works on parts. The parts that row layers compute are summed over the workers (Megatron).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from polyrhythm.parallel.graph import ModeGraph
from polyrhythm.parallel.sharding import Operation, Outcome, Refusal, Sharding, Shardings, divide, shape
from polyrhythm.parallel.sharding_rules import propagate

Style = Literal["column", "row"]


@dataclass(frozen=True)
class Linear:
    """A product with a matrix of parameters. `outputs`: the dimension of the matrix for its outputs."""

    node: fx.Node
    input: fx.Node
    weight: str
    bias: str | None
    outputs: int

    @property
    def features(self) -> tuple[int, int]:
        """The numbers of its inputs and outputs."""
        return shape(self.input)[-1], shape(self.node)[-1]


def layer_name(weight: str) -> str:
    """The name of a layer in plans: `layers.0.fc1`, or `layers.0.self_attn.in_proj`."""
    return weight.removesuffix("weight").rstrip("._")


def find_linears(mode: ModeGraph) -> dict[fx.Node, Linear]:
    """The linear layers whose matrix and bias nothing else uses."""
    found = {}
    for node in mode.graph.nodes:
        linear = _linear(mode, node)
        if linear is not None:
            found[node] = linear
    while True:
        # A parameter with another use stays whole.
        foreign = {
            name
            for linear in found.values()
            for name in (linear.weight, linear.bias)
            for held in mode.graph.nodes
            if held.op == "get_attr" and held.target == name and not held.users.keys() <= found.keys()
        }
        kept = {node: each for node, each in found.items() if not {each.weight, each.bias} & foreign}
        if len(kept) == len(found):
            return kept
        found = kept


def _linear(mode: ModeGraph, node: fx.Node) -> Linear | None:
    aten = torch.ops.aten
    arguments: Any = list(node.args)
    if node.target == aten.linear.default:
        given, weight, bias = (*arguments, None)[:3]
        outputs = 0
    elif node.target == aten.addmm.default and not node.kwargs:
        bias, given, weight = arguments
        outputs = 1
    elif node.target in (aten.matmul.default, aten.mm.default):
        given, weight = arguments
        bias, outputs = None, 1
    else:
        return None
    parameters = [weight] if bias is None else [weight, bias]
    if not all(_is_parameter(mode, each) for each in parameters) or _is_parameter(mode, given):
        return None
    if (
        len(shape(weight)) != 2
        or (bias is not None and shape(bias) != shape(node)[-1:])
        or len(shape(node)) < 2
    ):
        return None
    return Linear(node, given, str(weight.target), None if bias is None else str(bias.target), outputs)


def _is_parameter(mode: ModeGraph, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(mode.attributes[str(node.target)], torch.nn.Parameter)


class Undividable(Exception):
    """An operation that needs whole a value that some column layers divide."""

    def __init__(self, node: fx.Node, layers: frozenset[str], refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.node, self.layers = node, layers
        self.blocks, self.by_size = refusal.blocks, refusal.by_size

    @property
    def blocked(self) -> bool:
        """True if the operation comes after the layers, and is not one of them."""
        return not any(str(each.target) in self.layers for each in self.node.all_input_nodes)

    @property
    def operation(self) -> str:
        """The operation and where it is, for messages."""
        if self.node.op == "output":
            return "the output of the model"
        name = getattr(getattr(self.node.target, "_schema", None), "name", self.node.name)
        module = self.node.meta.get("module", "")
        return f"{name.removeprefix('aten::')}{f' in {module}' if module else ''}"


@dataclass
class Flow:
    """What is divided in one mode of a model, and how."""

    count: int  # of workers
    shardings: dict[fx.Node, Shardings] = field(default_factory=dict)
    outcomes: dict[fx.Node, Outcome] = field(default_factory=dict)
    shards: dict[str, Sharding] = field(default_factory=dict)  # the parameters that are divided
    styles: dict[str, Style] = field(default_factory=dict)  # by the names of matrices
    sources: dict[fx.Node, frozenset[str]] = field(default_factory=dict)  # the column layers behind a value
    rows: dict[fx.Node, frozenset[str]] = field(default_factory=dict)  # and behind each row layer

    def linear(self, linear: Linear, style: Style, blocks: int) -> None:
        """Divides a linear layer."""
        inputs, outputs = linear.features
        sharding, last = self.shardings.get(linear.input), len(shape(linear.input)) - 1
        assert not isinstance(sharding, tuple)
        if style == "column":
            if sharding is not None:
                raise Refusal("gets a value that is divided already")
            self._check(outputs, blocks, "outputs")
            self.shardings[linear.node] = Sharding(last, blocks)
            self.outcomes[linear.node] = Outcome(Sharding(last, blocks))
            self.sources[linear.node] = frozenset([linear.weight])
            self._shard(linear.weight, Sharding(linear.outputs, blocks))
            if linear.bias is not None:
                self._shard(linear.bias, Sharding(0, blocks))
        else:
            parts = sharding or Sharding(last)
            if parts.dim != last or not isinstance(parts.blocks, int):
                raise Refusal("gets a value that is divided along another dimension")
            self._check(inputs, parts.blocks, "inputs")
            self.outcomes[linear.node] = Outcome(None, {} if sharding else {linear.input: parts})
            self.rows[linear.node] = self.sources.get(linear.input, frozenset())
            self._shard(linear.weight, Sharding(1 - linear.outputs, parts.blocks))
        self.styles[linear.weight] = style

    def _check(self, features: int, blocks: int, what: str) -> None:
        each = divide(features, blocks)
        if each is None or divide(each, self.count) is None:
            reason = f"has {features} {what}, which {self.count} does not divide"
            raise Refusal(reason, by_size=blocks == 1)

    def _shard(self, name: str, sharding: Sharding) -> None:
        if self.shards.setdefault(name, sharding) != sharding:
            raise Refusal("is used twice, and would be divided in two ways")


Decide = Callable[[Linear, Sharding | None], Style | None]


def analyze(mode: ModeGraph, count: int, decide: Decide, blocks: Mapping[str, int]) -> Flow:
    """What is divided if `decide` divides each linear layer; Undividable if an operation refuses that."""
    flow, linears = Flow(count), find_linears(mode)
    for node in mode.graph.nodes:
        divided = [each for each in node.all_input_nodes if flow.shardings.get(each)]
        behind = frozenset[str]().union(*(flow.sources[each] for each in divided))
        linear = linears.get(node)
        try:
            if linear is not None:
                sharding = flow.shardings.get(linear.input)
                assert not isinstance(sharding, tuple)
                style = decide(linear, sharding)
                behind |= {linear.weight} if style else frozenset()
                if style is not None:
                    flow.linear(linear, style, blocks.get(linear.weight, 1))
                    continue
            if not divided or node in mode.sizes:
                continue
            outcome = propagate(Operation(node, flow.shardings, count))
        except Refusal as refusal:
            raise Undividable(node, behind, refusal) from None
        flow.outcomes[node], flow.shardings[node], flow.sources[node] = outcome, outcome.output, behind
    return flow
