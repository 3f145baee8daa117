"""BatchNorm over the union of all workers' batches, so that N workers normalize like a single process.

Worker i has n_i of n = sum n_i numbers per channel, and its gradient is scaled by s_i after `backward()`
(see `session.sharing`: s_i is 1 in a complete round; for a borrowed batch s_i and n_i are 0):

    forward:   mean, variance of the union         y = (x - mean) / sqrt(variance + eps) * weight + bias
    backward:  S1 = sum_i s_i sum dy               S2 = sum_i s_i sum dy * xhat          (over all workers)
               dx = (dy - (S1 + xhat * S2) / (s_i n)) * weight / sqrt(variance + eps)

S1 and S2 carry the dependence of the other workers' losses on this worker's x. dx is divided by s_i because
every gradient is multiplied by s_i after `backward()`. The gradients of weight and bias are this worker's
part only: the strategy averages them like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.core.errors import UsageError
from polyrhythm.core.node import Node
from polyrhythm.model.replica import Replica
from polyrhythm.parallel.replicate import Replicated
from polyrhythm.session.batch_norm.policies import Rank0, other_names, shared_buffers
from polyrhythm.session.batch_norm.pooling import SumOverWorkers, pool


@dataclass(frozen=True)
class SyncGroup:
    """The workers that normalize together."""

    rank: int
    workers: int
    replica: Replica
    all_reduce: SumOverWorkers  # also inside a forward or backward pass


class Sync(Rank0):
    """All workers have the same statistics after every forward pass; other buffers are those of worker 0."""

    waits_in_pass: ClassVar[bool] = True

    def __init__(self, model: nn.Module, node: Node, replica: Replica, all_reduce: SumOverWorkers) -> None:
        super().__init__(model, node, lambda: replica.samples, list(shared_buffers(model)))
        group = SyncGroup(node.rank, len(node.members.workers), replica, all_reduce)
        for name, module in model.named_modules():
            if isinstance(module, Replicated) and len(module.devices) > 1:
                raise UsageError(
                    "batch_norm=sync cannot wait for other workers inside pr.replicate(), whose replicas run "
                    "side by side: start one worker per device, or use batch_norm=mean"
                )
            if not isinstance(module, _BatchNorm):
                continue
            if type(module).forward is not _BatchNorm.forward:
                raise UsageError(
                    f"batch_norm=sync does not support {type(module).__name__} ({name}), which has its own "
                    "forward; use BatchNorm1d, 2d or 3d, or another batch_norm"
                )
            if group.workers > 1:  # a single worker keeps the original, bit for bit
                module.forward = SyncForward(module, group)  # type: ignore[method-assign]

    def start(self) -> None:
        """All workers start with the buffers of worker 0, as with its parameters."""
        self.agree()
        self.show(self.model)
        self.agreed, self.copied = {}, other_names(self.model)  # from here on the statistics are equal


class SyncForward:
    """Replaces `forward` of one BatchNorm module. Copies of the module, pickled or not, have the original."""

    def __init__(self, module: _BatchNorm, group: SyncGroup) -> None:
        self._module, self._group = module, group

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")

    def __call__(self, input: Tensor) -> Tensor:
        module, group = self._module, self._group
        if not module.training:
            return type(module).forward(module, input)
        module._check_input_dim(input)  # type: ignore[no-untyped-call]
        count = input.numel() // input.shape[1] if group.replica.gradients.counts else 0
        with torch.no_grad():
            wide = input.to(_wide(input))
            variance, mean = torch.var_mean(wide, _dims(input), correction=0)
            mean, variance, total = pool(group.all_reduce, group.rank, group.workers, mean, variance, count)
            if total < 2:
                raise ValueError(f"BatchNorm cannot train on one number per channel: {tuple(input.shape)}")
            _track(module, mean, variance * (total / (total - 1)))
            rstd = torch.rsqrt(variance + module.eps)
        result: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, module.weight, module.bias, mean.to(wide), rstd.to(wide), total, group
        )
        return result


def _track(module: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Updates the running statistics as BatchNorm does."""
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if factor is None:  # a cumulative average
            factor = 1.0 / float(module.num_batches_tracked)
    for running, value in ((module.running_mean, mean), (module.running_var, variance)):
        running.mul_(1 - (factor or 0.0)).add_(value.to(running), alpha=factor or 0.0)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor,
        count: float, group: SyncGroup,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.count, ctx.group, ctx.bias = count, group, None if bias is None else bias.dtype
        y = (x - _like(mean, x)) * _like(rstd, x)
        if weight is not None:
            y = y * _like(weight, x)
        if bias is not None:
            y = y + _like(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = dy.to(mean.dtype)
        xhat = (x - _like(mean, x)) * _like(rstd, x)
        own = torch.stack([dy.sum(_dims(x)), (dy * xhat).sum(_dims(x))])
        dx = None
        if ctx.needs_input_grad[0]:
            scale: float = ctx.group.replica.gradients.scaling
            sums = (own.double() * scale if scale else torch.zeros_like(own, dtype=torch.float64)).cpu()
            ctx.group.all_reduce(sums.view(-1))
            dx = torch.zeros_like(x)  # of a borrowed batch
            if scale:
                first, second = (sums / (scale * ctx.count)).to(own)
                slope = rstd if weight is None else rstd * weight
                dx = ((dy - _like(first, x) - xhat * _like(second, x)) * _like(slope, x)).to(x.dtype)
        dweight = None if weight is None else own[1].to(weight.dtype)
        dbias = None if ctx.bias is None else own[0].to(ctx.bias)
        return dx, dweight, dbias, None, None, None, None


def _dims(x: Tensor) -> tuple[int, ...]:
    """All dimensions except the channels."""
    return (0, *range(2, x.dim()))


def _like(values: Tensor, x: Tensor) -> Tensor:
    """Reshapes one value per channel to broadcast over x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _wide(x: Tensor) -> torch.dtype:
    """The dtype to compute in: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)
