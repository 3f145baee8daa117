"""Pulses of one size: an entry is sent when it has grown to tau, as one bit that says which way."""

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
DECAY = 0.5 ** (1 / 20)  # so that tau moves by a factor of two in twenty steps at most


@dataclass(frozen=True)
class Threshold(Codec):
    """Entries that have grown to ±tau are sent as one pulse of that size, a bit each; the rest waits (Strom).

    r <- r + g; where |r_i| >= tau: sends (i, sign), r_i <- r_i - sign · tau. `pulses=many` sends all whole
    multiples, so that |r| stays below tau however large g is. `adaptive=yes` changes tau by at most 2 in 20
    steps, as DL4J does: down while less than the share `low` of the entries is sent, up while more than
    `high`. With `exact`, what is used is the power of two next to tau: only then does float arithmetic lose
    nothing. For `warmup` times tau is smaller: from a 64th geometrically up.

    >>> import torch
    >>> from polyrhythm.compress.state import CodecState
    >>> memory, got = CodecState.alone(count=3), torch.zeros(3)
    >>> codec = Threshold(0.5)
    >>> for _ in range(2):
    ...     codec.decode(codec.send(torch.tensor([0.25, -0.75, 0.1]), memory), got)
    >>> got, memory.residual
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
            raise UsageError("without feedback all that is below tau would be lost: leave feedback=no away")

    def encode(self, values: Tensor, memory: CodecState) -> Tensor:
        import torch

        return self._code(torch.zeros_like(values), values, memory)

    def send(self, values: Tensor, memory: CodecState) -> Tensor:
        if memory.residual is None:
            return self.encode(values, memory)
        return self._code(memory.residual, values, memory)

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        selection.add(code, into, scale)

    def for_replies(self) -> Codec:
        return Answers(
            self.tau, "many", high=self.high, exact=self.exact, per=self.per, dense=self.dense, pull=self.pull
        )

    def prepare(self, dtype: torch.dtype) -> None:
        selection.warm(dtype)

    def tau_for(self, memory: CodecState, values: Tensor | None = None) -> float:
        """The size of a pulse now, for these values."""
        tau = tau_now(memory.numbers.get("tau", self.tau), self.warmup, memory.count)
        if not self.exact:
            return selection.single(tau)
        used = memory.numbers.get("used", 0.0)
        # One that adapts keeps its power of two until tau has left it by a factor of two. Were it always the
        # next one, tau could swing to and fro between two of them, each step, and never find its band.
        return used if used / 2 < tau < 2 * used else 2.0 ** round(math.log2(tau))

    def _code(self, residual: Tensor, values: Tensor, memory: CodecState) -> Tensor:
        """residual += values, and the code of what is taken out of it."""
        tau = self.tau_for(memory, values)
        code, count = selection.pulses(residual, values, tau, many=self.pulses == "many")
        if self.adaptive and memory.count >= self.warmup and len(values):
            wanted = memory.numbers.get("tau", self.tau) * self._factor(count / len(values))
            memory.numbers.update(tau=min(max(wanted, SMALLEST), LARGEST), used=tau)
        return code

    def _factor(self, share: float) -> float:
        """How tau changes when this share of the entries was sent: less is sent when it is larger."""
        return DECAY if share < self.low else 1 / DECAY if share > self.high else 1.0


@dataclass(frozen=True)
class Answers(Threshold):
    """The same for a server's answers, which are changes of parameters and not gradients.

    They have another size, so they have another tau, which each message says: of a power of two, such that
    about the share `high` of the entries is sent, in whole multiples.
    """

    def tau_for(self, memory: CodecState, values: Tensor | None = None) -> float:
        if values is None:
            return super().tau_for(memory)
        few = max(1, round(self.high * len(values)))
        taken = values[selection.largest(values, few, exact=False).to(values.device)]
        if not len(taken):
            return super().tau_for(memory)
        least = min(max(float(taken.abs().min()), SMALLEST), LARGEST)
        return 2.0 ** math.floor(math.log2(least))
