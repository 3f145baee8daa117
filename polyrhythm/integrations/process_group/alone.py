"""Alone: the group of a single process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyrhythm.collectives.arithmetic import flat_views
from polyrhythm.core.group import Coding, Group, Task, Use
from polyrhythm.core.peer import Peer


class Alone(Group):
    """One worker."""

    def __init__(self) -> None:
        self.members, self.rank = (Peer("worker", 0),), 0

    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        flat_views(tensors, op)  # raises if they cannot be reduced
        return _Done()

    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        coding.combine([coding.send(vectors)], vectors)
        return _Done()

    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        pass

    def exchange(self, what: str, outgoing: Sequence[Sequence[Tensor]], use: Use) -> None:
        use([outgoing[0]])

    def split(self, members: Sequence[Peer], name: str = "") -> Group:
        return self


class _Done(Task):
    def join(self) -> None:
        pass
