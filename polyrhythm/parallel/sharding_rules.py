"""How each operation works on divided values: a table of rules by the names of operations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from polyrhythm.parallel.hazards import mutated_arguments
from polyrhythm.parallel.sharding import (
    Labels,
    Operation,
    Outcome,
    Refusal,
    Sharding,
    Size,
    SizePlace,
    by_labels,
    divide,
    shape,
    view_sharding,
    wrap,
)  # fmt: skip


def propagate(operation: Operation) -> Outcome:
    """How an operation works on parts; Refusal if it needs a value whole."""
    node = operation.node
    target = node.target
    if node.op != "call_function":
        raise Refusal("needs it whole")
    if target is operator.getitem:
        several = operation.shardings[node.args[0]]  # type: ignore[index]
        assert isinstance(several, tuple)
        return Outcome(several[node.args[1]])  # type: ignore[index]
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise Refusal("needs it whole")
    name = target._schema.name.removeprefix("aten::")
    rule = RULES.get(name)
    if rule is None and (torch.Tag.pointwise in target.tags or name in ELEMENTWISE):
        rule = elementwise
    if rule is None:
        raise Refusal("needs it whole")
    outcome = rule(operation)
    changed = mutated_arguments(node, {})
    if any(not operation.shardings.get(each) for each in changed):
        raise Refusal("changes a whole value in place")
    return outcome


def is_random(node: fx.Node) -> bool:
    """True for operations that draw random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name.removeprefix("aten::")
    if name == "scaled_dot_product_attention":
        return bool(Operation(node, {}, 1).argument(4))
    if name in ("dropout", "dropout_", "alpha_dropout"):
        return bool(node.args[1] and node.args[2])
    return torch.Tag.nondeterministic_seeded in target.tags


# --- operations described by labels -----------------------------------------------------------------


def _aligned(node: fx.Node, output: Sequence[Size]) -> list[int | None]:
    """The dimensions of the output that those of an input are broadcast to; None for those of size one."""
    sizes = shape(node)
    shift = len(output) - len(sizes)
    return [
        place + shift if each != 1 or output[place + shift] == 1 else None for place, each in enumerate(sizes)
    ]


def _tensors(operation: Operation) -> list[fx.Node]:
    return [each for each in operation.node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]


def elementwise(operation: Operation) -> Outcome:
    output = shape(operation.node)
    return by_labels(
        operation, [(each, _aligned(each, output)) for each in _tensors(operation)], range(len(output))
    )


def _over(place: int) -> Callable[[Operation], Outcome]:
    """An operation along one dimension that keeps the shape, such as softmax."""

    def rule(operation: Operation) -> Outcome:
        rank = len(shape(operation.node))
        return by_labels(
            operation, [(operation.input, range(rank))], range(rank), [wrap(operation.argument(place), rank)]
        )

    return rule


def _normalized(operation: Operation) -> Outcome:
    rank, given = len(shape(operation.node)), len(operation.argument(1))
    inputs = [(each, range(rank - len(shape(each)), rank)) for each in _tensors(operation)]
    return by_labels(operation, inputs, range(rank), range(rank - given, rank))


def _reduced(operation: Operation) -> Outcome:
    schema = operation.node.target._schema  # type: ignore[union-attr]
    dims = operation.argument(1) if [each.name for each in schema.arguments[1:2]] == ["dim"] else None
    rank = len(shape(operation.input))
    if dims is None:
        raise Refusal("needs it whole")
    gone = {wrap(each, rank) for each in ([dims] if isinstance(dims, int) else dims)} or set(range(rank))
    kept = len(shape(operation.node)) == rank
    output = [None if each in gone else each for each in range(rank) if kept or each not in gone]
    return by_labels(operation, [(operation.input, range(rank))], output)


