"""Each simulated node draws its own random numbers, whatever the others draw meanwhile."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyrhythm as pr
from polyrhythm.session.context import world_context
from polyrhythm.session.seeds import mix, seed_all

Draw = tuple[float, ...]


def draw() -> Draw:
    """Numbers of each generator. Normal ones are drawn in pairs, and the second is kept for the next call."""
    uniform = torch.rand(()).item(), float(np.random.random()), random.random()
    return *uniform, torch.randn(()).item(), float(np.random.randn()), random.gauss(0, 1)


@pytest.mark.parametrize("strategy", ["async", "allreduce", "gossip", "adpsgd"])
def test_a_node_draws_one_stream_in_its_script_and_its_optimizer(simulate: Any, strategy: str) -> None:
    """The optimizer runs after a wait for others, under async on two servers."""
    drawn: defaultdict[tuple[str, int], list[Draw]] = defaultdict(list)

    def main() -> None:
        session = pr.init()
        node = world_context.get()
        assert node is not None
        mine = drawn[node.me.role, node.me.rank]

        class Noisy(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                mine.append(draw())
                super().step()

        model = nn.Linear(2, 1)
        optimizer: torch.optim.Optimizer = Noisy(model.parameters(), lr=0.1)
        model, optimizer = session.prepare(model, optimizer)
        model(torch.zeros(1, 2)).sum().backward()  # from here on each worker draws its own
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(4):
            mine.append(draw())
            optimizer.step()
            mine.append(draw())
            optimizer.state_dict()  # under async it waits for the servers

    servers = 2 if strategy == "async" else 0
    cluster = '[[hosts]]\nstep_time = { exponential = "1 s" }\nlatency = "500 ms"'
    simulate(main, strategy, 3, servers, cluster)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    assert len(drawn) == 3 + servers
    for (role, rank), numbers in drawn.items():
        seed_all(mix(role, 0, rank))
        assert numbers == [draw() for _ in range(8 if servers and role == "worker" else 12)]
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


def test_a_simulation_leaves_the_generators_as_it_found_them(simulate: Any) -> None:
    def main() -> None:
        session = pr.init()
        model = nn.Linear(2, 1)
        session.prepare(model, torch.optim.SGD(model.parameters()))
        draw()

    def draw_after(run: Any) -> list[Draw]:
        seed_all(1)
        first = draw()
        run()
        return [first, draw()]

    assert draw_after(lambda: simulate(main, "allreduce", 2)) == draw_after(lambda: None)
