"""Which dimension of each value in a graph is divided over workers, and how operations pass that on.

A value is whole on every worker, or one of its dimensions is divided: a dimension of `blocks` equal blocks,
of each of which every worker has an equal, contiguous part. The output of a fused projection to queries, keys
and values has three blocks. A view may multiply them: in batch × heads as one dimension, each example is one.

Most operations are described by labels, as in `einsum`: dimensions with equal labels belong together. The
output is divided along the label of the divided dimension of the inputs; whole inputs are cut along it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

Size = Any  # an int, or an expression of sympy with the number of rows
Labels = Sequence[Any]
SizePlace = tuple[int, int | None]  # an argument, and the place in it if it is a list


@dataclass(frozen=True)
class Sharding:
    """A dimension of a value that is divided over the workers."""

    dim: int
    blocks: Size = 1


Shardings = Sharding | None | tuple[Sharding | None, ...]  # of an operation that returns several tensors


class Refusal(Exception):
    """An operation that cannot work on a divided value.

    `blocks`: how many more blocks might help. `by_size`: another number of workers might.
    """

    def __init__(self, reason: str, blocks: int | None = None, by_size: bool = False) -> None:
        super().__init__(reason)
        self.blocks, self.by_size = blocks, by_size


@dataclass(frozen=True)
class Outcome:
    """How an operation works on the parts of divided values."""

    output: Shardings
    cuts: Mapping[fx.Node, Sharding] = field(default_factory=dict)  # whole inputs that must be divided
    sizes: Mapping[SizePlace, Size] = field(default_factory=dict)  # arguments that become smaller


class Operation:
    """An operation of a graph, some of whose inputs are divided over `count` workers."""

    def __init__(self, node: fx.Node, shardings: Mapping[fx.Node, Shardings], count: int) -> None:
        self.node, self.shardings, self.count = node, shardings, count

    def argument(self, number: int, default: Any = None) -> Any:
        """An argument by its place in the schema, given by place or by name."""
        if number < len(self.node.args):
            return self.node.args[number]
        schema = self.node.target._schema.arguments[number]  # type: ignore[union-attr]
        return self.node.kwargs.get(
            schema.name, schema.default_value if schema.has_default_value() else default
        )

    def sharding(self, node: fx.Node) -> Sharding | None:
        found = self.shardings.get(node)
        assert not isinstance(found, tuple)
        return found

    @property
    def input(self) -> fx.Node:
        found = self.argument(0)
        assert isinstance(found, fx.Node)
        return found

    @property
    def first(self) -> Sharding:
        """The sharding of the first argument, the only one that is divided."""
        found = self.sharding(self.input)
        if found is None or any(
            self.shardings.get(each) for each in self.node.all_input_nodes if each is not self.input
        ):
            raise Refusal("needs one divided value")
        return found


def shape(node: fx.Node) -> tuple[Size, ...]:
    return tuple(map(size, node.meta["val"].shape))


def size(value: Any) -> Size:
    if isinstance(value, fx.Node):
        return size(value.meta["val"])
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return int(expression) if expression.is_Integer else expression
    return int(value)


def divide(total: Size, part: Size) -> Size | None:
    """The quotient if it is a whole number for every number of rows, else None."""
    if isinstance(total, int) and isinstance(part, int):
        return None if part == 0 or total % part else total // part
    quotient = total / part
    if quotient.is_Integer:
        return int(quotient)
    return quotient if quotient.is_integer else None


def wrap(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def by_labels(
    operation: Operation, inputs: Sequence[tuple[fx.Node, Labels]], output: Labels, whole: Labels = ()
) -> Outcome:
    """An operation whose inputs and output have labelled dimensions; None is a label for broadcast ones."""
    found: tuple[Any, Size] | None = None
    for node, labels in inputs:
        sharding = operation.sharding(node)
        if sharding is None:
            continue
        mine = (labels[sharding.dim], sharding.blocks)
        if found is not None and found != mine:
            raise Refusal("combines values that are divided along different dimensions")
        found = mine
    assert found is not None
    label, blocks = found
    if label is None or label in whole or label not in output:
        raise Refusal("needs it whole")
    cuts = {
        node: Sharding(list(labels).index(label), blocks)
        for node, labels in inputs
        if operation.sharding(node) is None and label in labels
    }
    for node, sharding in cuts.items():
        extent = divide(shape(node)[sharding.dim], sharding.blocks)
        if extent is None or divide(extent, operation.count) is None:
            raise Refusal("combines it with a value whose size is not a multiple")
    return Outcome(Sharding(list(output).index(label), blocks), cuts)


def view_sharding(before: Sequence[Size], sharding: Sharding, after: Sequence[Size], count: int) -> Sharding:
    """The sharding of a view: the dimension that begins where a block begins."""
    outer = math.prod(before[: sharding.dim]) * sharding.blocks
    extent = divide(before[sharding.dim], sharding.blocks)
    passed: Size = 1
    refusal = Refusal("has no dimension for it")
    for dim, length in enumerate(after):
        blocks = divide(outer, passed)
        inner = None if blocks is None else divide(length, blocks)
        if inner is not None and divide(inner, count) is not None:
            return Sharding(dim, blocks)
        if not refusal.by_size and isinstance(inner, int) and inner > 1:
            rest = divide(extent, inner)
            fits = rest is not None and divide(rest, count) is not None
            why = f"makes {inner} × {rest or '...'} of it, and {count} does not divide {inner}"
            refusal = Refusal(why, inner if fits else None, by_size=True)
        passed = passed * length
    raise refusal
