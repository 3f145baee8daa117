"""Over TCP, encrypted and without shared memory, a run is the same run."""

from __future__ import annotations

import pytest

import polyrhythm as pr
from tests.scripts.train import EXAMPLES, train


@pytest.mark.parametrize("strategy", ["allreduce", "allreduce+topk:0.1", "sync", "local:4"])
def test_lockstep_run_gives_the_same_bits_over_tcp_and_unix_sockets(strategy: str) -> None:
    """Lockstep strategies give the same bits whatever carries them."""
    unix, tcp = (
        pr.run(train, workers=3, strategy=strategy, listen=listen, runs=None)
        for listen in ("unix:", "tcp:127.0.0.1:0")
    )
    assert tcp["digest"] == unix["digest"]
    assert tcp["bytes_sent"] == unix["bytes_sent"]


def test_asynchronous_run_over_tcp_trains_on_every_example() -> None:
    """An asynchronous run trains over TCP too."""
    assert pr.run(train, strategy="async", listen="tcp:127.0.0.1:0", runs=None)["samples"] == EXAMPLES
