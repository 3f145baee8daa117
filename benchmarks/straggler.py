"""One of 4 workers is 4 times slower: samples/s beside the same 4 processes that exchange nothing.

Two situations: always the same worker is slow, or each is in turns (2 of 8 of its own steps). Slow is made
by work: three further forward and backward passes on a network of its own. Every system runs the same loop
in 4 processes of one thread each; a round takes all of them one after the other, and ratios are within
rounds. Then the same in simulation, where each worker has a core of its own.
"""

from __future__ import annotations

import contextvars
import functools
import json
import os
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.allreduce import network
from benchmarks.processes import Together, _fork, apart, together
from benchmarks.report import Row, ratio

if TYPE_CHECKING:
    from torch import Tensor, nn

WORKERS, BATCH, SLOWDOWN = 4, 50, 4
SYSTEMS = ("alone", "async", "ssp:8", "allreduce", "DDP")
LOCKSTEP = ("allreduce", "DDP")
SAME, TURNS = "always the same", "in turns"
BAR = 0.9
# `ssp:8` lets nobody be more than 8 steps ahead, so beside a worker that is always slow it must end at that
# worker's pace; what it is made for is slowness that passes.
BARS = {(SAME, "async"): BAR, (TURNS, "async"): BAR, (TURNS, "ssp:8"): BAR}

STEP, SERVER_STEP = 0.030, 0.001  # of the simulation, in seconds
TURN = 2 * SLOWDOWN * STEP  # two slow steps
SIMULATED_STEPS = 2000  # of all workers


def slow(rank: int, step: int, situation: str) -> bool:
    if situation == SAME:
        return rank == WORKERS - 1
    return step // 2 % WORKERS == rank


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds, settle, window = (1, 1.0, 4.0) if quick else (3, 2.0, 8.0)
    speeds: dict[tuple[str, str], list[list[float]]] = {}  # samples/s of each worker, by round
    cores: list[float] = []  # that `alone` had
    for number in range(rounds):
        for situation in (SAME, TURNS):
            for system in SYSTEMS if number % 2 == 0 else reversed(SYSTEMS):
                speed, used = _measure(system, Plan(situation, system in LOCKSTEP, settle, window))
                speeds.setdefault((situation, system), []).append(speed)
                if system == "alone":
                    cores.append(used)
    rows = []
    for situation in (SAME, TURNS):
        alone = [sum(speed) for speed in speeds[situation, "alone"]]
        for system in SYSTEMS[1:]:
            mine = speeds[situation, system]
            total = [sum(speed) for speed in mine]
            slowest = statistics.median(WORKERS * min(speed) for speed in mine)
            ratios = [a / b for a, b in zip(total, alone, strict=True)]
            rows.append(
                Row(
                    f"slow {situation}: {system}", statistics.median(total), "/s", statistics.median(alone),
                    ratio=ratio(total, alone), bar=BARS.get((situation, system)),
                    more={
                        "ratio by rounds": f"{min(ratios):.2f} – {max(ratios):.2f}",
                        "4 × the slowest": f"{slowest:,.0f} /s",
                    },
                )
            )  # fmt: skip
    unhindered = statistics.median(WORKERS * min(speed) / sum(speed) for speed in speeds[SAME, "alone"])
    notes = [
        f"theirs: the same processes without exchange; {rounds} rounds of {window:.0f} s",
        f"they had {min(cores):.2f} to {max(cores):.2f} of {os.cpu_count()} cores; where the first is much "
        "less, other work took part and the ratios mean little",
        f"4 × the pace that the slow worker has without exchange would be {unhindered:.2f}×; where there are "
        "fewer cores than processes, those who wait lend it theirs",
        f"simulated: a core each, steps of {STEP * 1000:.0f} ms, {SERVER_STEP * 1000:.0f} ms of the server "
        "per push, and a network that costs nothing; there 4 × the slowest is 0.308×",
    ]
    return rows + apart(_simulated), notes


# --- real processes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is measured: after the first steps all `settle`, and then the `window` counts."""

    situation: str
    lockstep: bool
    settle: float
    window: float


class Meeting:
    """What the workers of one measurement share. It is made before they are forked."""

    def __init__(self) -> None:
        self.barrier = _fork.Barrier(WORKERS)
        self.last = _fork.Value("q", 1 << 62)  # the last step, once it is known


def _measure(system: str, plan: Plan) -> tuple[list[float], float]:
    """Samples/s of each worker, and how many cores they had together."""
    with tempfile.TemporaryDirectory() as name:
        folder, meeting = Path(name), Meeting()
        if system in ("alone", "DDP"):
            together(WORKERS, _plain, system, plan, meeting, folder)
        else:
            apart(_launch, system, plan, meeting, folder)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    return [speed for speed, _ in found], sum(share for _, share in found)


def _launch(strategy: str, plan: Plan, meeting: Meeting, folder: Path) -> None:
    from polyrhythm.launch import run

    program = functools.partial(_polyrhythm, plan, meeting, folder)
    run(program, workers=WORKERS, strategy=strategy, threads=1, runs=None)


def _polyrhythm(plan: Plan, meeting: Meeting, folder: Path) -> None:
    import polyrhythm as pr

    session = pr.init()
    model, optimizer, loader = session.prepare(*_made())
    _train(session.rank, model, optimizer, loader, plan, meeting, folder)


_kept: list[Any] = []  # Gloo now and then hangs when it is taken down; what is in here never is


