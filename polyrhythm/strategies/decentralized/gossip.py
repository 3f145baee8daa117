"""D-PSGD: workers on a graph that mix their parameters with those of their neighbours in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.strategies.decentralized.neighbor_exchange import Mixing, board_of, pull, spare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class Gossip(Mixing):
    """Workers on a graph mix their parameters with those of their neighbours in every step (D-PSGD).

    x_i <- sum_j W_ij x_j - lr g_i(x_i): the neighbours' parameters come while the gradient is computed, so it
    is that of the parameters before they are mixed. The optimizer's own step, and with it weight decay, is
    taken from the mixed ones. With `order=step-then-mix` x_i <- sum_j W_ij (x_j - lr g_j) instead: that waits
    for the neighbours, and on a complete graph it is `allreduce`. W follows from `topology`, which is ring,
    torus, exponential (at distances of 1, 2, 4, ... by turns), exponential-all, hypercube, complete, random:D
    with D neighbours each, or edges as in 0-1/1-2/2-0. The result is the mean of all.

    >>> import polyrhythm as pr
    >>> pr.parse("gossip:torus").topology
    'torus'
    """

    name: ClassVar[str] = "gossip"
    paper: ClassVar[str] = (
        "Lian, Zhang, Zhang, Hsieh, Zhang, Liu 2017, Can Decentralized Algorithms Outperform Centralized "
        "Algorithms?"
    )

    remembers: ClassVar[tuple[str, ...]] = ("apart",)

    order: Literal["mix-while-computing", "step-then-mix"] = "mix-while-computing"

    def begin(self, node: Node, replica: Replica) -> None:
        super().begin(node, replica)
        self._ask(replica)

    def regroup(self, node: Node, replica: Replica, ranks: Sequence[int], number: int) -> None:
        super().regroup(node, replica, ranks, number)
        self._ask(replica)
        if self.order == "mix-while-computing":
            self._show(replica)

    def step(self, node: Node, replica: Replica) -> None:
        mixes_first = self.order == "mix-while-computing"
        if mixes_first:
            if board_of(replica).round < 0 and "apart" in replica.notes:  # it goes on with what was saved
                self._show(replica)
            if board_of(replica).round >= 0:  # at first all are equal, and have shown nothing
                self._mix(node, replica)
        with node.lock():
            replica.apply()
        replica.notes["apart"] = True
        self._show(replica)
        if not mixes_first:
            self._mix(node, replica)

    def _show(self, replica: Replica) -> None:
        board = board_of(replica)
        board.show(spare(replica, replica.parameters) if board.neighbours(board.round + 1) else ())

    def _ask(self, replica: Replica) -> None:
        board_of(replica).request(lambda number, _: replica.buffer(f"theirs {number}"))

    def _mix(self, node: Node, replica: Replica) -> None:
        board = board_of(replica)
        given = [(weight, replica.buffer(f"theirs {number}")) for number, weight, _ in board.answers()]
        with node.lock():
            # By what the others have seen: what the script has done to its parameters since is not undone.
            pull(replica.parameters, board.shown.get(board.round, ()), given)
        self._ask(replica)
