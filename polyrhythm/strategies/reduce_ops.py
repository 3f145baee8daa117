"""Means over a group of workers, through a codec if there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from polyrhythm.core.codec import Reduction

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.sender import CompressedSender
    from polyrhythm.core.codec import Codec
    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.worker import State
    from polyrhythm.model.replica import Replica


class MeanReducer:
    """Replaces vectors by their mean over a group, through a codec if there is one."""

    def __init__(self, codec: Codec | None, node: Node, replica: Replica, group: Group) -> None:
        self.codec, self.node, self.replica, self.group = codec, node, replica, group
        self.sender: CompressedSender | None = None
        if codec is not None:
            from polyrhythm.compress.reducers import reducer_for
            from polyrhythm.compress.sender import CompressedSender

            self.sender = CompressedSender(codec, node, replica, group.rank, group.size)
            self._reducer = reducer_for(codec)
        self._buckets: list[Callable[[], None]] = []

    def mean(self, vectors: Sequence[Tensor], *flags: Tensor, full: bool = False) -> None:
        """Replaces the vectors by their mean over the group; `full`: without the codec.

        The flags, a few numbers, travel uncoded and become their mean: above 0 if any worker raised one.
        """
        if self.codec is None or full:
            return self.group.all_reduce(*vectors, *flags, op="mean")
        self.begin(vectors, *flags)()

    def begin(
        self, vectors: Sequence[Tensor], *flags: Tensor, start: int = 0, stop: int | None = None
    ) -> Callable[[], None]:
        """Starts a mean without waiting; call the returned function once to wait for it.

        The vectors are a range of the layout, from `start` to `stop`.
        """
        if self.sender is None:
            filled = [vector for vector in vectors if vector.numel()]
            return self.group.begin_all_reduce(*filled, *flags, op="mean").join
        return self._reducer.begin(self.group, vectors, self.sender.compressor(start, stop), *flags)

    def mean_gradient(self, *flags: Tensor) -> None:
        """Replaces the whole gradient by its mean over the group."""
        replica = self.replica
        if self.sender is not None:
            replica.check_finite(self.node.me, replica.steps + 1)  # a codec would keep what is not finite
            self.sender.rescale()
        self.mean(replica.gradient, *flags)
        if self.codec is not None and self.codec.feedback:
            replica.gradients.revive()

    def begin_bucket(self, gradient: Sequence[Tensor], *flags: Tensor) -> None:
        """Starts the mean of a part of the gradient, for `join_buckets` to wait for."""
        codec = self.codec
        if codec is None:
            self._buckets.append(self.group.begin_all_reduce(*gradient, *flags, op="mean").join)
            return
        from polyrhythm.compress.state import CodecState

        state = CodecState.alone(0, feedback=False)
        codes = [codec.encode(part, state) for part in gradient]
        task = self.group.begin_all_reduce(*codes, *flags, op="mean")

        def join() -> None:
            task.join()
            for part, code in zip(gradient, codes, strict=True):
                codec.decode(code, part.zero_())

        self._buckets.append(join)

    def join_buckets(self) -> None:
        """Waits for all parts of the gradient."""
        buckets, self._buckets = self._buckets, []
        for join in buckets:
            join()

    def check_update(self, start: int = 0, stop: int | None = None) -> None:
        """Raises `NotFinite` before a codec is given parameters that are not finite."""
        if self.sender is not None:
            self.sender.check_update(start, stop)

    def state_dict(self) -> State:
        return {} if self.sender is None else self.sender.state_dict()

    def load_state_dict(self, state: State) -> None:
        if self.sender is not None:
            self.sender.load_state_dict(state)


def in_buckets(codec: Codec | None) -> bool:
    """True if parts of a gradient can be sent by themselves.

    Other codecs get the whole gradient: their codes are short, and one message is cheaper than many.
    """
    if codec is None:
        return True
    return codec.reduction is Reduction.ELEMENTWISE and not codec.feedback and not codec.dense


def numbers(*values: float) -> Tensor:
    """A few numbers in 64 bits, to send."""
    import torch

    return torch.tensor(values, dtype=torch.float64)


def agree(group: Group, *values: float, op: str) -> list[float]:
    """The sum, max or min of each of a few numbers over a group."""
    mine = numbers(*values)
    group.all_reduce(mine, op=op)
    return mine.tolist()
