"""Deep Gradient Compression: so few entries that the momentum must be kept before them, not after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.compress.codecs.sparsify import TopK
from polyrhythm.compress.kernels import selection
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState


@dataclass(frozen=True)
class DGC(TopK):
    """The largest entries of what a worker's own momentum has gathered; on these both begin anew.

    u <- mu u + g; v <- v + u; I = the k largest |v_i|; sends v_I; v_I <- 0 and u_I <- 0. An entry that waits
    gathers what momentum would have made of it, and one that has gone does not push on with what is old
    (`masking`). Nesterov: v <- v + g + mu u instead. Before all that, a gradient longer than `clip` / sqrt(N)
    is cut to that length, all that is coded of it together: N of them make one of `clip`. The optimizer must
    have no momentum of its own; its weight decay acts after all this, without momentum.

    With density 1 it is SGD with momentum, but only with `masking=no`: where all is sent each time, the mask
    takes all momentum away. With momentum=0 it is `topk`.

    >>> import polyrhythm as pr
    >>> pr.parse("allreduce+dgc:0.001,warmup=1000").codec.momentum
    0.9
    """

    name: ClassVar[str] = "dgc"
    paper: ClassVar[str] = (
        "Lin, Han, Mao, Wang, Dally 2018, Deep Gradient Compression: Reducing the Communication Bandwidth "
        "for Distributed Training"
    )

    density: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float = math.inf
    feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise UsageError("momentum must be 0 or more, and below 1")
        if not self.clip > 0:
            raise UsageError("clip must be above 0")
        if not self.feedback:
            raise UsageError("dgc gathers what it has not sent; without feedback use topk")

    @property
    def gradients_only(self) -> bool:
        return True

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            own = group.get("momentum") or group.get("betas", (0.0,))[0]
            if self.momentum and own:
                raise UsageError(
                    f"{self.name} keeps the momentum itself, and the optimizer has one too ({float(own):g}): "
                    f"leave it out there (SGD with momentum=0), or use topk:{self.density:g} in place of dgc"
                )

    def send(self, values: Tensor, memory: CodecState) -> Tensor:
        if memory.residual is None:
            return self.encode(values, memory)
        u, v = memory.buffer("u"), memory.residual
        g = self._clipped(values, memory)
        u.mul_(self.momentum).add_(g)
        # In the paper u has another factor mu, for Nesterov; this way round the bits are those of PyTorch.
        gathered = g.add(u, alpha=self.momentum) if self.nesterov else u
        quota = self.quota(len(v), memory.count)
        indexes = selection.largest(v, quota, plus=gathered, exact=self.pick == "exact")
        code, got = selection.pack(v, indexes, half=self.values == "fp16")
        selection.take(v, indexes, got)  # with 16-bit values their rounding stays
        if self.masking:
            u[indexes] = 0.0
        return code

    @property
    def needs_norm(self) -> bool:
        return not math.isinf(self.clip)

    def _clipped(self, gradient: Tensor, memory: CodecState) -> Tensor:
        """N gradients of this norm, at random angles, make one of norm `clip`."""
        if math.isinf(self.clip):
            return gradient
        most = self.clip / math.sqrt(memory.workers)
        norm = float(gradient.norm()) if memory.norm is None else memory.norm
        return gradient * (most / norm) if norm > most else gradient

    def for_replies(self) -> Codec:
        return TopK(
            self.density, self.warmup, self.values, self.pick, feedback=self.feedback, per=self.per,
            dense=self.dense, pull=self.pull,
        )  # fmt: skip
