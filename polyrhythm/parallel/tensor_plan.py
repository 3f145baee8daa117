"""Which linear layers of a model are divided over workers: those that the user names, or all that pay."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.graph import ModelGraph
from polyrhythm.parallel.sharding import Sharding
from polyrhythm.parallel.splits import TensorParallel
from polyrhythm.parallel.tensor_flow import (
    Decide,
    Flow,
    Linear,
    Style,
    Undividable,
    analyze,
    find_linears,
    layer_name,
)

# One core, and the shared memory of a host: only their ratios matter.
_FLOPS, _BYTES, _LATENCY = 4e10, 2e9, 5e-5  # a second; seconds
_SIZES = range(2, 17)  # that messages propose


@dataclass(frozen=True)
class TensorPlan:
    """What is divided in both modes of a model."""

    train: Flow
    eval: Flow

    @property
    def shards(self) -> Mapping[str, Sharding]:
        """The parameters that are divided."""
        return {**self.eval.shards, **self.train.shards}

    @property
    def layers(self) -> dict[str, Style]:
        """The style of each divided layer."""
        return {layer_name(name): style for name, style in self.train.styles.items()}


def choose_plan(graph: ModelGraph, split: TensorParallel) -> TensorPlan:
    """The layers that are divided: those of the user's plan, or all that pay."""
    if split.layers:
        return _given(graph, split)
    chooser = _Chooser(graph, split.size)
    found = chooser.choose()
    if found is None:
        sizes = _that_work(lambda count: _Chooser(graph, count).choose() is not None)
        reason = "it has no linear layers that follow each other"
        if chooser.refusals:
            reason = _why(_telling(chooser.refusals))
        raise UsageError(f"{split} can divide no layer of the model: {reason}; {sizes}")
    return found


def _telling(refusals: Sequence[Undividable]) -> Undividable:
    """The refusal that says most: one that another size would avoid."""
    return next((each for each in refusals if each.by_size), refusals[0])


def _why(error: Undividable) -> str:
    layers = ", ".join(sorted(map(layer_name, error.layers)))
    return f"after {layers}, {error.operation} {error}" if error.blocked else f"{layers} {error}"


def _that_work(works: Callable[[int], bool]) -> str:
    sizes = [str(count) for count in _SIZES if works(count)]
    return f"tensor:{', tensor:'.join(sizes)} would work" if sizes else "use pipeline:2, or allreduce"


class _Chooser:
    """Finds the column and row layers of a model by itself.

    A layer that gets a whole value becomes a column, one that gets a divided value a row. If an operation
    refuses a divided value, the columns behind it stay whole, and the search begins again.
    """

    def __init__(self, graph: ModelGraph, count: int) -> None:
        self._graph, self._count = graph, count
        self._whole: set[str] = set()  # the matrices that stay whole
        self._blocks: dict[str, int] = {}
        self.refusals: list[Undividable] = []
        both = [{each.weight for each in find_linears(mode).values()} for mode in (graph.train, graph.eval)]
        self._known = both[0] & both[1]

    def choose(self) -> TensorPlan | None:
        """The plan; None if nothing can be divided."""
        found = self._settle()
        if not found.layers:
            return None
        regions = _regions(found.train)
        paying = [each for each in regions if self._pays(found.train, each)]
        if paying and len(paying) < len(regions):
            self._whole |= set(found.train.styles) - set().union(*paying)
            found = self._settle()
        return found

    def _settle(self) -> TensorPlan:
        while True:
            try:
                train = analyze(self._graph.train, self._count, self._decide, self._blocks)
                return TensorPlan(
                    train, analyze(self._graph.eval, self._count, _as(train.styles), self._blocks)
                )
            except Undividable as error:
                self.refusals.append(error)
                if error.blocks is not None and not error.layers & self._blocks.keys():
                    self._blocks.update(dict.fromkeys(error.layers, error.blocks))
                else:
                    self._whole |= error.layers

    def _decide(self, linear: Linear, sharding: Sharding | None) -> Style | None:
        if linear.weight in self._whole or linear.weight not in self._known:
            return None
        if sharding is None:
            return "column"
        return "row" if sharding.dim == len(linear.input.meta["val"].shape) - 1 else None

    def _pays(self, flow: Flow, region: set[str]) -> bool:
        """True if the work that a region saves takes longer than its sums over the workers."""
        linears = [each for each in find_linears(self._graph.train).values() if each.weight in region]
        work = sum(6 * _numbers(each.node) * each.features[0] for each in linears)
        columns = {each.input for each in linears if flow.styles[each.weight] == "column"}
        summed = [*columns, *(each.node for each in linears if flow.styles[each.weight] == "row")]
        cost = sum(_LATENCY + _bytes(each) / _BYTES for each in summed)
        return work / _FLOPS * (1 - 1 / self._count) > cost


def _regions(flow: Flow) -> list[set[str]]:
    """Sets of layers between which values are divided."""
    regions: list[set[str]] = []
    for node, columns in flow.rows.items():
        weight = next(str(each.target) for each in node.all_input_nodes if str(each.target) in flow.styles)
        joined = {weight, *columns}
        regions, others = (
            [each for each in regions if not each & joined],
            [each for each in regions if each & joined],
        )
        regions.append(joined.union(*others))
    return regions


def _numbers(node: fx.Node) -> int:
    value: Tensor = node.meta["val"]
    total = 1
    for each in value.shape:
        total *= each if isinstance(each, int) else int(each.node.hint)
    return total


def _bytes(node: fx.Node) -> int:
    value: Tensor = node.meta["val"]
    return _numbers(node) * value.element_size()


def _as(styles: Mapping[str, Style]) -> Decide:
    return lambda linear, _: styles.get(linear.weight)


def _given(graph: ModelGraph, split: TensorParallel) -> TensorPlan:
    """The plan of the user."""
    linears = {layer_name(each.weight): each for each in find_linears(graph.train).values()}
    for layer in split.layers:
        if layer not in linears:
            near = difflib.get_close_matches(layer, linears, n=3, cutoff=0.3) or list(linears)[:3]
            kind = "linear layer with weights of its own"
            raise UsageError(f"the model has no {kind} {layer!r}; similar ones: {', '.join(near)}")
    styles = {linears[layer].weight: style for layer, style in split.layers.items()}
    try:
        return _analyzed(graph, split.size, styles)
    except Undividable as error:
        raise UsageError(_refused(graph, split, styles, error)) from None


def _analyzed(graph: ModelGraph, count: int, styles: Mapping[str, Style]) -> TensorPlan:
    blocks: dict[str, int] = {}
    refusals: list[Undividable] = []
    while True:
        try:
            return TensorPlan(
                *(analyze(mode, count, _as(styles), blocks) for mode in (graph.train, graph.eval))
            )
        except Undividable as error:
            refusals.append(error)
            if error.blocks is None or error.layers & blocks.keys():
                raise _telling(refusals) from None
            blocks.update(dict.fromkeys(error.layers, error.blocks))


def _refused(
    graph: ModelGraph, split: TensorParallel, styles: Mapping[str, Style], error: Undividable
) -> str:
    def works(count: int) -> bool:
        try:
            return bool(_analyzed(graph, count, styles))
        except Undividable:
            return False

    sizes = [str(count) for count in _SIZES if works(count)]
    if sizes:
        works_too = ", ".join(f"tensor:{each}" for each in sizes)
        return f"tensor:{split.size} does not fit this plan: {_why(error)}; {works_too} would work"
    return (
        f"the plan leaves a value divided where it is needed whole: {_why(error)}; "
        "let a row layer follow each column layer before"
    )
