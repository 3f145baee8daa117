"""Codec: numbers to fewer bytes and back.

A codec encodes and decodes one flat segment at a time. What else a few codecs can do is a protocol of one
method, which the rest of the program looks for with isinstance. Defining a class with a `name` registers it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

from polyrhythm.core.grammar import Configured

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.compress.reducers.base import Reducer
    from polyrhythm.compress.state import CodecState
    from polyrhythm.compress.transforms.base import GradientTransform


class Reduction(Enum):
    """How the codes of several workers become the mean of their values."""

    ELEMENTWISE = "elementwise"  # summed: a code is one float per number, so parts can be summed separately
    SUM = "sum"  # summed: codes are floats, and their mean is the code of the mean
    HOPS = "hops"  # gathered; around a ring, decoded, added to and encoded again at each hop
    GATHER = "gather"  # gathered: each worker decodes the codes of all and averages them
    JOINT = "joint"  # not from codes: all workers compute the mean together (see `HasReducer`)

    @property
    def summed(self) -> bool:
        return self in (Reduction.ELEMENTWISE, Reduction.SUM)

    @property
    def gathered(self) -> bool:
        return self in (Reduction.HOPS, Reduction.GATHER)


@dataclass(frozen=True)
class Codec(Configured):
    """How numbers travel: fewer bytes out, nearly the same numbers back.

    It sees one flat segment of 32 or 64-bit floats at a time, and the sender's state for that segment. Every
    codec has these fields:

    - `feedback`: keep what was not sent, and send it later; on by default where a codec is biased
    - `per`: whether a code is about a whole vector or about one layer
    - `dense`: what is sent uncompressed: tensors of one dimension (1d) and layers by name, as in `1d/head`
    - `pull`: whether a server replies in this code too, or in full
    """

    kind = "codec"
    registry: ClassVar[dict[str, type[Codec]]] = {}
    reduction: ClassVar[Reduction] = Reduction.GATHER

    feedback: bool = field(default=False, kw_only=True)
    per: Literal["vector", "layer"] = field(default="vector", kw_only=True)
    dense: str = field(default="", kw_only=True)
    pull: Literal["coded", "dense"] = field(default="coded", kw_only=True)

    @abstractmethod
    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        """The flat tensor to send in place of these values. Must not change the values."""

    @abstractmethod
    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Adds the values that a code stands for, times `scale`. Raises WireError if the code is invalid."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Does slow work before the first step, such as compiling, for numbers of this dtype."""


@runtime_checkable
class FusedFeedback(Protocol):
    """Encodes and updates the residual in one pass. For other codecs `compress.feedback` takes three."""

    def encode_with_feedback(self, values: Tensor, residual: Tensor, state: CodecState) -> Tensor:
        """Adds the values to the residual, encodes it, and subtracts the decoded values."""


@runtime_checkable
class HasReducer(Protocol):
    """Averages over a group by more than decoding the codes of all."""

    def reducer(self) -> Reducer | None:
        """The reducer to use, or None for the one given by `reduction`."""


@runtime_checkable
class HasTransform(Protocol):
    """Transforms gradients before they are encoded."""

    def transform(self) -> GradientTransform | None:
        """The transform of this configuration, if it has one."""


@runtime_checkable
class ForReplies(Protocol):
    """Is replaced by another codec where differences of parameters are sent."""

    def for_replies(self) -> Codec:
        """The codec for a server's replies: it may not lengthen a difference on average.

        What it leaves out of one difference is part of the next, so it needs no feedback.
        """
