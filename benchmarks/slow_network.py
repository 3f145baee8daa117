"""Four hosts on slow links: samples/s, bytes and accuracy of our strategies beside DDP and its hooks.

The hosts are network namespaces on this machine, each behind a link of 100 or of 10 Mbit/s both ways. Every
system trains the Fashion-MNIST network (1,111,946 parameters) with one worker per host, batch 25, one thread:
DistributedDataParallel over Gloo, plain and with torch's own hooks for 16-bit floats and for PowerSGD, and
our strategies by our own launcher, encrypted as it always is between hosts. Needs root.

Speed is what the workers do together from the last step of the warm-up to their last one. Bytes are those
that leave a host by its link in that time, whoever sends them, with all headers and acknowledgements.
Accuracy is that of the consensus after the same number of samples for all, with a rate that falls to 0.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import hosts
from benchmarks.allreduce import network
from benchmarks.processes import Together, apart
from benchmarks.report import Row, ratio
from benchmarks.straggler import inside

if TYPE_CHECKING:
    from torch import Tensor, nn

HOSTS, BATCH = 4, 25
TRAINING = 12_000  # the first of the images
EPOCHS = 3
FAST, SLOW = "100mbit", "10mbit"
NAMES = {FAST: "100 Mbit/s", SLOW: "10 Mbit/s"}


@dataclass(frozen=True)
class System:
    """One way to train: a strategy, or DDP with a hook."""

    name: str
    hook: str | None = None  # of DDP: "" for none, "alone" for no exchange at all
    rate: float = 0.1  # dense was better with it than with 0.05; others were not tried
    momentum: float = 0.9
    optimizer: str = "SGD"
    period: int = 8  # steps are counted in multiples of this: of averaging strategies, their period
    warmup: int = 8
    lockstep: bool = True

    def optimize(self, model: nn.Module) -> Any:
        import torch

        if self.optimizer == "AdamW":
            return torch.optim.AdamW(model.parameters(), lr=self.rate)
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=self.momentum)


ALONE = System("no exchange", "alone")
DDP = System("DDP", "", period=1, warmup=1)
HALF = System("DDP, fp16 hook", "fp16", period=1, warmup=1)
POWER = System("DDP, PowerSGD rank 1 hook", "powersgd", warmup=4)  # the first two of torch's are dense
THEIRS = (ALONE, DDP, HALF, POWER)
CHOSEN = System("local:4+topk:0.05")  # what the bars are for
OURS = (
    System("allreduce+bf16", period=1, warmup=1),
    System("allreduce+powersgd:1"),
    System("allreduce+topk:0.01"),
    CHOSEN,
    System("diloco:50+bf16", optimizer="AdamW", rate=0.001, period=50, warmup=50),
    System("async+topk:0.01", momentum=0.0, lockstep=False),
)
QUICK = {DDP.name, POWER.name, "allreduce+topk:0.01", CHOSEN.name}
FEW = {DDP.name, HALF.name, "allreduce+bf16"}  # steps that take seconds: a few are enough
PLAIN = {ALONE.name, HALF.name, "allreduce+bf16"}  # of which nobody asks how accurate they are

BARS = {FAST: 5.0, SLOW: 30.0}  # times DDP's samples/s,
AGAINST_POWER = 1.4  # on the faster links times PowerSGD's,
POINTS = 0.5  # and fewer points of accuracy below DDP than this, on average over
SEEDS = (11, 12)  # others than those on which what is chosen was chosen


@dataclass(frozen=True)
class Plan:
    """How long a system is run: so many steps after the warm-up, or all of the training."""

    steps: int
    accuracy: bool = False
    seed: int = SEEDS[0]


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    speed: float  # samples/s of all workers
    megabytes: float  # per step and host
    accuracy: float | None


Found = dict[str, list[Outcome]]  # by system, one per round


def plan(system: System, rate: str, quick: bool) -> Plan:
    """How many steps the speed of a system is measured over."""
    if system.name in FEW:
        return Plan(2 if rate == SLOW else 8)
    periods = -(-(24 if quick else 48) // system.period)
    return Plan(periods * system.period)


def measure(
    quick: bool, ours: Sequence[System] = OURS, rates: Sequence[str] = (FAST, SLOW), accuracy: bool = True
) -> tuple[list[Row], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        if missing := hosts.why_not(FAST) or apart(_store, folder):
            return [], [f"not measured: {missing}"]
        systems = [each for each in (*THEIRS, *ours) if not quick or each.name in QUICK]
        found = {rate: speeds(Path(folder), systems, rate, quick) for rate in rates}
        good = accuracies(Path(folder), systems, quick) if accuracy else {}
    return [*_rows(found, systems, good), *_barred(found, good)], _notes(quick)


def speeds(folder: Path, systems: Sequence[System], rate: str, quick: bool) -> Found:
    """What all of them do on links of this rate, by system and round."""
    found: Found = {system.name: [] for system in systems}
    with hosts.hosts(HOSTS, rate) as places:
        for number in range(1 if quick or rate == SLOW else 2):
            for system in systems if number % 2 == 0 else reversed(systems):
                outcome = run(folder, places, system, plan(system, rate, quick))
                found[system.name].append(outcome)
                _say(f"{NAMES[rate]}, {system.name}: {outcome.speed:,.0f}/s, {outcome.megabytes:.3f} MB")
    return found


def accuracies(folder: Path, systems: Sequence[System], quick: bool) -> dict[str, list[float]]:
    """The accuracy of each, by seed; on free links, where those are enough to know it."""
    good: dict[str, list[float]] = {}
    for system in systems:
        if system.name in PLAIN or (quick and system not in (DDP, CHOSEN)):
            continue
        steps = (1 if quick else EPOCHS) * TRAINING // BATCH // HOSTS - system.warmup
        for seed in SEEDS if system in (DDP, CHOSEN) and not quick else SEEDS[:1]:
            with hosts.hosts(HOSTS, "" if system.lockstep else FAST) as places:
                outcome = run(folder, places, system, Plan(steps, accuracy=True, seed=seed))
            assert outcome.accuracy is not None
            good.setdefault(system.name, []).append(outcome.accuracy)
            _say(f"{system.name}, seed {seed}: {outcome.accuracy:.2%}")
    return good


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _rows(found: dict[str, Found], systems: Sequence[System], good: dict[str, list[float]]) -> list[Row]:
    rows = []
    for rate, outcomes in found.items():
        speed = {name: [each.speed for each in those] for name, those in outcomes.items()}
        for system in systems:
            mine, seeds = speed[system.name], good.get(system.name)
            megabytes = statistics.median(each.megabytes for each in outcomes[system.name])
            rows.append(
                Row(
                    f"{NAMES[rate]}: {system.name}", statistics.median(mine), "/s",
                    None if system is DDP else statistics.median(speed[DDP.name]),
                    ratio=None if system is DDP else ratio(mine, speed[DDP.name]),
                    bar=BARS[rate] if system is CHOSEN else None,
                    more={
                        "beside PowerSGD": f"{ratio(mine, speed[POWER.name]):.2f}×",
                        "MB per step and host": f"{megabytes:.3f}",
                        "accuracy": " ".join(f"{each:.2%}" for each in seeds) if seeds else "–",
                    },
                )
            )  # fmt: skip
    return rows


def _barred(found: dict[str, Found], good: dict[str, list[float]]) -> list[Row]:
    """What else there is a bar for."""
    rows = []
    if CHOSEN.name in found.get(FAST, ()):
        mine, theirs = ([each.speed for each in found[FAST][which.name]] for which in (CHOSEN, POWER))
        rows.append(
            Row(
                f"{NAMES[FAST]}: {CHOSEN.name} against PowerSGD", statistics.median(mine), "/s",
                statistics.median(theirs), ratio=ratio(mine, theirs), bar=AGAINST_POWER,
            )
        )  # fmt: skip
    if CHOSEN.name in good and DDP.name in good:
        below = 100 * (statistics.mean(good[DDP.name]) - statistics.mean(good[CHOSEN.name]))
        what = f"accuracy of {CHOSEN.name} below DDP's"
        rows.append(Row(what, below, "points", bar=POINTS, wanted="below"))
    return rows


def _notes(quick: bool) -> list[str]:
    times = 1 if quick else EPOCHS
    return [
        f"{HOSTS} hosts share {os.cpu_count()} cores, so `no exchange` is the most that any system can reach",
        "theirs and the ratio: DDP in the same round; medians over rounds",
        f"accuracy on the 10,000 test images after {times} times {TRAINING:,} images, with a rate that falls "
        "to 0, by seeds; DDP and lockstep strategies train it on links without a limit, since it does not "
        f"depend on them, the others on those of {NAMES[FAST]}",
    ]


# --- on the hosts -----------------------------------------------------------------------------------


def _store(folder: str) -> str:
    """Puts the images where workers read them faster; what to tell if they are not here."""
    import torch

    from polyrhythm.core.errors import UsageError
    from polyrhythm.data.mnist import mnist

    try:
        training, testing = mnist()
    except UsageError as error:
        return str(error)
    for name, (images, labels) in ((_TRAIN, training[:TRAINING]), (_TEST, testing[:])):
        torch.save(((images * 255).byte(), labels), Path(folder) / name)
    return ""


_TRAIN, _TEST = "train.pt", "test.pt"


def _images(file: Path) -> tuple[Tensor, Tensor]:
    import torch

    images, labels = torch.load(file)
    return images.float().div_(255), labels


def run(data: Path, places: Sequence[hosts.Host], system: System, plan: Plan) -> Outcome:
    """Trains on the hosts."""
    with tempfile.TemporaryDirectory() as name:
        if system.hook is None:
            hosts.launch(
                places, functools.partial(_ours, system, plan, data, Path(name)), system.name, plan.seed
            )
        else:
            hosts.on_hosts(places, _theirs, system, plan, data, Path(name))
        told = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(len(places))]
    # All have the same clock. What counts is when all are past the warm-up and nobody has ended yet.
    warmup = system.warmup - 1
    start, stop = max(each["ends"][warmup] for each in told), min(each["ends"][-1] for each in told)
    steps = sum(inside(each["ends"], start, stop) for each in told)
    sent = sum(each["sent"][-1] - each["sent"][warmup] for each in told)
    taken = sum(len(each["ends"]) - system.warmup for each in told)
    return Outcome(steps * BATCH / (stop - start), sent / taken / 1e6, told[0]["accuracy"])


def _ours(system: System, plan: Plan, data: Path, folder: Path) -> None:
    import polyrhythm as pr

    session = pr.init()
    model, optimizer, loader = session.prepare(*_made(system, plan, data))
    told = _train(model, optimizer, loader, system, plan)
    told["accuracy"] = _accuracy(session.consensus(), data) if plan.accuracy else None
    (folder / f"{session.rank}.json").write_text(json.dumps(told))


_kept: list[Any] = []  # Gloo now and then hangs when it is taken down; what is in here never is


def _theirs(place: Together, host: hosts.Host, system: System, plan: Plan, data: Path, folder: Path) -> None:
    import torch
    from torch import distributed
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = f"file://{place.folder / 'store'}"
    model, optimizer, loader = _made(system, plan, data)
    if system.hook != "alone":
        distributed.init_process_group("gloo", init_method=store, rank=place.rank, world_size=place.count)
        # All begin with the same seed, and need not be told the parameters first. PowerSGD wants one bucket.
        cap = 100 if system.hook == "powersgd" else None
        model = DistributedDataParallel(model, bucket_cap_mb=cap, init_sync=False)
        if system.hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif system.hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        _kept.append(model)
    sampler = DistributedSampler(loader.dataset, place.count, place.rank, seed=plan.seed)
    mine = DataLoader(loader.dataset, batch_size=BATCH, sampler=sampler)
    place.barrier()
    told = _train(model, optimizer, mine, system, plan, sampler)
    told["accuracy"] = _accuracy(model, data) if plan.accuracy and place.rank == 0 else None
    (folder / f"{place.rank}.json").write_text(json.dumps(told))
    place.barrier()  # nobody leaves while another may still be in an exchange


def _made(system: System, plan: Plan, data: Path) -> tuple[nn.Module, Any, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(plan.seed)
    model = network()
    training = TensorDataset(*_images(data / _TRAIN))
    return model, system.optimize(model), DataLoader(training, batch_size=BATCH, shuffle=True)


def _train(
    model: nn.Module, optimizer: Any, loader: Any, system: System, plan: Plan, sampler: Any = None
) -> dict[str, Any]:
    """The loop that all systems run: when each step ended, and what had been sent by then."""
    from torch.nn import functional as F

    ends: list[float] = []
    sent: list[int] = []
    last = system.warmup + plan.steps
    total = EPOCHS * TRAINING // BATCH // HOSTS
    for epoch in itertools.count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = system.rate * max(0.0, 1 - len(ends) / (last if plan.accuracy else total))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            ends.append(time.monotonic())
            sent.append(hosts.sent())
            if len(ends) == last:
                return {"ends": ends, "sent": sent}
    raise AssertionError


def _accuracy(model: nn.Module, data: Path) -> float:
    import torch

    images, labels = _images(data / _TEST)
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in images.split(500)]) == labels
    return right.float().mean().item()


if __name__ == "__main__":
    import argparse

    from benchmarks.report import Steal, show

    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--quick", action="store_true", help="one round, and one epoch")
    options.add_argument("--strategies", help="ours, joined by spaces; of those in the list if not given")
    options.add_argument("--rates", default=f"{FAST},{SLOW}", help="of the links (%(default)s)")
    options.add_argument("--no-accuracy", action="store_true", help="speed only")
    asked = options.parse_args()
    known = {system.name: system for system in OURS}
    wanted = asked.strategies.split() if asked.strategies else list(known)
    with Steal() as steal:
        measured, remarks = measure(
            asked.quick, [known.get(name, System(name)) for name in wanted], asked.rates.split(","),
            not asked.no_accuracy,
        )  # fmt: skip
    print(show(measured), *remarks, steal, sep="\n")
