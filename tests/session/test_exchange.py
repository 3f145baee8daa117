"""What scripts exchange: `mean`, `gather`, `barrier`, `save` and `print`, alone and in a run."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import polyrhythm as pr
from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.registry import describe, parse
from tests.support.combine import each_value
from tests.support.runs import WORLDS, run_in

UNEQUAL = '[[hosts]]\ncount = 1\nspeed = 0.2\nstep_time = "10 ms"\n[[hosts]]\nstep_time = "10 ms"\n'
EQUAL = '[[hosts]]\nstep_time = "10 ms"\n'


def trained(session: pr.Session, epochs: int, at_end: Callable[[int, int], None]) -> None:
    """Trains; calls `at_end` after each epoch with its number and the examples that this worker has seen."""
    model: Any = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(26, 2))  # 13 batches: some worker takes more steps, if it may
    loader: Any = DataLoader(data, batch_size=2)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        seen = 0
        for (x,) in loader:
            seen += len(x)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        at_end(epoch, seen)


def exchanging() -> None:
    """Every kind of exchange, with values by rank; asserts the results on each worker."""
    session = pr.init()
    everyone = range(session.workers)

    def exchange(epoch: int, seen: int) -> None:
        rank = session.rank
        assert session.gather(rank + epoch) == [each + epoch for each in everyone]
        assert session.gather({"rank": rank, "all": [None, "text"]})[-1]["rank"] == everyone[-1]
        tensors = session.gather(torch.full((rank, 2), rank, dtype=torch.int16))
        assert [tuple(each.shape) for each in tensors] == [(each, 2) for each in everyone]
        assert all(each.dtype == torch.int16 and bool((each == i).all()) for i, each in enumerate(tensors))
        # More than one message of the coordinator can hold.
        large = session.gather(torch.arange(300_000) * (rank + 1))
        assert all(torch.equal(each, torch.arange(300_000) * (i + 1)) for i, each in enumerate(large))
        # Correct and total of each worker: the mean by examples is the accuracy of all of them.
        correct = [3, 1, 0, 7][: session.workers]
        total = [4, 2, 0, 9][: session.workers]
        share = correct[rank] / total[rank] if total[rank] else math.nan
        assert session.mean(share, weight=total[rank]) == pytest.approx(sum(correct) / sum(total), rel=1e-15)
        assert session.mean(0.1) == 0.1
        found = session.mean(torch.tensor([1.0, rank]), weight=rank + 1)
        weights = sum(each + 1 for each in everyone)
        expected = sum(each * (each + 1) for each in everyone) / weights
        assert found.dtype == torch.float32 and torch.equal(found, torch.tensor([1.0, expected]))
        assert session.mean(torch.tensor(rank)).dtype == torch.float32
        session.barrier()

    trained(session, 2, exchange)


def test_all_of_it_works_alone() -> None:
    exchanging()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_exchanges_are_exact_in_a_run(world: str, strategy: str) -> None:
    run_in(world, exchanging, workers=4, strategy=strategy)


STRATEGIES = [row.name for row in describe()]
HARD = [
    "ssp:0",
    "softsync:2,pull=next-version",
    "async:prefetch=yes",
    "backup:1",
    "broadcast:0.01,warmup=1000",
]


@pytest.mark.parametrize("strategy", [*STRATEGIES, *HARD])
def test_no_strategy_waits_for_a_worker_that_waits_for_the_others(strategy: str) -> None:
    """The fast workers come to the end of an epoch while the slow one has steps to go."""
    results: list[tuple[int, float, list[int]]] = []

    def main() -> None:
        session = pr.init()

        def at_end(epoch: int, seen: int) -> None:
            results.append((epoch, session.mean(float(session.rank)), session.gather(seen)))

        trained(session, 2, at_end)

    traits = parse(strategy).traits
    cluster = EQUAL if traits.one_host else UNEQUAL
    run_in("simulated", main, strategy=strategy, workers=3, cluster=cluster)
    assert len(results) == 6 and all(mean == 1.0 for _, mean, _ in results)
    for epoch in range(2):
        (seen,) = {tuple(seen) for number, _, seen in results if number == epoch}
        assert sum(seen) >= 26 if traits.lockstep else sum(seen) == 26


@pytest.mark.parametrize("back", ["", 'back = "250 ms"\n'])
@pytest.mark.parametrize("strategy", ["async", "gossip", "adpsgd"])
def test_a_dead_worker_does_not_count_unless_it_is_replaced(strategy: str, back: str) -> None:
    """Its replacement gets what the others got at the points that they have passed."""
    results: dict[int, list[list[tuple[int, int]]]] = {}

    def main() -> None:
        session = pr.init()
        mine: list[list[tuple[int, int]]] = []

        def at_end(epoch: int, seen: int) -> None:
            mine.append(session.gather((session.rank, epoch)))
            results[session.rank] = mine

        trained(session, 4, at_end)

    # An epoch takes 50 ms.
    failures = f'[[failures]]\nworkers = [1]\nat = "65 ms"\n{back}'
    summary = run_in("simulated", main, strategy=strategy, workers=3, cluster=EQUAL + failures)
    assert summary["joined"] == bool(back)
    assert results[0] == results[2] and [each[0] for each in results[0]] == [(0, epoch) for epoch in range(4)]
    assert all({epoch for _, epoch in each} == {number} for number, each in enumerate(results[0]))
    counts = [len(each) for each in results[0]]
    assert counts == ([3, 3, 3, 3] if back else [3, 2, 2, 2])
    if back:
        assert results[1] == results[0]


def kill_at_gather(folder: Path) -> None:
    import os
    import signal

    session = pr.init()

    def at_end(epoch: int, seen: int) -> None:
        first = not (folder / "died").exists()
        if epoch == 1 and session.rank == 1 and first:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        session.log(**{f"{session.rank} {epoch}": str(session.gather((session.rank, epoch)))})

    trained(session, 3, at_end)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_process_does_not_hold_up_a_gather(tmp_path: Path, restarts: int) -> None:
    main = lambda: kill_at_gather(tmp_path)  # noqa: E731
    metrics = run_in("real", main, strategy="async", workers=3, restarts=restarts)["metrics"]
    ranks = [0, 1, 2] if restarts else [0, 2]
    for rank in (0, 2):
        assert [metrics[f"{rank} {epoch}"] for epoch in range(3)] == [
            str([(each, 0) for each in range(3)]),
            *(str([(each, epoch) for each in ranks]) for epoch in (1, 2)),
        ]


def one_skips(session: pr.Session) -> None:
    if session.rank:
        session.mean(1.0)


def two_places(session: pr.Session) -> None:
    if session.rank:
        session.mean(1.0)
    session.mean(2.0)
    if not session.rank:
        session.mean(1.0)


def two_kinds(session: pr.Session) -> None:
    session.barrier() if session.rank else session.gather(1)


def shapes(session: pr.Session) -> None:
    session.mean(torch.zeros(session.rank + 1))


def kinds(session: pr.Session) -> None:
    session.mean(torch.zeros(1) if session.rank else 0.0)


WRONG: dict[str, tuple[Callable[[pr.Session], Any], str]] = {
    "one skips it": (one_skips, "worker 1 is in session.mean() (test_exchange.py, line"),
    "two places": (two_places, "all workers must make the same calls in the same order"),
    "two kinds": (two_kinds, "session.barrier()"),
    "shapes": (shapes, "use session.gather()"),
    "kinds": (kinds, "a tensor on one worker and a number on another"),
    "an object": (lambda session: session.gather(object()), "not object"),
    "a text": (lambda session: session.mean("0.5"), "takes a number or a tensor"),
    "no weight": (lambda session: session.mean(1.0, weight=0), "the weight is 0 on all workers"),
    "a negative weight": (lambda session: session.mean(1.0, weight=-1), "a weight of 0 or more"),
    "reduce": (lambda session: session.log(x=1, reduce="sum"), "mean, min, max, rank0, not by 'sum'"),
}


BY_THE_COORDINATOR = ("one skips it", "two places")  # found, so it is tried in both worlds


@pytest.mark.parametrize(
    ("world", "name"),
    [*(("simulated", name) for name in WRONG), *(("real", each) for each in BY_THE_COORDINATOR)],
)
def test_wrong_uses_are_told(world: str, name: str) -> None:
    wrong, message = WRONG[name]

    def main() -> None:
        session = pr.init()
        trained(session, 1, lambda epoch, seen: wrong(session))

    with pytest.raises(PolyrhythmError) as refused:
        run_in(world, main, workers=2, strategy="async")
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["an object", "a text", "no weight", "a negative weight", "reduce"])
def test_wrong_uses_are_told_alone_too(name: str) -> None:
    wrong, message = WRONG[name]
    with pytest.raises(UsageError, match="session") as refused:
        wrong(pr.init())
    assert message in str(refused.value)


@pytest.mark.parametrize("world", [None, *WORLDS])
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_worker_0_saves_once_and_all_may_read(
    world: str | None, strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    (tmp_path / "marks").mkdir()

    def main() -> None:
        session = pr.init()
        if session.is_main:
            (tmp_path / "prepared").touch()
        session.barrier()  # servers come here too
        assert (tmp_path / "prepared").exists()

        def at_end(epoch: int, seen: int) -> None:
            if session.is_main and world == "real":
                time.sleep(0.05)
            session.save({"epoch": epoch, "rank": session.rank}, path)
            assert torch.load(path) == {"epoch": epoch, "rank": 0}
            session.print(f"epoch {epoch} by {session.rank}")
            session.barrier()  # all have read it

        trained(session, 2, at_end)
        (tmp_path / "marks" / f"{session.rank}").touch()

    if world is None:
        main()
        assert capfd.readouterr().out == "epoch 0 by 0\nepoch 1 by 0\n"
    else:
        run_in(world, main, workers=3, strategy=strategy)
        assert len([*(tmp_path / "marks").iterdir()]) == 3
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_file()) == ["model.pt", "prepared"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    session, path = pr.init(), tmp_path / "model.pt"
    session.save(1, path)
    with pytest.raises(Exception, match="pickle"):
        session.save(lambda: None, path)
    assert torch.load(path) == 1 and [each.name for each in tmp_path.iterdir()] == ["model.pt"]


def test_a_worker_that_waits_in_inference_mode_leaves_the_others_in_theirs() -> None:
    """In simulation all workers share the modes of one thread."""

    def meet(session: pr.Session) -> None:
        assert session.mean(session.rank) == 0.5

    def main() -> None:
        session, model = pr.init(), torch.nn.Linear(2, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if session.rank == 0:
            with torch.inference_mode():
                meet(session)
                assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        if session.rank == 1:
            meet(session)

    run_in("simulated", main, strategy="async", workers=2)


@pytest.mark.slow
def test_another_worker_saves_after_worker_0_has_died(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"

    def main() -> None:
        session = pr.init()
        model = nn.Linear(2, 1)
        data = DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=4)
        model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
        for epoch in range(3):
            for (x,) in loader:
                model(x).mean().backward()
                optimizer.step()
                time.sleep(0.005)
            if epoch == 1 and session.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            session.save(epoch, path)

    summary = run_in("real", main, strategy="async", workers=2)
    assert summary["lost"] == {"worker 0": "was killed by SIGKILL"}
    assert torch.load(path, weights_only=True) == 2


@each_value(
    ("world", WORLDS),
    ("strategy", ["allreduce", "async"]),
    (
        "name, told",
        [("model.pt", True), ("model-{rank}.pt", False), ("{rank}/../model.pt", True), ("", False)],
    ),
)
def test_a_file_that_several_workers_write_is_told_once(
    world: str, strategy: str, name: str, told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By `torch.save`, to one path; `session.save` and paths of their own are fine."""

    def main() -> None:
        session = pr.init()
        (tmp_path / str(session.rank)).mkdir(exist_ok=True)

        def save(epoch: int, seen: int) -> None:
            if name:
                torch.save({}, tmp_path / name.format(rank=session.rank))
            else:
                session.save({}, tmp_path / "model.pt")

        trained(session, 2, save)

    run_in(world, main, strategy=strategy, workers=3)
    assert capfd.readouterr().err.count("both write") == told


class Caching(Dataset[torch.Tensor]):
    """Writes what it has loaded, to the same file in every process that loads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.save({}, self.path)
        return torch.ones(2)


def test_files_that_processes_and_threads_of_the_script_write_are_no_concern(tmp_path: Path) -> None:
    """They cannot send requests."""

    def main() -> None:
        session = pr.init()
        model: Any = nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        loader: Any = DataLoader(Caching(tmp_path / "cache.pt"), batch_size=2, num_workers=1)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        asyncio.run(asyncio.to_thread(torch.save, {}, tmp_path / "model.pt"))

    run_in("simulated", main, workers=2)
    run_in("real", main, workers=2, timeout=60.0)
