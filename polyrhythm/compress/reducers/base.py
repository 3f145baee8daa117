"""Reducer: replaces vectors by their mean over a group, through a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Compressor, Decompressor
    from polyrhythm.compress.state import CodecState
    from polyrhythm.core.group import Group


class Reducer(ABC):
    """Replaces vectors by their mean over a group, through a codec."""

    gradients_only: ClassVar[bool] = False  # the result is meaningless unless the vectors are gradients

    @abstractmethod
    def begin(
        self, group: Group, vectors: Sequence[Tensor], compressor: Compressor, *flags: Tensor
    ) -> Callable[[], None]:
        """Starts a mean without waiting; call the returned function once to wait for it.

        The flags, a few numbers, travel uncoded and become their mean.
        """

    def decide(self, mean: Sequence[Tensor], decompressor: Decompressor) -> None:
        """Post-processes the mean of the decoded vectors, in place. Servers call this, too."""


class AllReduces(Protocol):
    """The part of a `Group` that a joint reducer needs."""

    def all_reduce(self, *tensors: Tensor, op: str = "sum") -> None: ...


class JointReducer(Reducer):
    """The workers of a group compute the mean of the coded segments together, in all-reduces of their own."""

    @abstractmethod
    def mean(self, group: AllReduces, vectors: Sequence[Tensor], states: Sequence[CodecState]) -> None:
        """Replaces each of these segments by its mean over the group."""

    def begin(
        self, group: Group, vectors: Sequence[Tensor], compressor: Compressor, *flags: Tensor
    ) -> Callable[[], None]:
        dense = [*compressor.dense(vectors), *flags]
        task = group.begin_all_reduce(*dense, op="mean") if dense else None

        def join() -> None:
            values = compressor.values(vectors)
            self.mean(group, values, compressor.states)
            compressor.exchanged(values, vectors)
            if task is not None:
                task.join()

        return join
