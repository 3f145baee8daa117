"""`session.print` has one voice: worker 0, and if it dies for good the first worker that is alive."""

from __future__ import annotations

import io
import os
import signal

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.launch.console import Console
from tests.support.programs import Examples, mlp
from tests.support.runs import WORLDS, run_in

EPOCHS = 4
HOSTS = '[[hosts]]\nstep_time = "10 ms"\n[[failures]]\nworkers = [0]\nat = "60 ms"\n'


def script(dies: bool) -> None:
    """16 batches per epoch, for 3 workers. On real processes worker 0 dies in its second epoch."""
    session, model = pr.init(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Examples(64), batch_size=4)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    main = session.is_main
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if dies and session.rank == 0 and epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and epoch > 1:
            session.barrier()  # the others know of the death by now
        session.print(f"epoch {epoch}")
        assert session.is_main == main


def printed(world: str, strategy: str, cluster: str | None = None, dies: bool = False) -> list[str]:
    output = io.StringIO()
    run_in(
        world, lambda: script(dies), strategy=strategy, cluster=cluster,
        console=Console(io.StringIO(), output=output),
    )  # fmt: skip
    return output.getvalue().splitlines()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["async", "gossip"])
def test_a_survivor_prints_from_the_death_of_worker_0_on(world: str, strategy: str) -> None:
    """It has made no decisions by `is_main` that would now be wrong: that stays with worker 0."""
    lines = printed(world, strategy, HOSTS if world == "simulated" else None, dies=world == "real")
    assert [line[-7:] for line in lines][-2:] == ["epoch 2", "epoch 3"]
    assert {line for line in lines if line[-1] in "23"} == {"[worker 1] epoch 2", "[worker 1] epoch 3"}


def test_a_worker_that_has_finished_passes_nothing_on() -> None:
    """Worker 0 is fast and leaves first."""
    fast = '[[hosts]]\ncount = 1\nspeed = 9.0\n[[hosts]]\nstep_time = "10 ms"\n'
    assert printed("simulated", "async", fast) == [f"[worker 0] epoch {epoch}" for epoch in range(EPOCHS)]


def test_worker_0_prints_again_when_it_is_replaced() -> None:
    lines = printed("simulated", "async", f'{HOSTS}back = "80 ms"\n')
    assert {line[:10] for line in lines} == {"[worker 0]"}
    assert lines[-1] == f"[worker 0] epoch {EPOCHS - 1}"
