"""Codec: numbers to fewer bytes and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polyrhythm.core.grammar import Configured

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.compress.state import CodecState
    from polyrhythm.core.group import Group


@dataclass(frozen=True)
class Codec(Configured):
    """How numbers travel: fewer bytes out, nearly the same numbers back.

    It sees one flat stretch of 32 or 64-bit floats at a time, and with it the memory of whoever sends. Every
    codec has these fields:

    - `feedback`: is what was not sent kept, and sent later? Yes, as a rule, where a codec is biased
    - `per`: is a code about a whole vector, or about one layer?
    - `dense`: what travels as it is: tensors of one dimension (1d) and layers by name, as in `1d/head`
    - `pull`: does a server answer in this code too, or in full?
    """

    kind = "codec"
    registry: ClassVar[dict[str, type[Codec]]] = {}
    summable: ClassVar[bool] = False  # codes are floats, and their mean is the code of the mean
    hops: ClassVar[bool] = False  # it bears to be decoded, added to and coded again, hop by hop
    stateless: ClassVar[bool] = False  # each number is coded by itself, and nothing is remembered
    shared: ClassVar[bool] = False  # the mean is taken by all workers together, in `mean`

    feedback: bool = field(default=False, kw_only=True)
    per: Literal["vector", "layer"] = field(default="vector", kw_only=True)
    dense: str = field(default="", kw_only=True)
    pull: Literal["coded", "dense"] = field(default="coded", kw_only=True)

    @abstractmethod
    def encode(self, values: Tensor, memory: CodecState) -> Tensor:
        """The flat tensor to send in place of these values, which may not be changed."""

    @abstractmethod
    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Adds what a code stands for, times `scale`. The code may be anybody's: WireError if it is none."""

    def send(self, values: Tensor, memory: CodecState) -> Tensor:
        """The code of the values and of what was not sent before: with `feedback` the rest is kept."""
        if memory.residual is None:
            return self.encode(values, memory)
        memory.residual.add_(values)
        code = self.encode(memory.residual, memory)
        self.decode(code, memory.residual, -1.0)  # what the others get, not what was meant
        return code

    @property
    def needs_norm(self) -> bool:
        """Whether it has to know how long all is that is sent at once: `memory.norm`."""
        return False

    @property
    def gradients_only(self) -> bool:
        """Whether what it makes of a vector means nothing unless that is a gradient."""
        return False

    def agree(self, mean: Tensor) -> None:
        """Makes of the mean of what all have sent, in place, what all go on with."""

    def mean(self, group: Group, segments: Sequence[tuple[Tensor, CodecState]]) -> None:
        """Replaces each stretch by its mean over a group; for those that are `shared`."""
        raise NotImplementedError

    def for_replies(self) -> Codec:
        """The codec for a server's answers: changes of parameters, of which what was not sent is known."""
        return self

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises UsageError if it cannot work with the optimizer's parameter groups."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Whatever takes long, before the first step: compiling, for numbers of this kind."""