def _plain(here: Together, system: str, plan: Plan, meeting: Meeting, folder: Path) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    model, optimizer, loader = _made()
    if system == "DDP":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = f"file://{folder / 'store'}"
        distributed.init_process_group("gloo", init_method=store, rank=here.rank, world_size=WORKERS)
        model = torch.nn.parallel.DistributedDataParallel(model)
        _kept.append(model)
    _train(here.rank, model, optimizer, loader, plan, meeting, folder)
    here.barrier()  # nobody leaves while another may still be in an exchange


def _made() -> tuple[nn.Module, Any, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = network()
    # The labels are noise: there is nothing to learn, and so small a rate lets nothing diverge.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    data = TensorDataset(torch.randn(100 * BATCH, 1, 28, 28), torch.randint(10, (100 * BATCH,)))
    return model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True)


def _train(
    rank: int, model: nn.Module, optimizer: Any, loader: Any, plan: Plan, meeting: Meeting, folder: Path
) -> None:
    """The loop that all systems run; writes this worker's samples/s and its share of a core."""
    from torch.nn import functional as F

    twin = network()

    def compute(net: nn.Module, x: Tensor, y: Tensor) -> None:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()

    ends: list[float] = []
    steps, stop, busy = 0, float("inf"), 0.0
    while True:
        for x, y in loader:
            if slow(rank, steps, plan.situation):
                for _ in range(SLOWDOWN - 1):
                    # In an empty context there is no session, so that nothing of this is exchanged.
                    contextvars.Context().run(compute, twin, x, y)
            compute(model, x, y)
            optimizer.step()
            steps += 1
            if steps == 2:
                meeting.barrier.wait(120)
                stop = time.monotonic() + plan.settle + plan.window
                busy = time.process_time()
            if steps >= 2:
                ends.append(time.monotonic())
            if _over(rank, steps, ends, stop, plan, meeting):
                speed = inside(ends, stop - plan.window, stop) * BATCH / plan.window
                share = (time.process_time() - busy) / (ends[-1] - ends[0])
                (folder / f"{rank}.json").write_text(json.dumps([speed, share]))
                return


def _over(rank: int, steps: int, ends: Sequence[float], stop: float, plan: Plan, meeting: Meeting) -> bool:
    """Whether this step was the last one: each ends for itself, in lockstep all after the same step."""
    past = bool(ends) and ends[-1] >= stop
    if not plan.lockstep:
        return past
    if rank == 0 and past and meeting.last.value > steps + 1:
        # Nobody can be further than one step from here. They learn it before they have taken the next one.
        meeting.last.value = steps + 1
    return bool(steps >= meeting.last.value)


def inside(ends: Sequence[float], start: float, stop: float) -> float:
    """How many steps, which ended at these times, a window holds; a step that it cuts counts in part."""

    def done(moment: float) -> float:
        after = bisect_left(ends, moment)
        if after in (0, len(ends)):
            return float(max(0, after - 1))
        begun, ended = ends[after - 1], ends[after]
        return after - 1 + (moment - begun) / (ended - begun)

    return done(stop) - done(start)


# --- simulated --------------------------------------------------------------------------------------


def _simulated() -> list[Row]:
    import polyrhythm as pr

    rows = []
    with tempfile.TemporaryDirectory() as name:
        for situation in (SAME, TURNS):
            cluster = Path(name) / f"{situation.replace(' ', '-')}.toml"
            cluster.write_text(_cluster(situation))
            alone = _alone(cluster)
            for strategy in ("async", "ssp:8", "allreduce"):
                summary = pr.simulate(_tiny, workers=WORKERS, strategy=strategy, cluster=cluster, threads=1)
                speed = BATCH * summary["samples_per_s"]
                rows.append(
                    Row(
                        f"simulated, slow {situation}: {strategy}", speed, "/s", alone,
                        ratio=speed / alone, bar=BARS.get((situation, strategy)),
                    )
                )  # fmt: skip
    return rows


def _cluster(situation: str) -> str:
    step = f'step_time = "{STEP * 1000:g} ms"'
    server = f'[servers]\nstep_time = "{SERVER_STEP * 1000:g} ms"\n'
    if situation == SAME:
        fast = f"[[hosts]]\ncount = {WORKERS - 1}\n{step}\n"
        return f"{fast}[[hosts]]\ncount = 1\nspeed = {1 / SLOWDOWN}\n{step}\n{server}"
    longest = SIMULATED_STEPS / WORKERS * STEP * SLOWDOWN  # in lockstep every round has a slow one
    episodes = [
        f'[[stragglers]]\nworkers = [{number % WORKERS}]\nslowdown = {SLOWDOWN}\n'
        f'from = "{number * TURN:g} s"\nto = "{(number + 1) * TURN:g} s"\n'
        for number in range(round(1.1 * longest / TURN))
    ]  # fmt: skip
    return f"[[hosts]]\n{step}\n{server}" + "".join(episodes)


def _alone(cluster: Path) -> float:
    """Samples/s of workers that never wait, by the cost model alone."""
    from polyrhythm.worlds.cluster import Cluster

    costs, horizon, steps = Cluster.load(cluster).cost_model(WORKERS, 0, seed=0), 100 * TURN, 0.0
    for rank in range(WORKERS):
        ends = [0.0]
        while ends[-1] < horizon:
            ends.append(ends[-1] + costs.step_time(rank, ends[-1]))
        steps += inside(ends, 0.0, horizon)
    return steps * BATCH / horizon


def _tiny() -> None:
    """The smallest script, one sample a step; how long its steps take is the cluster's business."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import polyrhythm as pr

    session = pr.init()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(torch.zeros(SIMULATED_STEPS, 1)))
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
