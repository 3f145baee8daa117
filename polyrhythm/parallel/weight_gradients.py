"""WeightGradients: those of linear layers and convolutions, computed after the gradient of their input.

Of y = x Wᵀ + b, the backward pass computes dx = dy W, for which the place before waits, and dW = dyᵀ x, for
which nobody waits. So dW comes after dx was sent, or later still in zero-bubble schedules
(https://arxiv.org/abs/2401.10241). That of a linear layer is added to that of the micro-batches before in one
operation. Until then x and dy are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from polyrhythm.parallel.micro_batches import GradientSums

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default)


class _Gradient(Protocol):
    """What the gradients of one layer are computed from."""

    def add_to(self, sums: GradientSums, numbers: Mapping[int, int]) -> None:
        """Computes them, and adds them to the sums. `numbers`: of the parameters there, by id."""


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    x: Tensor

    def add_to(self, sums: GradientSums, numbers: Mapping[int, int]) -> None:
        dy, x = self.dy.reshape(-1, self.dy.shape[-1]), self.x.reshape(-1, self.x.shape[-1])
        if id(self.weight) in numbers:
            sums.add_product(numbers[id(self.weight)], dy.t(), x)
        if id(self.bias) in numbers:
            sums.add(numbers[id(self.bias)], dy.sum(0))


class _Convolution(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    x: Tensor
    settings: tuple[Any, ...]

    def add_to(self, sums: GradientSums, numbers: Mapping[int, int]) -> None:
        held = [id(self.weight) in numbers, id(self.bias) in numbers]
        found = _convolution_backward(self.dy, self.x, self.weight, self.settings, [False, *held])
        for each, gradient in zip((self.weight, self.bias), found[1:], strict=True):
            if id(each) in numbers:
                sums.add(numbers[id(each)], gradient)


class PutOff:
    """Gradients of a backward pass that are yet to be computed."""

    def __init__(self) -> None:
        self._gradients: list[_Gradient] = []

    def __bool__(self) -> bool:
        return bool(self._gradients)

    def put(self, gradient: _Gradient) -> None:
        self._gradients.append(gradient)

    def add_to(self, sums: GradientSums, parameters: Sequence[Tensor]) -> None:
        """Computes them, and adds them to the sums of these parameters."""
        numbers = {id(each): number for number, each in enumerate(parameters)}
        for each in self._gradients:
            each.add_to(sums, numbers)


class WeightGradients:
    """Those that the backward pass which runs now at one place has left."""

    def __init__(self) -> None:
        self._found = PutOff()

    def defer(self, module: Any) -> None:
        """Makes the layers of a captured graph leave their weight gradients to this object."""
        if not isinstance(module, fx.GraphModule):
            return
        found = [node for node in module.graph.nodes if _is_layer(node, module)]
        for node in found:
            name = f"_{node.target._opname}_later"
            if not hasattr(module, name):
                module.add_submodule(name, _Layer(self, node.target))
            with module.graph.inserting_before(node):
                made = module.graph.call_module(name, node.args)
            node.replace_all_uses_with(made)
            module.graph.erase_node(node)
        if found:
            module.recompile()

    def __bool__(self) -> bool:
        return bool(self._found)

    def put(self, gradient: _Gradient) -> None:
        self._found.put(gradient)

    def take(self) -> PutOff:
        """Those that were left since the last call."""
        found, self._found = self._found, PutOff()
        return found


class _Layer(nn.Module):
    """Runs the linear layers of a graph, or its convolutions."""

    def __init__(self, gradients: WeightGradients, operation: Any) -> None:
        super().__init__()
        self._gradients, self._operation = gradients, operation

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *settings: Any) -> Tensor:
        if (
            not torch.is_grad_enabled()
            or not weight.requires_grad
            or torch.is_autocast_enabled(x.device.type)
            or (self._operation in _CONVOLUTIONS and x.dim() != weight.dim())  # one example without a row
        ):
            return self._operation(x, weight, bias, *settings)  # type: ignore[no-any-return]
        if self._operation in _CONVOLUTIONS:
            return _ApartConvolution.apply(self._gradients, x, weight, bias, self._operation, settings)  # type: ignore[no-any-return, no-untyped-call]
        # The output must not be a view that was made inside: a later operation may change it in place.
        flat = _ApartLinear.apply(self._gradients, x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
        return flat.view(*x.shape[:-1], -1) if x.dim() != 2 else flat  # type: ignore[no-any-return]


class _ApartLinear(torch.autograd.Function):
    """A linear layer whose backward pass computes the gradient of its input only."""

    @staticmethod
    def forward(ctx: Any, later: WeightGradients, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.weight, ctx.bias = later, weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.later.put(_Linear(ctx.weight, ctx.bias, dy, x))
        return None, dy @ weight if ctx.needs_input_grad[1] else None, None, None


class _ApartConvolution(torch.autograd.Function):
    """A convolution whose backward pass computes the gradient of its input only."""

    @staticmethod
    def forward(
        ctx: Any, later: WeightGradients, x: Tensor, weight: Tensor, bias: Any, operation: Any, settings: Any
    ) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.weight, ctx.bias, ctx.settings = later, weight, bias, settings
        return operation(x, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.later.put(_Convolution(ctx.weight, ctx.bias, dy, x, ctx.settings))
        dx = None
        if ctx.needs_input_grad[1]:
            dx = _convolution_backward(dy, x, weight, ctx.settings, [True, False, False])[0]
        return None, dx, None, None, None, None


def _convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, settings: tuple[Any, ...], wanted: list[bool]
) -> Any:
    """The wanted ones of the gradients of x, weight and bias."""
    zeros = [0] * (weight.dim() - 2)
    ones = [1] * len(zeros)
    defaults: tuple[Any, ...] = (ones, zeros, ones, 1)
    stride, padding, dilation, groups = (*settings, *defaults[len(settings) :])
    return _aten.convolution_backward(
        dy, x, weight, [len(weight)], stride, padding, dilation, False, zeros, groups, wanted
    )


def _is_layer(node: fx.Node, module: fx.GraphModule) -> bool:
    """True for a linear layer or a convolution whose weight and bias are parameters."""
    if node.op != "call_function" or node.target not in (_aten.linear.default, *_CONVOLUTIONS) or node.kwargs:
        return False
    held = [each for each in node.args[1:3] if each is not None]
    return all(
        isinstance(each, fx.Node)
        and each.op == "get_attr"
        and type(_attribute(module, str(each.target))) is nn.Parameter
        for each in held
    )


def _attribute(module: nn.Module, path: str) -> Any:
    *parents, name = path.split(".")
    return getattr(module.get_submodule(".".join(parents)), name)