def _matmul(operation: Operation) -> Outcome:
    one, other = operation.argument(0), operation.argument(1)
    output = shape(operation.node)
    left, right = len(shape(one)), len(shape(other))
    if min(left, right) < 2:
        raise Refusal("needs it whole")
    batch = len(output) - 2
    inputs = []
    for node, last in ((one, ["m", "k"]), (other, ["k", "n"])):
        sizes = shape(node)[:-2]
        labels = [batch - len(sizes) + place if each != 1 else None for place, each in enumerate(sizes)]
        inputs.append((node, [*labels, *last]))
    return by_labels(operation, inputs, [*range(batch), "m", "n"], ["k"])


def _linear(operation: Operation) -> Outcome:
    rank = len(shape(operation.node))
    inputs: list[tuple[fx.Node, Labels]] = [
        (operation.argument(0), [*range(rank - 1), "k"]),
        (operation.argument(1), ["n", "k"]),
    ]
    if operation.argument(2) is not None:
        inputs.append((operation.argument(2), ["n"]))
    return by_labels(operation, inputs, [*range(rank - 1), "n"], ["k"])


def _attention(operation: Operation) -> Outcome:
    batch = len(shape(operation.node)) - 2
    inputs: list[tuple[fx.Node, Labels]] = []
    for place, last in enumerate((["l", "e"], ["s", "e"], ["s", "v"])):
        node = operation.argument(place)
        inputs.append((node, [*range(batch), *last]))
    if (mask := operation.argument(3)) is not None:
        aligned = _aligned(mask, (*shape(operation.node)[:-1], shape(operation.argument(1))[-2]))
        names: dict[Any, Any] = {batch: "l", batch + 1: "s"}
        inputs.append((mask, [names.get(each, each) for each in aligned]))
    return by_labels(operation, inputs, [*range(batch), "l", "v"], ["l", "s", "e", "v"])


def _einsum(operation: Operation) -> Outcome:
    equation = operation.argument(0).replace(" ", "")
    if "." in equation or "->" not in equation:
        raise Refusal("needs it whole")
    inputs, output = equation.split("->")
    return by_labels(operation, list(zip(operation.argument(1), inputs.split(","), strict=True)), output)


def _stacked(operation: Operation) -> Outcome:
    output, dim = len(shape(operation.node)), wrap(operation.argument(1), len(shape(operation.node)))
    labels = [each for each in range(output) if each != dim]
    return by_labels(operation, [(each, labels) for each in operation.argument(0)], range(output), [dim])


def _concatenated(operation: Operation) -> Outcome:
    rank = len(shape(operation.node))
    dim = wrap(operation.argument(1), rank)
    pieces = operation.argument(0)
    shardings = [operation.sharding(each) for each in pieces]
    if not any(each is not None and each.dim == dim for each in shardings):
        return by_labels(operation, [(each, range(rank)) for each in pieces], range(rank))
    extents = {
        each and divide(shape(piece)[dim], each.blocks) for piece, each in zip(pieces, shardings, strict=True)
    }
    if None in extents or len(extents) > 1 or any(each and each.dim != dim for each in shardings):
        raise Refusal("joins parts of different sizes")
    return Outcome(Sharding(dim, sum(each.blocks for each in shardings if each)))


# --- operations that move dimensions ----------------------------------------------------------------


def _moved(order: Callable[[Operation, int], Sequence[int | None]]) -> Callable[[Operation], Outcome]:
    """An operation whose output has dimensions of its input in another order; None for new ones."""

    def rule(operation: Operation) -> Outcome:
        sharding = operation.first
        output = list(order(operation, len(shape(operation.input))))
        if sharding.dim not in output:
            raise Refusal("needs it whole")
        return Outcome(Sharding(output.index(sharding.dim), sharding.blocks))

    return rule


def _swapped(operation: Operation, rank: int) -> list[int]:
    one, other = (wrap(operation.argument(place), rank) for place in (1, 2))
    order = list(range(rank))
    order[one], order[other] = order[other], order[one]
    return order


