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
    r"""Top-k with momentum applied on each worker before the selection (Deep Gradient Compression).

    An entry that is not sent yet accumulates with momentum, so a density of 0.1 % still trains.

    $$
    u &\leftarrow \mu u + g, \qquad v \leftarrow v + u \\
    I &= \text{the } k \text{ entries with the largest } \lvert v_i \rvert \\
    \hat{g}_I &= v_I, \qquad v_I \leftarrow 0, \qquad u_I \leftarrow 0
    $$

    The optimizer must have no momentum of its own; its weight decay acts after all this, without momentum.
    With density 1 it is SGD with momentum, but only with `masking=no`: where everything is sent each time,
    masking takes all momentum away. With `momentum=0` it is `topk`.

    - `momentum`: the momentum $\mu$
    - `nesterov`: $v \leftarrow v + g + \mu u$ instead
    - `masking`: set $u_I$ to 0, so that old momentum does not push entries that were sent
    - `clip`: before all that, a gradient longer than `clip` / sqrt(N) is cut to that length, everything coded
      together: N of them make one of `clip`

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
            raise UsageError("dgc accumulates the entries that it has not sent; without feedback use topk")

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
