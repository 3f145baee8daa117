"""Workers that step alone and average their parameters now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.errors import UsageError
from polyrhythm.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.node import Node
    from polyrhythm.replica import Replica


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Every worker steps alone; every `period` steps all average their parameters (local SGD).

    w_i <- w_i - lr * g_i, and every H-th step w_i <- mean_j w_j. Between averages nothing is sent. Each
    worker keeps its own optimizer state.

    >>> import polyrhythm as pr
    >>> pr.parse("local:16").period
    16
    """

    name: ClassVar[str] = "local"
    main: ClassVar[str | None] = "period"
    paper: ClassVar[str] = "Stich 2018, Local SGD Converges Fast and Communicates Little"

    period: int = 8

    def __post_init__(self) -> None:
        if self.period < 1:
            raise UsageError("period must be 1 or more")

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()
        if replica.steps % self.period == 0:
            node.all_reduce(*replica.parameters, op="mean")

    def finish(self, node: Node, replica: Replica) -> None:
        if replica.steps % self.period:
            node.all_reduce(*replica.parameters, op="mean")

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        average = replica.buffer("average")
        for copied, own in zip(average, replica.parameters, strict=True):
            copied.copy_(own)
        node.all_reduce(*average, op="mean")
        return average