def _movedim(operation: Operation, rank: int) -> list[int]:
    sources, targets = (
        [wrap(each, rank) for each in ([given] if isinstance(given, int) else given)]
        for given in (operation.argument(1), operation.argument(2))
    )
    rest = iter(each for each in range(rank) if each not in sources)
    placed = dict(zip(targets, sources, strict=True))
    return [placed[place] if place in placed else next(rest) for place in range(rank)]


def _squeezed(operation: Operation, rank: int) -> list[int]:
    sizes = shape(operation.input)
    dims = range(rank) if len(operation.node.args) < 2 else operation.argument(1)
    gone = {wrap(each, rank) for each in ([dims] if isinstance(dims, int) else dims)}
    return [each for each in range(rank) if not (each in gone and sizes[each] == 1)]


def _unsqueezed(operation: Operation, rank: int) -> list[int | None]:
    order: list[int | None] = list(range(rank))
    order.insert(wrap(operation.argument(1), rank + 1), None)
    return order


def _selected(operation: Operation) -> Outcome:
    sharding, sizes = operation.first, shape(operation.input)
    dim = wrap(operation.argument(1), len(sizes))
    if dim == sharding.dim:
        raise Refusal("takes one place of a divided dimension", sizes[dim])
    return Outcome(Sharding(sharding.dim - (dim < sharding.dim), sharding.blocks))


# --- operations that change sizes -------------------------------------------------------------------


def _viewed(place: int, first: Callable[[Operation], int]) -> Callable[[Operation], Outcome]:
    """A view. `place`: the argument with the sizes of the dimensions from `first` on."""

    def rule(operation: Operation) -> Outcome:
        sharding = operation.first
        sharding = view_sharding(shape(operation.input), sharding, shape(operation.node), operation.count)
        sizes: dict[SizePlace, Size] = {}
        inside = sharding.dim - first(operation)
        given = operation.argument(place)
        if 0 <= inside < len(given) and given[inside] != -1:
            sizes[place, inside] = given[inside]
        return Outcome(sharding, sizes=sizes)

    return rule


def _flattened(operation: Operation) -> Outcome:
    return Outcome(
        view_sharding(shape(operation.input), operation.first, shape(operation.node), operation.count)
    )


def _expanded(operation: Operation) -> Outcome:
    sharding, given = operation.first, operation.argument(1)
    dim = sharding.dim + len(given) - len(shape(operation.input))
    return Outcome(Sharding(dim, sharding.blocks), sizes={} if given[dim] == -1 else {(1, dim): given[dim]})


def _pieces(lengths: Callable[[Operation, Size], Sequence[Size]]) -> Callable[[Operation], Outcome]:
    """An operation that returns pieces of these lengths of a dimension, its last argument."""

    def rule(operation: Operation) -> Outcome:
        sharding, before = operation.first, shape(operation.input)
        dim = wrap(operation.argument(len(operation.node.target._schema.arguments) - 1), len(before))  # type: ignore[union-attr]
        wanted = lengths(operation, before[dim])
        if dim != sharding.dim:
            return Outcome((sharding,) * len(wanted))
        blocks = _blocks(before[dim], sharding, wanted)
        given = operation.argument(1)
        sizes: dict[SizePlace, Size] = {}
        if isinstance(given, list | tuple):
            sizes = {(1, place): each for place, each in enumerate(given)}
        elif operation.node.target._schema.name != "aten::chunk":  # type: ignore[union-attr]
            sizes = {(1, None): given}
        return Outcome(tuple(Sharding(dim, each) for each in blocks), sizes=sizes)

    return rule


def _blocks(length: Size, sharding: Sharding, pieces: Sequence[Size]) -> list[Size]:
    """How many blocks each piece has; Refusal unless all have whole ones."""
    extent = divide(length, sharding.blocks)
    found = [None if extent is None else divide(each, extent) for each in pieces]
    if None in found:
        equal = len(set(pieces)) == 1
        raise Refusal("cuts a divided dimension", len(pieces) if equal else None)
    return found


