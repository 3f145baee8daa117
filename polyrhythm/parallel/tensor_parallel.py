"""Tensor parallelism: rewrites a captured model so that each worker computes a part of its divided layers.

Where a whole value enters a divided region, its gradient is summed over the workers (Megatron's f). The
output of a row layer is summed over the workers (g), and its bias is added once, after the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx

from polyrhythm.parallel.graph import ModeGraph, ModelGraph
from polyrhythm.parallel.sharding import Sharding, Shardings, shape
from polyrhythm.parallel.sharding_rules import is_random
from polyrhythm.parallel.tensor_flow import Flow, Linear, find_linears
from polyrhythm.parallel.tensor_plan import TensorPlan
from polyrhythm.parallel.tracing import value_name

_SEED = 2**31 - 1


class TensorAxis:
    """The workers that compute divided layers together, as one of them sees it."""

    def __init__(self, rank: int, size: int, all_reduce: Callable[[Tensor], None] | None = None) -> None:
        """`all_reduce` sums a contiguous tensor over the workers in place; it may be set later."""
        self.rank, self.size, self.all_reduce = rank, size, all_reduce

    def sum(self, tensor: Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            return  # only its shape is computed
        if self.all_reduce is None:
            raise RuntimeError("the workers of a divided layer are not connected")
        self.all_reduce(tensor)

    def part(self, whole: Tensor, sharding: Sharding, extent: int | None = None) -> Tensor:
        """This worker's part of a whole tensor. `extent`: the size of a block, where their number varies."""
        dim, length = sharding.dim, whole.shape[sharding.dim]
        if sharding.blocks == 1:
            each = length // self.size
            return whole.narrow(dim, self.rank * each, each)
        block = extent if extent is not None else length // sharding.blocks
        blocks: Tensor = whole.unflatten(dim, (-1, self.size, block // self.size))  # type: ignore[no-untyped-call]
        return blocks.select(dim + 1, self.rank).flatten(dim, dim + 1)

    def shard(self, whole: Tensor, sharding: Sharding) -> Tensor:
        """A copy of this worker's part of a parameter."""
        return self.part(whole.detach(), sharding).clone(memory_format=torch.contiguous_format)


def join_shards(parts: Sequence[Tensor], sharding: Sharding) -> Tensor:
    """The whole tensor from the parts of all workers, in their order."""
    dim, blocks = sharding.dim, sharding.blocks
    cut = [each.unflatten(dim, (blocks, -1)) for each in parts]  # type: ignore[no-untyped-call]
    return torch.stack(cut, dim + 1).flatten(dim, dim + 2)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis  # type: ignore[attr-defined]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.axis.sum(total)
        return total, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, axis: TensorAxis) -> Tensor:
        # The product of a row layer is overwritten: nothing else uses it, nor does its backward pass.
        total = value.detach().contiguous()
        axis.sum(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Enter(nn.Module):
    """Megatron's f: the identity, whose gradient is summed over the workers."""

    def __init__(self, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, value: Tensor) -> Tensor:
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        return _Enter.apply(value, self.axis)  # type: ignore[no-any-return, no-untyped-call]


class SumParts(Enter):
    """Megatron's g: the sum over the workers, whose gradient is passed on."""

    def forward(self, value: Tensor) -> Tensor:
        return _Sum.apply(value, self.axis)  # type: ignore[no-any-return, no-untyped-call]


class CutOut(nn.Module):
    """This worker's part of a whole value."""

    def __init__(self, axis: TensorAxis, sharding: Sharding, extent: int | None) -> None:
        super().__init__()
        self.axis, self.sharding, self.extent = axis, sharding, extent

    def forward(self, value: Tensor) -> Tensor:
        return self.axis.part(value, self.sharding, self.extent)


class OwnRandomNumbers(nn.Module):
    """Runs an operation with other random numbers on each worker.

    Their seed is drawn from the numbers that all workers draw, so that they do not depend on a state of their
    own, and recomputed activations get the same.
    """

    def __init__(self, axis: TensorAxis, operation: Any) -> None:
        super().__init__()
        self.axis, self.operation = axis, operation

    def forward(self, *given: Any, **named: Any) -> Any:
        if any(isinstance(each, FakeTensor) for each in given):
            return self.operation(*given, **named)  # only its shape is computed
        seed = int(torch.randint(_SEED, ()))
        devices = {each.device for each in given if isinstance(each, Tensor) and each.device.type != "cpu"}
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed * self.axis.size + self.axis.rank)
            return self.operation(*given, **named)


def divide_tensors(graph: ModelGraph, plan: TensorPlan, axis: TensorAxis) -> ModelGraph:
    """The operations of one worker. Its divided parameters must be replaced by their parts."""
    train = _Rewriting(graph.train, plan.train, axis).graph()
    evaluation = train if graph.eval is graph.train else _Rewriting(graph.eval, plan.eval, axis).graph()
    return replace(graph, train=train, eval=evaluation)


class _Rewriting:
    """Copies the operations of one mode for the parts of divided values."""

    def __init__(self, mode: ModeGraph, flow: Flow, axis: TensorAxis) -> None:
        self._mode, self._flow, self._axis = mode, flow, axis
        self._linears = find_linears(mode)
        self._new, self._attributes = fx.Graph(), dict(mode.attributes)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._entered: dict[tuple[fx.Node, Sharding | None], fx.Node] = {}

    def graph(self) -> ModeGraph:
        for node in self._mode.graph.nodes:
            self._copies[node] = self._copy(node)
        self._new.lint()
        names = {value_name(old): value_name(new) for old, new in self._copies.items() if old.op != "output"}
        result = self._mode.result
        leaves = tuple(None if name is None else names[name] for name in result.leaves)
        return ModeGraph(self._new, self._attributes, replace(result, leaves=leaves))

    def _copy(self, node: fx.Node) -> fx.Node:
        outcome = self._flow.outcomes.get(node)
        if outcome is not None:
            style = self._flow.styles.get(self._linears[node].weight) if node in self._linears else None
            return self._row(self._linears[node]) if style == "row" else self._divided(node)
        new = self._new.node_copy(node, self._copies.__getitem__)
        new.meta = dict(node.meta)
        if node.op == "get_attr" and (sharding := self._flow.shards.get(str(node.target))):
            new.meta["val"] = self._local(node.meta["val"], sharding)
        if node.target is torch.ops.aten.sym_size.int:
            tensor, dim = node.args
            sharding = self._flow.shardings.get(tensor)  # type: ignore[assignment, arg-type]
            if sharding is not None and sharding.dim == dim:
                return self._call(operator.mul, (new, self._axis.size), node)
        return new

    def _divided(self, node: fx.Node) -> fx.Node:
        """An operation on the parts of divided values."""
        outcome = self._flow.outcomes[node]
        arguments: list[Any] = list(node.args)
        for (place, inside), given in outcome.sizes.items():
            smaller = self._smaller(given, node)
            if inside is None:
                arguments[place] = smaller
            else:
                arguments[place] = [*arguments[place][:inside], smaller, *arguments[place][inside + 1 :]]
        mapped, named = fx.map_arg(
            (tuple(arguments), dict(node.kwargs)), lambda each: self._given(each, node)
        )
        value = self._local(node.meta.get("val"), outcome.output)
        if is_random(node):
            module = OwnRandomNumbers(self._axis, node.target)
            return self._module("random", module, mapped, node, value, named)
        return self._call(node.target, mapped, node, named, value)

    def _given(self, argument: fx.Node, node: fx.Node) -> fx.Node:
        """An argument of a divided operation; a whole value enters the divided region."""
        new = self._copies.get(argument, argument)  # or it was made for this operation
        value = argument.meta.get("val")
        if (
            not isinstance(value, Tensor)
            or self._flow.shardings.get(argument)
            or argument not in self._copies
        ):
            return new
        if argument.op == "get_attr" and str(argument.target) in self._flow.shards:
            return new
        entered = new
        if value.is_floating_point() or value.is_complex():
            entered = self._once(
                (argument, None), lambda: self._module("enter", Enter(self._axis), (new,), node, value)
            )
        sharding = self._flow.outcomes[node].cuts.get(argument)
        if sharding is None:
            return entered
        return self._once((argument, sharding), lambda: self._cut(entered, argument, sharding, node))

    def _once(self, key: tuple[fx.Node, Sharding | None], make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self._entered:
            self._entered[key] = make()
        return self._entered[key]

    def _cut(self, entered: fx.Node, argument: fx.Node, sharding: Sharding, node: fx.Node) -> fx.Node:
        length = shape(argument)[sharding.dim]
        extent = None if isinstance(sharding.blocks, int) else int(length / sharding.blocks)
        value = self._local(argument.meta["val"], sharding)
        return self._module("part", CutOut(self._axis, sharding, extent), (entered,), node, value)

    def _row(self, linear: Linear) -> fx.Node:
        """A row layer: the sum of the products of all parts, and its bias once."""
        node, value = linear.node, linear.node.meta["val"]
        weight = next(each for each in node.all_input_nodes if each.target == linear.weight)
        given = (self._given(linear.input, node), self._copies[weight])
        product = torch.ops.aten.matmul.default if linear.outputs else torch.ops.aten.linear.default
        part = self._call(product, given, node, value=value)
        total = self._module("sum", SumParts(self._axis), (part,), node, value)
        if linear.bias is None:
            return total
        bias = next(each for each in node.all_input_nodes if each.target == linear.bias)
        return self._call(torch.ops.aten.add.Tensor, (total, self._copies[bias]), node, value=value)

    def _smaller(self, given: Any, node: fx.Node) -> Any:
        if isinstance(given, fx.Node):
            return self._call(operator.floordiv, (self._copies[given], self._axis.size), node)
        return given // self._axis.size

    def _module(
        self,
        kind: str,
        module: nn.Module,
        args: tuple[Any, ...],
        node: fx.Node,
        value: Any,
        named: Any = None,
    ) -> fx.Node:
        name = f"_tensor_{kind}_{len(self._attributes)}"
        self._attributes[name] = module
        return self._described(self._new.call_module(name, args, named or {}), node, value)

    def _call(
        self, target: Any, args: tuple[Any, ...], node: fx.Node, named: Any = None, value: Any = None
    ) -> fx.Node:
        return self._described(self._new.call_function(target, args, named or {}), node, value)

    def _described(self, new: fx.Node, node: fx.Node, value: Any) -> fx.Node:
        new.meta = {**node.meta, "val": value}
        return new

    def _local(self, value: Any, sharding: Shardings) -> Any:
        """What a value is on one worker, as far as later passes ask: its shape and dtype."""
        if isinstance(sharding, tuple):
            return [self._local(each, one) for each, one in zip(value, sharding, strict=True)]
        if sharding is None:
            return value
        sizes = list(value.shape)
        sizes[sharding.dim] = sizes[sharding.dim] // self._axis.size
        return value.new_empty(sizes)
