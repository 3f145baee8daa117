"""Collectives between hosts whose connections break: each is completed, exactly once and exactly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from polyrhythm.core.errors import PeerLost
from polyrhythm.core.peer import Peer
from polyrhythm.wire import Transport, TransportOptions
from polyrhythm.worlds.processes.node import ProcessNode
from tests.support.combine import few
from tests.wire.test_transport import KEY, Proxy

ROUNDS, SIZE = 60, 3000
WORKERS = [Peer("worker", rank) for rank in range(3)]


def all_reduces(node: ProcessNode) -> None:
    for number in range(ROUNDS):
        vector = torch.full((SIZE,), float(number + node.rank))
        node.everyone.all_reduce(vector)
        assert torch.equal(vector, torch.full((SIZE,), 3.0 * number + 3))


def broadcasts(node: ProcessNode) -> None:
    for number in range(ROUNDS):
        vector = torch.full((SIZE // 30, 30), float(number if node.rank == number % 3 else -1))
        node.everyone.broadcast(vector, root=number % 3)
        assert torch.equal(vector, torch.full_like(vector, float(number)))


def exchanges(node: ProcessNode) -> None:
    for number in range(ROUNDS):
        outgoing = [[torch.full((SIZE,), float(number + 10 * node.rank + to))] for to in range(3)]
        got: list[float] = []
        node.everyone.exchange(
            "all-to-all", outgoing, lambda given, got=got: got.extend(float(each[0][-1]) for each in given)
        )
        assert got == [number + 10.0 * sender + node.rank for sender in range(3)]


@few("program", [all_reduces, broadcasts, exchanges], quick=1)
def test_collectives_survive_connections_that_break(program: Callable[[ProcessNode], None]) -> None:
    transports = [Transport(peer, KEY, TransportOptions("tcp:127.0.0.1", wait=60)) for peer in WORKERS]
    proxies = [Proxy(transport.address) for transport in transports]
    nodes = [
        ProcessNode(peer, each, 0, time.monotonic()) for peer, each in zip(WORKERS, transports, strict=True)
    ]
    places = [
        (peer.role, peer.rank, (proxy.address, "", -1)) for peer, proxy in zip(WORKERS, proxies, strict=True)
    ]
    pause, cuts = threading.Event(), 0
    try:
        for node in nodes:
            node.meet(places)
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(program, node) for node in nodes]
            while not all(each.done() for each in running):
                pause.wait(0.01)
                for proxy in proxies:
                    proxy.cut()
                cuts += 1
            for each in running:
                each.result()
    finally:
        for node in nodes:
            node.close()
        for proxy in proxies:
            proxy.close()
    assert cuts > 5  # otherwise this shows nothing


def test_a_run_that_fails_leaves_the_tensors_of_a_collective_that_has_not_begun() -> None:
    """The notice that the run has failed may come before that of the death; workers save what they have."""
    transport = Transport(WORKERS[0], KEY, TransportOptions("tcp:127.0.0.1"))
    node = ProcessNode(WORKERS[0], transport, 0, time.monotonic())
    try:
        node.meet([(peer.role, peer.rank, (transport.address, "", -1)) for peer in WORKERS])
        node.stopping.alone = True
        node.check_wait([], 0.0, WORKERS)
        with pytest.raises(PeerLost) as lost:
            node.check_wait([WORKERS[1]], 0.0, WORKERS)
        assert lost.value.untouched
    finally:
        node.close()