def _split(operation: Operation, length: Size) -> list[Size]:
    each = operation.argument(1)
    if not isinstance(length, int) or not isinstance(each, int):
        raise Refusal("cuts a dimension of varying size")
    return [min(each, length - start) for start in range(0, length, each)]


def _chunk(operation: Operation, length: Size) -> list[Size]:
    count = operation.argument(1)
    if not isinstance(length, int) or length % count:
        raise Refusal("cuts a dimension into unequal pieces")
    return [length // count] * count


def _unbound(operation: Operation) -> Outcome:
    sharding, sizes = operation.first, shape(operation.input)
    dim = wrap(operation.argument(1), len(sizes))
    if dim == sharding.dim:
        raise Refusal("takes the places of a divided dimension apart", sizes[dim])
    return Outcome((Sharding(sharding.dim - (dim < sharding.dim), sharding.blocks),) * sizes[dim])


def _sliced(operation: Operation) -> Outcome:
    sharding, before = operation.first, shape(operation.input)
    dim = wrap(operation.argument(1), len(before))
    if dim != sharding.dim:
        return Outcome(sharding)
    begin, end, length = operation.argument(2) or 0, operation.argument(3), before[dim]
    if end is None or (isinstance(end, int) and isinstance(length, int) and end >= length):
        end = length
    if begin == 0 and end == length and operation.argument(4, 1) == 1:
        return Outcome(sharding)
    if not all(isinstance(each, int) for each in (begin, end, length)) or operation.argument(4, 1) != 1:
        raise Refusal("cuts a divided dimension")
    begin, end = wrap(begin, length), wrap(end, length)
    extent = divide(length, sharding.blocks)
    if extent is None or begin % extent or end % extent:
        common = math.gcd(begin, end, length)
        raise Refusal("cuts a divided dimension", length // common)
    return Outcome(Sharding(dim, (end - begin) // extent), sizes={(2, None): begin, (3, None): end})


def _repeated(operation: Operation) -> Outcome:
    sharding, dim = operation.first, operation.argument(2)
    if not isinstance(operation.argument(1), int) or dim is None:
        raise Refusal("needs it whole")
    return Outcome(sharding)


def _kept(operation: Operation) -> Outcome:
    sharding = operation.sharding(operation.input)  # another argument gives only its dtype
    if sharding is None:
        raise Refusal("needs it whole")
    return Outcome(sharding)


# Elementwise operations that torch does not tag as such.
ELEMENTWISE = {"dropout", "dropout_", "alpha_dropout", "masked_fill", "masked_fill_", "where"}
KEPT = ("contiguous", "to", "_to_copy", "detach", "alias", "clone", "type_as", "zeros_like", "ones_like")

RULES: dict[str, Callable[[Operation], Outcome]] = {
    **dict.fromkeys(KEPT, _kept),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum"), _over(1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all"), _reduced),
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    "stack": _stacked,
    "cat": _concatenated,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _moved(_swapped)),
    **dict.fromkeys(("t", "numpy_T"), _moved(lambda _, rank: range(rank)[::-1])),
    **dict.fromkeys(("mT", "adjoint"), _moved(lambda _, rank: [*range(rank - 2), rank - 1, rank - 2])),
    "permute": _moved(lambda operation, rank: [wrap(each, rank) for each in operation.argument(1)]),
    **dict.fromkeys(("movedim", "moveaxis"), _moved(_movedim)),
    "squeeze": _moved(_squeezed),
    "unsqueeze": _moved(_unsqueezed),
    "select": _selected,
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), _viewed(1, lambda operation: 0)),
    "unflatten": _viewed(2, lambda operation: wrap(operation.argument(1), len(shape(operation.input)))),
    "flatten": _flattened,
    "expand": _expanded,
    "split": _pieces(_split),
    "split_with_sizes": _pieces(lambda operation, length: operation.argument(1)),
    "chunk": _pieces(_chunk),
    "unbind": _unbound,
    "slice": _sliced,
    "repeat_interleave": _repeated,
}  # fmt: skip
