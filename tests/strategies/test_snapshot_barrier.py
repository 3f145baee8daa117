"""How a worker answers others that take a snapshot. The strategies' tests check whole snapshots."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from polyrhythm.core.message import Message
from polyrhythm.core.node import Members
from polyrhythm.core.peer import Peer
from polyrhythm.model.replica import Replica
from polyrhythm.strategies.call_numbers import CallNumbers
from polyrhythm.strategies.snapshot_barrier import SnapshotBarrier


class RecordingNode:
    """A node that keeps its replies."""

    def __init__(self) -> None:
        self.members, self.replied = Members(), dict[int, int]()

    def lock(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reply(self, message: Message, **fields: Any) -> bool:
        self.replied[message.sender.rank] = fields["number"]
        return False


def barrier_of(node: RecordingNode) -> SnapshotBarrier:
    model = nn.Linear(1, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return SnapshotBarrier(node, lambda: None, CallNumbers(replica))  # type: ignore[arg-type]


def asks(rank: int, what: str, number: int) -> Message:
    return Message(Peer("worker", rank), SnapshotBarrier.kind, rank, {"what": what, "number": number})


def test_an_idle_worker_takes_over_the_number_of_a_snapshot() -> None:
    """It does not hold the others up, and continues the count if it begins later."""
    node = RecordingNode()
    barrier = barrier_of(node)
    barrier.on_message(asks(1, "come", 3))
    barrier.on_message(asks(2, "come", 2))
    assert node.replied == {1: 3, 2: 3} and barrier.numbers == [3, 0]


def test_a_working_worker_answers_when_it_ends_and_gives_all_the_same_number() -> None:
    node = RecordingNode()
    barrier = barrier_of(node)
    barrier.begin(later=False)
    for rank, number in ((1, 1), (2, 2)):
        barrier.on_message(asks(rank, "come", number))
    barrier.on_message(asks(3, "taken", 5))
    assert not node.replied and barrier.numbers == [0, 0]
    node.members.leave(Peer("worker", 3), 0, finished=False)
    barrier.on_message(None)
    barrier.end()
    assert node.replied == {1: 2, 2: 2} and barrier.numbers == [2, 0]
