"""LARS and LAMB: optimizers for large batches with layer-wise step sizes.

One learning rate does not suit all layers, and with the large rates of large batches some layer diverges. So
the step of a layer is proportional to the norm of its weights, independent of the norm of its gradient.

Tensors of at most one dimension (biases, parameters of norm layers) take plain steps without weight decay,
and so do parameter groups with `adapt=False`. Where either norm is 0, their ratio is taken as 1.

Both need the norms of whole tensors, so servers divide the model only between tensors.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError

Tensors = list[Tensor] | tuple[Tensor, ...]


class _Layerwise(torch.optim.Optimizer):
    """The base of both: the loop over groups, and which parameters are adapted."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises UsageError if a setting of this group is invalid."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            kinds: dict[tuple[Any, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.grad.is_sparse:
                        raise UsageError(
                            f"{type(self).__name__} does not support sparse gradients, because it needs the "
                            "norms of layers; leave out sparse=True, or give the embedding another optimizer"
                        )
                    adapted = group["adapt"] and parameter.dim() > 1
                    kind = (adapted, parameter.dtype, parameter.device)
                    kinds.setdefault(kind, []).append(parameter)
            for (adapted, *_), parameters in kinds.items():
                self._update(group, parameters, [parameter.grad for parameter in parameters], adapted)  # type: ignore[misc]
        return loss

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], adapted: bool
    ) -> None:
        """One step of tensors of one dtype and device. Gradients may be borrowed: do not change them."""
        raise NotImplementedError

    def _state_tensors(self, parameters: Sequence[Tensor], name: str) -> list[Tensor]:
        """A state tensor of each parameter, initially zero."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]


def _norms(tensors: Tensors) -> Tensor:
    """The norms of tensors; of 16-bit floats in 32 bits, because their squares overflow early."""
    short = tensors[0].dtype in (torch.float16, torch.bfloat16)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32 if short else None))


def _scale(tensors: Tensors, weights: Tensor, updates: Tensor, ratio: Tensor) -> None:
    """Multiplies each tensor by its ratio, or by 1 where either norm is 0."""
    ratio = torch.where((weights > 0) & (updates > 0), ratio, 1.0)
    torch._foreach_mul_(tensors, ratio.unbind())


class LARS(_Layerwise):
    """SGD with momentum in which each layer has its own learning rate (layer-wise adaptive rate scaling).

    r = trust ‖w‖ / (‖g‖ + decay ‖w‖), v <- momentum v + r (g + decay w), w <- w - lr v. Without decay the
    step does not depend on the scale of the gradient. The buffer v does not contain lr, so it needs no
    correction when lr changes. You, Gitman, Ginsburg 2017, Large Batch Training of Convolutional Networks. As
    in common implementations, parameters that are not adapted (biases, norm layers, groups with
    `adapt=False`) have no weight decay.

    >>> import torch, polyrhythm as pr
    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = pr.LARS(layer.parameters(), lr=1.0, weight_decay=1e-4)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": adapt,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        _check("LARS", lr=group["lr"], weight_decay=group["weight_decay"], trust=group["trust"])
        _check_below_1("LARS", momentum=group["momentum"])

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], adapted: bool
    ) -> None:
        updates = gradients
        if adapted:
            weights, slopes = _norms(parameters), _norms(gradients)
            decay = group["weight_decay"]
            updates = list(torch._foreach_add(gradients, parameters, alpha=decay))
            _scale(updates, weights, slopes, group["trust"] * weights / (slopes + decay * weights))
        if group["momentum"]:
            buffers = self._state_tensors(parameters, "momentum_buffer")
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            updates = buffers
        torch._foreach_add_(parameters, updates, alpha=-float(group["lr"]))


class LAMB(_Layerwise):
    """Adam in which the step of each layer has the norm of its weights, times the learning rate (LAMB).

    m and v are the moving means of g and g^2, as in Adam, divided by 1 - beta^t; r = m / (sqrt(v) + eps) +
    decay w, w <- w - lr ‖w‖ / ‖r‖ r. Without decay, and with an eps that is small compared with the gradient,
    the step does not depend on the gradient's scale. The function phi of the paper is the identity. You et
    al. 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes. As in common
    implementations, parameters that are not adapted (biases, norm layers, groups with `adapt=False`) have no
    weight decay.

    >>> import torch, polyrhythm as pr
    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = pr.LAMB(layer.parameters(), lr=0.01, weight_decay=0.01)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        _check("LAMB", lr=group["lr"], weight_decay=group["weight_decay"])
        betas, eps = group["betas"], group["eps"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise UsageError(f"LAMB: betas is {betas!r}; it must be two numbers, such as (0.9, 0.999)")
        _check_below_1("LAMB", **{"betas[0]": betas[0], "betas[1]": betas[1]})
        if not _number(eps) or not 0 < eps < float("inf"):
            raise UsageError(
                f"LAMB: eps is {eps!r}; it must be a finite number above 0, or elements without gradient "
                "become NaN"
            )

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], adapted: bool
    ) -> None:
        beta1, beta2 = group["betas"]
        # Always on the CPU, where its value is needed.
        steps = [self.state[each].setdefault("step", torch.tensor(0.0)) for each in parameters]
        means, squares = (
            self._state_tensors(parameters, "exp_avg"),
            self._state_tensors(parameters, "exp_avg_sq"),
        )
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        counts = [step.item() for step in steps]
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [(1 - beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, [1 - beta1**count for count in counts])
        torch._foreach_div_(updates, roots)
        if adapted:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            weights, lengths = _norms(parameters), _norms(updates)
            _scale(updates, weights, lengths, weights / lengths)
        torch._foreach_add_(parameters, updates, alpha=-float(group["lr"]))


def _check(name: str, **values: float | Tensor) -> None:
    for what, value in values.items():
        if not _number(value) or not 0 <= value < float("inf"):
            raise UsageError(f"{name}: {what} is {value!r}; it must be a finite number, 0 or more")


def _check_below_1(name: str, **values: float) -> None:
    for what, value in values.items():
        if not _number(value) or not 0 <= value < 1:
            raise UsageError(f"{name}: {what} is {value!r}; it must be a number of 0 or more, and below 1")


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)
