"""Threshold compression: an entry is sent when it reaches tau, as a pulse of that size and one sign bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.compress.codecs.warmup import tau_now
from polyrhythm.compress.kernels import selection
from polyrhythm.compress.kernels.entropy import LARGEST_TAU
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.compress.state import CodecState

SMALLEST, LARGEST = 1 / LARGEST_TAU, LARGEST_TAU
DECAY = 0.5 ** (1 / 20)  # tau changes by at most a factor of two in twenty steps


@dataclass
class AdaptedTau:
    """What `adaptive` keeps."""

    tau: float = 0.0  # 0: as configured
    used: float = 0.0  # in the last message


@dataclass(frozen=True)
class Threshold(Codec):
    r"""Sends entries that have grown to ±tau as one sign bit each; the rest waits (Strom).

    $$
    r &\leftarrow r + g \\
    \hat{g}_i &= \tau \operatorname{sign}(r_i) \text{ where } \lvert r_i \rvert \ge \tau,
    \text{ otherwise } 0 \\
    r &\leftarrow r - \hat{g}
    $$

    - `tau`: the size of a pulse
    - `pulses`: one pulse per entry at most, or many: all whole multiples of tau, so that $r$ stays below tau
      however large $g$ is
    - `adaptive`: change tau by at most 2 in 20 steps, as DL4J does: down while less than the share `low` of
      the entries is sent, up while more than `high`
    - `low`: the least share of entries for `adaptive`
    - `high`: the largest share of entries for `adaptive`
    - `exact`: use the power of two next to tau, with which float arithmetic loses nothing
    - `warmup`: for so many messages tau is smaller: from a 64th geometrically up

    >>> import torch
    >>> import polyrhythm as pr
    >>> from polyrhythm.compress import feedback
    >>> from polyrhythm.compress.state import CodecState
    >>> state, got = CodecState.alone(count=3), torch.zeros(3)
    >>> codec = pr.parse("allreduce+threshold:0.5").codec
    >>> for _ in range(2):
    ...     codec.decode(feedback.encode(codec, torch.tensor([0.25, -0.75, 0.1]), state), got)
    >>> got, state.residual
    (tensor([ 0.5000, -1.0000,  0.0000]), tensor([ 0.0000, -0.5000,  0.2000]))
    """

    name: ClassVar[str] = "threshold"
    main: ClassVar[str | None] = "tau"
    paper: ClassVar[str] = "Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing"

    tau: float = 1e-3
    pulses: Literal["one", "many"] = "one"
    adaptive: bool = False
    low: float = 1e-4
    high: float = 1e-2
    exact: bool = True
    warmup: int = 0
    feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if not SMALLEST <= self.tau <= LARGEST:
            raise UsageError("tau must be more than 0, as in 0.001 (and from 2^-100 to 2^100)")
        if not 0 <= self.low < self.high <= 1:
            raise UsageError("low and high are shares of the entries, and low must be less than high")
        if self.warmup < 0:
            raise UsageError("warmup must be 0 or more")
        if not self.feedback:
            raise UsageError("without feedback all entries below tau would be lost: leave out feedback=no")

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        import torch

        return self.encode_with_feedback(values, torch.zeros_like(values), state)

    def encode_with_feedback(self, values: Tensor, residual: Tensor, state: CodecState) -> Tensor:
        tau = self.tau_for(state, values)
        code, count = selection.pulses(residual, values, tau, many=self.pulses == "many")
        if self.adaptive and state.count >= self.warmup and len(values):
            adapted = state.own(AdaptedTau)
            wanted = (adapted.tau or self.tau) * self._factor(count / len(values))
            adapted.tau, adapted.used = min(max(wanted, SMALLEST), LARGEST), tau
        return code

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        selection.add(code, into, scale)

    def for_replies(self) -> Codec:
        return ThresholdReplies(
            self.tau, "many", high=self.high, exact=self.exact, per=self.per, dense=self.dense, pull=self.pull
        )

    def prepare(self, dtype: torch.dtype) -> None:
        selection.warm(dtype)

    def tau_for(self, state: CodecState, values: Tensor | None = None) -> float:
        """The size of a pulse in the next message, for these values."""
        adapted = state.own(AdaptedTau)
        tau = tau_now(adapted.tau or self.tau, self.warmup, state.count)
        if not self.exact:
            return selection.single(tau)
        used = adapted.used
        # Keeps its power of two until tau is a factor of two away. If it always took the nearest one, tau
        # could oscillate between two powers and never settle in its band.
        return used if used / 2 < tau < 2 * used else 2.0 ** round(math.log2(tau))

    def _factor(self, share: float) -> float:
        """How tau changes after this share of the entries was sent: a larger tau sends fewer."""
        return DECAY if share < self.low else 1 / DECAY if share > self.high else 1.0


@dataclass(frozen=True)
class ThresholdReplies(Threshold):
    """The same for differences of parameters, whose size is not that of gradients.

    Each message has its own tau: a power of two such that about the share `high` of the entries is sent, in
    whole multiples.
    """

    def tau_for(self, state: CodecState, values: Tensor | None = None) -> float:
        if values is None:
            return super().tau_for(state)
        few = max(1, round(self.high * len(values)))
        taken = values[selection.largest(values, few, exact=False).to(values.device)]
        if not len(taken):
            return super().tau_for(state)
        least = min(max(float(taken.abs().min()), SMALLEST), LARGEST)
        return 2.0 ** math.floor(math.log2(least))
