"""One bit a number."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.compress.codecs.quantize import HEADER, Quantizer
from polyrhythm.compress.kernels import dense
from polyrhythm.compress.reducers.majority_vote import MajorityVote
from polyrhythm.compress.transforms.momentum import RunningMean
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState


@dataclass(frozen=True)
class Sign(Quantizer):
    r"""Sends one bit per number, its sign, and the mean magnitude per layer; or takes a majority vote.

    $$
    p &= g + e \\
    \hat{g}_i &= \operatorname{sign}(p_i) \operatorname{mean} \lvert p \rvert, \qquad e \leftarrow p - \hat{g}
    $$

    With `vote` plain signs are sent, nothing is kept, and all workers continue with the sign of their sum, 0
    for a tie (signSGD with majority vote). One bit has no zero: a zero votes up and down in turn.

    - `vote`: take a majority vote of plain signs
    - `momentum`: vote by a running mean of the gradient (Signum)

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce+sign:vote=yes,momentum=0.9").codec)
    sign:feedback=false,vote=true,momentum=0.9
    """

    name: ClassVar[str] = "sign"
    paper: ClassVar[str] = "Karimireddy et al. 2019, Error Feedback Fixes SignSGD"
    form: ClassVar[int] = 6

    vote: bool = False
    momentum: float = 0.0
    feedback: bool = field(default=True, kw_only=True)
    per: Literal["vector", "layer"] = field(default="layer", kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UsageError("momentum must be from 0 to below 1")
        if self.momentum and not self.vote:
            raise UsageError("momentum needs vote=yes; otherwise set it in the optimizer")
        if self.vote:  # a vote has no size, so no residual can be computed
            object.__setattr__(self, "feedback", False)

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        return self._encode(values, None, state)

    def encode_with_feedback(self, values: Tensor, residual: Tensor, state: CodecState) -> Tensor:
        return self._encode(values, residual, state)

    def _encode(self, values: Tensor, residual: Tensor | None, state: CodecState) -> Tensor:
        import torch

        from polyrhythm.compress.kernels.dense.plain import units_between

        if (transform := self.transform()) is not None:
            values = transform.apply(values, state)
        wide = 0 if self.vote else values.element_size()
        code = self.new_code(values, wide + dense.packed_size(len(values), dense.BITS, 8))
        body = code[HEADER + wide :]
        mean = dense.backend(values).signs(values, residual, self.vote and state.count % 2 == 1, body)
        if self.vote:
            return code
        unit = torch.tensor([mean], dtype=values.dtype).clamp_(max=units_between(values.dtype, 1)[1])
        code[HEADER : HEADER + wide] = unit.view(torch.uint8)
        if residual is not None:
            dense.backend(residual).add_signs(body, residual, -unit.item())
        return code

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        wide = 0 if self.vote else into.element_size()
        body = self.body(code, into, wide + dense.packed_size(len(into), dense.BITS, 8))
        unit = scale if self.vote else (self.units(body, 1, into.dtype, 1) * scale).item()
        dense.backend(into).add_signs(body[wide:], into, unit)

    def transform(self) -> RunningMean | None:
        return RunningMean(self.momentum) if self.momentum else None

    def reducer(self) -> MajorityVote | None:
        return MajorityVote() if self.vote else None

    def for_replies(self) -> Codec:
        # A difference has a size, which votes would lose.
        return replace(self, vote=False, momentum=0.0)
