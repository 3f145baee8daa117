"""The simulator: how fast its event loop is, and what hundreds of workers cost in time and memory."""

from __future__ import annotations

import functools
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.allreduce import network
from benchmarks.processes import apart
from benchmarks.report import Row
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import Server, Worker

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
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
    crowded = 16 if quick else 64
    _, peak = apart(_fashion, crowded, 2)
    time_bar, memory_bar = (None, None) if quick else (60, MAXIMUM_GIB)  # they are for the full sizes
    rate, seconds = "events per CPU second", apart(_train, workers, 10)[0]
    rows = [
        Row(f"{rate}: 1 worker pings a server", statistics.median(pair), "/s", bar=200_000),
        Row(f"{rate}: 64 workers ping a server", statistics.median(crowd), "/s", bar=200_000),
        Row(f"{rate}: 16 workers, async steps without computing", statistics.median(steps), "/s"),
        step_cost(30 if quick else 60, repeats),
        Row(
            f"CPU time of {workers} async workers × 10 steps on digits", seconds, "s",
            bar=time_bar, wanted="below",
        ),
        Row(
            f"peak memory of {crowded} async workers, 1,111,946 parameters", peak, "GiB",
            bar=memory_bar, wanted="below",
        ),
    ]  # fmt: skip
    return rows, [f"{rate}: the best of {repeats} was {max(pair + crowd):,.0f}"]


def event_rates(pings: int, repeats: int) -> dict[str, float]:
    """Events per second of CPU time, medians, all in one process and in turn."""
    rates: dict[str, float] = apart(_rates, pings, repeats)
    return rates


def _rates(pings: int, repeats: int) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        found.setdefault("1 worker pings a server", []).append(_ping(1, pings))
        found.setdefault("64 workers ping a server", []).append(_ping(64, pings // 32))
        found.setdefault("16 workers, async steps without computing", []).append(_steps(16, pings // 40))
    return {what: statistics.median(values) for what, values in found.items()}


def step_cost(steps: int, repeats: int) -> Row:
    """The CPU time that the simulator adds to a step of plain PyTorch."""
    simulated, plain = apart(_step_times, 16, steps, repeats)
    added = simulated - plain
    what = "16 async workers on digits: CPU time that a step takes beside that of plain PyTorch"
    return Row(what, added * 1e6, "µs", theirs=plain * 1e6, ratio=added / plain, bar=0.75, wanted="below")


def _step_times(workers: int, steps: int, repeats: int) -> tuple[float, float]:
    """CPU seconds of a step of a simulated worker, and of a step of the same loop in plain PyTorch.

    Measured in turn; the minimum of each, because other processes slow down both.
    """
    import torch
    import torch._dynamo  # the first step of an optimizer would import it

    torch.set_num_threads(1)
    simulated, plain = [], []
    for _ in range(repeats + 1):  # the first time warms up
        marks: list[float] = []
        _run(_world(functools.partial(_timed, marks, steps), workers, "async"))
        simulated.append((marks[-1] - marks[0]) / (workers * steps))
        marks = []
        _timed(marks, 10 * steps)
        plain.append((marks[-1] - marks[0]) / (10 * steps))
    return min(simulated), min(plain)


def _timed(marks: list[float], steps: int) -> None:
    """A script that trains on the digits; alone it is plain PyTorch. Notes the CPU time before and after."""
    import torch
    from torch.utils.data import DataLoader

    import polyrhythm as pr
    from polyrhythm.data import digits

    session = pr.init()
    net = _digits_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    loader = DataLoader(digits()[0], batch_size=32, shuffle=True)
    net, optimizer, loader = session.prepare(net, optimizer, loader)
    marks.append(time.process_time())
    _loop(net, optimizer, loader, steps)
    marks.append(time.process_time())


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
    """Runs a simulation and returns its CPU seconds: it has one thread, and the machine may be busy."""
    began = time.process_time()
    coordinator = world.run()
    seconds = time.process_time() - began
    if coordinator.failure is not None:
        raise RuntimeError(coordinator.failure.message)
    return seconds


def _ping(workers: int, pings: int) -> float:
    """Events per CPU second of workers that send a server empty requests."""
    clock: list[Any] = []
    world = _world(functools.partial(_one_step, clock), workers, f"ping:{pings}")
    clock.append(lambda: (world.loop.events, time.process_time()))
    _run(world)
    # From when the last worker is prepared to when the last one is done.
    (before, began), (after, ended) = clock[workers], clock[-1]
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
    """Events per CPU second of `async` steps without forward and backward passes."""
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

    from polyrhythm.data import digits

    torch.manual_seed(0)
    return _simulate(workers, steps, 32, digits()[0], _digits_model)


def _digits_model() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _fashion(workers: int, steps: int) -> tuple[float, float]:
    import torch
    from torch.utils.data import TensorDataset

    data = TensorDataset(torch.randn(2000, 1, 28, 28), torch.randint(10, (2000,)))
    return _simulate(workers, steps, 10, data, network)


def _simulate(
    workers: int, steps: int, batch: int, data: Dataset[Any], model: Callable[[], nn.Module]
) -> tuple[float, float]:
    import torch
    from torch.utils.data import DataLoader

    import polyrhythm as pr

    def main() -> None:
        session = pr.init()
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01 / workers)
        loader = DataLoader(data, batch_size=batch, shuffle=True)
        net, optimizer, loader = session.prepare(net, optimizer, loader)
        _loop(net, optimizer, loader, steps)

    seconds = _run(_world(main, workers, "async"))
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / (1 << 30)


def _loop(net: nn.Module, optimizer: Optimizer, loader: Iterable[Any], steps: int) -> None:
    """Trains for so many steps; for as many epochs as that takes, because simulated workers share them."""
    from torch.nn import functional as F

    for x, y in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
