"""The simulator: how fast its event loop is, and what hundreds of workers cost in time and memory."""

from __future__ import annotations

import functools
import itertools
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.allreduce import network
from benchmarks.processes import apart
from benchmarks.report import Row
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import Server, Worker

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard

MAXIMUM_GIB = 3.0


@dataclass(frozen=True)
class Ping(Strategy):
    """Asks and answers, without any tensor."""

    name: ClassVar[str] = "ping"
    main: ClassVar[str | None] = "count"

    count: int = 1

    @property
    def traits(self) -> Traits:
        return Traits(uses_servers=True)

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return PingWorker(self, node, replica, group)

    def server(self, node: Node, shard: Shard) -> Server:
        return PingServer(node)


class PingWorker(Worker):
    strategy: Ping

    def step(self) -> None:
        server = self.node.members.servers[0]
        for _ in range(self.strategy.count):
            self.node.request(server, "ping").wait()


class PingServer(Server):
    def __init__(self, node: Node) -> None:
        self.node = node

    def serve(self) -> None:
        while True:
            message = self.node.receive("ping")
            if message is not None:
                self.node.reply(message)
            elif not self.node.members.workers:
                return


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    pings = 2_000 if quick else 20_000
    repeats = 3 if quick else 5
    pair = [apart(_ping, 1, pings) for _ in range(repeats)]
    crowd = [apart(_ping, 64, pings // 32) for _ in range(repeats)]
    steps = [apart(_steps, 16, pings // 40) for _ in range(repeats)]
    workers = 64 if quick else 256
    wall, _ = apart(_train, workers, 10)
    crowded = 16 if quick else 64
    _, peak = apart(_fashion, crowded, 2)
    time_bar, memory_bar = (None, None) if quick else (60, MAXIMUM_GIB)  # they are for the full sizes
    rows = [
        Row("events/s: 1 worker pings a server", statistics.median(pair), "/s", bar=100_000),
        Row("events/s: 64 workers ping a server", statistics.median(crowd), "/s", bar=100_000),
        Row("events/s: 16 workers, async steps without computing", statistics.median(steps), "/s"),
        Row(f"{workers} async workers × 10 steps on digits", wall, "s", bar=time_bar, wanted="below"),
        Row(
            f"peak memory of {crowded} async workers, 1,111,946 parameters", peak, "GiB",
            bar=memory_bar, wanted="below",
        ),
    ]  # fmt: skip
    return rows, [f"events/s: the best of {repeats} was {max(pair + crowd):,.0f}"]


def event_rates(pings: int, repeats: int) -> dict[str, float]:
    """Events per second of the event loop, medians, all in one process and in turn."""
    rates: dict[str, float] = apart(_rates, pings, repeats)
    return rates


def _rates(pings: int, repeats: int) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        found.setdefault("1 worker pings a server", []).append(_ping(1, pings))
        found.setdefault("64 workers ping a server", []).append(_ping(64, pings // 32))
        found.setdefault("16 workers, async steps without computing", []).append(_steps(16, pings // 40))
    return {what: statistics.median(values) for what, values in found.items()}


def _world(program: Callable[[], None], workers: int, strategy: str) -> Any:
    """Builds a simulated world; torch has one thread."""
    import torch

    from polyrhythm.core.plan import Plan
    from polyrhythm.core.registry import parse
    from polyrhythm.core.resolve import resolved
    from polyrhythm.worlds.cluster import Cluster
    from polyrhythm.worlds.simulated import Simulated

    torch.set_num_threads(1)
    plan = Plan(strategy, workers, world="simulate")
    return Simulated(program, plan, Cluster.uniform(), resolved(parse(strategy)))


def _run(world: Any) -> float:
    """The seconds that it took."""
    began = time.perf_counter()
    coordinator = world.run()
    seconds = time.perf_counter() - began
    if coordinator.failure is not None:
        raise RuntimeError(coordinator.failure.message)
    return seconds


def _ping(workers: int, pings: int) -> float:
    """Events per second of workers that ask a server for nothing and get it."""
    clock: list[Any] = []
    world = _world(functools.partial(_one_step, clock), workers, f"ping:{pings}")
    clock.append(lambda: (world.loop.events, time.perf_counter()))
    _run(world)
    # The first worker begins to ping after it is prepared, and the last event is of the last worker.
    (before, began), (after, ended) = clock[1], clock[-1]
    return (after - before) / (ended - began)


def _one_step(clock: list[Any]) -> None:
    """A script that trains nothing for one step."""
    import torch

    import polyrhythm as pr

    session = pr.init()
    model = torch.nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    clock.append(clock[0]())
    optimizer.step()
    clock.append(clock[0]())


def _steps(workers: int, steps: int) -> float:
    """Events per second of the whole path of an `async` step, the network apart."""
    import torch

    import polyrhythm as pr

    def main() -> None:
        session = pr.init()
        model = torch.nn.Linear(1, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(steps):
            optimizer.step()

    world = _world(main, workers, "async")
    import torch._dynamo  # the first step of an optimizer would import it

    seconds = _run(world)
    return float(world.loop.events / seconds)


def _train(workers: int, steps: int) -> tuple[float, float]:
    """Seconds and peak GiB of a run on the embedded digits."""
    import torch
    from torch import nn

    from polyrhythm.data import digits

    train_set, _ = digits()

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    torch.manual_seed(0)
    return _simulate(workers, steps, 32, train_set, model)


def _fashion(workers: int, steps: int) -> tuple[float, float]:
    import torch
    from torch.utils.data import TensorDataset

    data = TensorDataset(torch.randn(2000, 1, 28, 28), torch.randint(10, (2000,)))
    return _simulate(workers, steps, 10, data, network)


def _simulate(
    workers: int, steps: int, batch: int, data: Dataset[Any], model: Callable[[], nn.Module]
) -> tuple[float, float]:
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import polyrhythm as pr

    def main() -> None:
        session = pr.init()
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01 / workers)
        loader = DataLoader(data, batch_size=batch, shuffle=True)
        net, optimizer, loader = session.prepare(net, optimizer, loader)
        # The workers share an epoch; as many as they need give each of them its steps.
        for x, y in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    seconds = _run(_world(main, workers, "async"))
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / (1 << 30)
