"""Deep Gradient Compression: top-k of so few entries that momentum must be applied before it, not after."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.compress.codecs.sparsify import TopK
from polyrhythm.compress.transforms.momentum import MomentumCorrection
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

    def transform(self) -> MomentumCorrection:
        return MomentumCorrection(self.momentum, self.nesterov, self.masking, self.clip)

    def encode_with_feedback(self, values: Tensor, residual: Tensor, state: CodecState) -> Tensor:
        correction = self.transform()
        code, indexes = self.take_largest(correction.apply(values, state), residual, state)
        correction.mask(indexes, state)
        return code

    def for_replies(self) -> Codec:
        return TopK(
            self.density, self.warmup, self.values, self.pick, feedback=self.feedback, per=self.per,
            dense=self.dense, pull=self.pull,
        )  # fmt: skip
