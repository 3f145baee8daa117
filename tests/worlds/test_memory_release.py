"""The memory of a dead worker is released only when no part of a node uses it any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from polyrhythm.core.message import Message
from polyrhythm.core.peer import COORDINATOR, Peer
from polyrhythm.wire.options import TransportOptions
from polyrhythm.wire.transport import Transport
from polyrhythm.worlds.processes.node import ProcessNode

KEY = bytes(32)
ME = Peer("worker", 0)


@pytest.fixture
def coordinator() -> Iterator[Transport]:
    transport = Transport(COORDINATOR, KEY, TransportOptions(wait=60))
    yield transport
    transport.close()


@pytest.fixture
def node(coordinator: Transport) -> Iterator[ProcessNode]:
    transport = Transport(ME, KEY, TransportOptions(wait=60))
    transport.introduce(COORDINATOR, coordinator.address)
    coordinator.introduce(ME, transport.address)
    made = ProcessNode(ME, transport, 0, time.monotonic())
    made.members.workers = [Peer("worker", rank) for rank in range(3)]
    yield made
    transport.close()


def test_memory_of_a_dead_worker_is_released_after_all_subscribers_have_handled_the_death(
    coordinator: Transport, node: ProcessNode
) -> None:
    """One subscriber still writes to that memory, and another one has long gone on."""
    began, may_end = threading.Event(), threading.Event()

    def writes(message: Message | None) -> None:
        if message is None:
            began.set()
            assert may_end.wait(60)

    def goes_on(message: Message | None) -> None:
        if message is not None:
            node.send(COORDINATOR, "handled")

    node.subscribe(writes, "mix")
    node.subscribe(goes_on, "norms")
    coordinator.send(ME, "left", (), {"role": "worker", "rank": 1, "reason": "killed"})
    assert began.wait(60)
    for _ in range(2):  # after the first one its thread has certainly returned to `receive`
        coordinator.send(ME, "norms")
    # Messages of one connection arrive in order, so a release would be the first.
    kinds = [coordinator.receive(timeout=60).kind for _ in range(2)]  # type: ignore[union-attr]
    may_end.set()
    released = coordinator.receive(timeout=60)
    assert kinds == ["handled", "handled"]
    assert released is not None and released.kind == "release" and released.fields["rank"] == 1
