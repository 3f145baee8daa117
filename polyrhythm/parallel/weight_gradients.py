"""WeightGradients: those of linear layers, computed when the gradient of their input is on its way.

Of y = x Wᵀ + b, the backward pass computes dx = dy W, for which the place before waits, and dW = dyᵀ x, for
which nobody waits. So dW comes after dx was sent, as in zero-bubble schedules (https://arxiv.org/abs/2401.10241),
and is added to that of the micro-batches before in one operation. It takes the memory of dy for the linear
layers of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from polyrhythm.parallel.micro_batches import GradientSums

_NAME = "_linear_later"  # of the module that runs linear layers, in a graph


class _Product(NamedTuple):
    """What the gradients of a linear layer are computed from."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    dy: Tensor
    x: Tensor


class Products:
    """Weight gradients that are yet to be computed."""

    def __init__(self) -> None:
        self._products: list[_Product] = []

    def __bool__(self) -> bool:
        return bool(self._products)

    def put(self, product: _Product) -> None:
        self._products.append(product)

    def add_to(self, sums: GradientSums, parameters: Sequence[Tensor]) -> None:
        """Computes them, and adds them to the sums of these parameters."""
        number = {id(each): number for number, each in enumerate(parameters)}
        for each in self._products:
            dy, x = each.dy.reshape(-1, each.dy.shape[-1]), each.x.reshape(-1, each.x.shape[-1])
            if id(each.weight) in number:
                sums.add_product(number[id(each.weight)], dy.t(), x)
            if id(each.bias) in number:
                sums.add(number[id(each.bias)], dy.sum(0))


class WeightGradients:
    """Those of the backward pass that runs now at one place."""

    def __init__(self) -> None:
        self._found = Products()

    def defer(self, module: Any) -> None:
        """Makes the linear layers of a captured graph leave their weight gradients to this object."""
        if not isinstance(module, fx.GraphModule):
            return
        found = [node for node in module.graph.nodes if _is_linear(node, module)]
        if not found:
            return
        module.add_submodule(_NAME, _Linear(self))
        for node in found:
            x, weight, *bias = node.args
            with module.graph.inserting_before(node):
                made = module.graph.call_module(_NAME, (x, weight, bias[0] if bias else None))
            node.replace_all_uses_with(made)
            module.graph.erase_node(node)
        module.recompile()

    def __bool__(self) -> bool:
        return bool(self._found)

    def put(self, product: _Product) -> None:
        self._found.put(product)

    def take(self) -> Products:
        """Those that were found since the last call."""
        found, self._found = self._found, Products()
        return found


class _Linear(nn.Module):
    """Runs the linear layers of a graph."""

    def __init__(self, gradients: WeightGradients) -> None:
        super().__init__()
        self._gradients = gradients

    def forward(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        if (
            not torch.is_grad_enabled()
            or not weight.requires_grad
            or torch.is_autocast_enabled(x.device.type)
        ):
            return F.linear(x, weight, bias)
        # The output must not be a view that was made inside: a later operation may change it in place.
        flat = _Apart.apply(self._gradients, x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
        return flat.view(*x.shape[:-1], -1) if x.dim() != 2 else flat  # type: ignore[no-any-return]


class _Apart(torch.autograd.Function):
    """A linear layer whose backward pass computes the gradient of its input only."""

    @staticmethod
    def forward(ctx: Any, later: WeightGradients, x: Tensor, weight: nn.Parameter, bias: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.weight, ctx.bias = later, weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.later.put(_Product(ctx.weight, ctx.bias, dy, x))
        return None, dy @ weight if ctx.needs_input_grad[1] else None, None, None


def _is_linear(node: fx.Node, module: fx.GraphModule) -> bool:
    """True for a linear layer whose weight and bias are parameters."""
    if node.op != "call_function" or node.target is not torch.ops.aten.linear.default or node.kwargs:
        return False
    held = [each for each in node.args[1:] if each is not None]
    return all(
        isinstance(each, fx.Node)
        and each.op == "get_attr"
        and type(_attribute(module, str(each.target))) is nn.Parameter
        for each in held
    )


def _attribute(module: nn.Module, path: str) -> Any:
    *parents, name = path.split(".")
    return getattr(module.get_submodule(".".join(parents)), name)
