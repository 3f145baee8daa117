"""Momentum that is kept on the worker, before compression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.compress.transforms.base import GradientTransform
from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState


@dataclass(frozen=True)
class MomentumCorrection(GradientTransform):
    """Momentum, clipping and masking of Deep Gradient Compression (Lin et al. 2018).

        g <- g clipped to norm clip / sqrt(N);  u <- mu u + g;  gives u, or g + mu u with Nesterov

    The result is added to the residual v, and the largest entries of v are sent. `mask` then sets u to 0
    where entries were sent, so that old momentum does not push them further.
    """

    momentum: float
    nesterov: bool
    masking: bool
    clip: float

    replaces_momentum: ClassVar[bool] = True

    @property
    def needs_norm(self) -> bool:
        return not math.isinf(self.clip)

    def apply(self, gradient: Tensor, state: CodecState) -> Tensor:
        g, u = self._clipped(gradient, state), state.vector("u")
        u.mul_(self.momentum).add_(g)
        # The paper multiplies u by mu once more for Nesterov. In this form the bits are those of PyTorch.
        return g.add(u, alpha=self.momentum) if self.nesterov else u

    def mask(self, indexes: Tensor, state: CodecState) -> None:
        """Called with the entries that were sent."""
        if self.masking:
            state.vector("u")[indexes] = 0.0

    def _clipped(self, gradient: Tensor, state: CodecState) -> Tensor:
        """N gradients of norm clip / sqrt(N), at random angles, add up to one of norm `clip`."""
        if math.isinf(self.clip):
            return gradient
        most = self.clip / math.sqrt(state.workers)
        norm = float(gradient.norm()) if state.norm is None else state.norm
        return gradient * (most / norm) if norm > most else gradient

    def check_optimizer(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            own = group.get("momentum") or group.get("betas", (0.0,))[0]
            if self.momentum and own:
                raise UsageError(
                    f"dgc applies momentum itself, and the optimizer has momentum too ({float(own):g}): "
                    "set momentum=0 in the optimizer, or use topk in place of dgc"
                )


@dataclass(frozen=True)
class RunningMean(GradientTransform):
    """The running mean of a worker's gradients: m <- mu m + (1 - mu) g, as Signum votes by."""

    momentum: float

    def apply(self, gradient: Tensor, state: CodecState) -> Tensor:
        return state.vector("momentum").lerp_(gradient, 1 - self.momentum)
