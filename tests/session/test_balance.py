"""`--balance`: fast workers get larger batches, and the result stays that of the union of all batches."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.session.balance import EVERY, FIRST, GAIN, LEAST, by_speed, counts
from tests.support.programs import MOMENTUM, SGD, Examples, Script, alone, distance, events, mlp, trained
from tests.support.runs import run_in

BATCH, WORKERS, STEP = 28, 3, 0.010  # examples, and seconds of a whole batch on a host of speed 1
UNEQUAL = "[[hosts]]\ncount = 1\nspeed = 0.3333333333333333\n[[hosts]]"
DIVIDED = [12, 36, 36]  # a round of 84 examples, by speed
SIZE = 84 * 19 + 42  # the last round of an epoch is half a round


def sizes(summary: dict[str, Any]) -> list[list[int]]:
    """The examples of each worker in each step."""
    found: dict[str, list[int]] = {}
    for event in events(summary, "step"):
        found.setdefault(event["node"], []).append(event["samples"])
    return [list(each) for each in zip(*(found[f"worker {rank}"] for rank in range(WORKERS)), strict=True)]


# --- the division -----------------------------------------------------------------------------------


@given(speeds=some.lists(some.floats(0.01, 100), min_size=1, max_size=9), more=some.integers(0, 500))
def test_a_division_is_whole_and_in_proportion(speeds: list[float], more: int) -> None:
    workers = len(speeds)
    examples = LEAST * workers + more
    found = counts(examples, [speed / sum(speeds) for speed in speeds])
    assert sum(found) == examples and min(found) >= LEAST
    exact = [examples * speed / sum(speeds) for speed in speeds]
    if min(exact) >= LEAST:
        assert all(abs(count - share) < 1 for count, share in zip(found, exact, strict=True))
    order = sorted(range(workers), key=lambda rank: speeds[rank])
    assert all(found[a] <= found[b] + 1 for a, b in itertools.pairwise(order))


@given(seconds=some.lists(some.floats(0.001, 10), min_size=2, max_size=9))
def test_all_workers_need_the_same_time_for_a_round(seconds: list[float]) -> None:
    even = [1 / len(seconds)] * len(seconds)
    shares = by_speed(seconds, even)
    if shares is None:  # not worth it
        assert 1 / sum(1 / each for each in seconds) >= (1 - GAIN) * max(seconds) / len(seconds)
        return
    times = [share * each for share, each in zip(shares, seconds, strict=True)]
    assert sum(shares) == pytest.approx(1) and times == pytest.approx([times[0]] * len(times))
    assert by_speed(seconds, shares) is None  # measured again, it stays


def test_a_worker_that_was_not_measured_changes_nothing() -> None:
    assert by_speed([0.0, 1.0], [0.5, 0.5]) is None


# --- training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "sync"])
def test_unequal_hosts_are_used_fully_and_train_on_the_union(strategy: str, tmp_path: Path) -> None:
    """Each example once per epoch, the trajectory of one large batch, and the time of all speeds together."""
    script = Script(size=SIZE, batch=BATCH, optimizer=MOMENTUM, seen=tmp_path / "seen")
    found = run_in(
        "simulated", script, strategy=strategy, cluster=UNEQUAL, runs=tmp_path, balance=True, check_replicas=7
    )
    seen = Counter(map(int, (tmp_path / "seen").read_text().split()))
    assert seen == Counter([*range(SIZE)] * script.epochs)

    halves = [6, 18, 18]
    assert sizes(found) == [[BATCH] * 3] * FIRST + [DIVIDED] * 14 + [halves] + [DIVIDED] * 19 + [halves]
    ideal = WORKERS * STEP / (1 / 3 + 1 + 1)  # a round by the sum of all speeds
    assert found["wall_s"] == pytest.approx(FIRST * 3 * STEP + (33 + 2 / 2) * ideal, rel=1e-4)

    one = alone(Script(size=SIZE, batch=BATCH * WORKERS, optimizer=MOMENTUM))
    assert distance(trained(found), one) < 1e-13
    script = replace(script, seen=None)
    again = run_in("simulated", script, strategy=strategy, cluster=UNEQUAL, balance=True, check_replicas=7)
    assert again["digest"] == found["digest"]


@pytest.mark.parametrize("strategy", ["allreduce", "local:4", "average:4"])
def test_equal_hosts_keep_the_bits_of_a_run_without_it(strategy: str) -> None:
    script = Script(size=SIZE, batch=BATCH, shuffle=True)
    cluster = '[[hosts]]\nstep_time = { uniform = ["9.8 ms", "10.2 ms"] }'
    plain, balanced = (
        run_in("simulated", script, strategy=strategy, cluster=cluster, balance=balance)
        for balance in (False, True)
    )
    assert balanced["digest"] == plain["digest"]


@pytest.mark.parametrize("strategy", ["local:4", "average:4", "diloco:5", "allreduce+fp16"])
def test_strategies_with_rounds_of_their_own_are_balanced_too(strategy: str, tmp_path: Path) -> None:
    script = Script(size=SIZE, batch=BATCH, seen=tmp_path / "seen")
    found = run_in("simulated", script, strategy=strategy, cluster=UNEQUAL, runs=tmp_path, balance=True)
    assert Counter(map(int, (tmp_path / "seen").read_text().split())) == Counter([*range(SIZE)] * 2)
    assert sizes(found)[FIRST:19] == [DIVIDED] * 14
    assert found["metrics"]["after"] < found["metrics"]["before"]


def test_two_loaders_and_two_optimizers_are_balanced_together(tmp_path: Path) -> None:
    """Loaders with batches of their own sizes, whose epochs end at different times."""

    def script() -> None:
        session, models = pr.init(), [mlp(), mlp()]
        optimizers = [SGD(model.parameters()) for model in models]
        given = [
            DataLoader(Examples(84 * 10), batch_size=BATCH),
            DataLoader(Examples(84 * 2, tmp_path / "seen"), batch_size=BATCH // 4),
        ]
        _, _, _, _, *loaders = session.prepare(*models, *optimizers, *given)
        for _ in range(2):
            for pair in zip(*loaders, strict=False):
                for (x, y), model, optimizer in zip(pair, models, optimizers, strict=True):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            assert next(iter(loaders[0]), None) is not None  # a look changes nothing

    found = run_in("simulated", script, cluster=UNEQUAL, runs=tmp_path, balance=True, check_replicas=4)
    assert Counter(map(int, (tmp_path / "seen").read_text().split())) == Counter([*range(84 * 2)] * 2)
    assert sizes(found)[-1] == [0] * 3  # of the second optimizer, on the same examples
    assert sizes(found)[-2] == [12 + 3, 36 + 9, 36 + 9]


def test_the_division_follows_the_speeds(tmp_path: Path) -> None:
    """A host that is slow for a while gets smaller batches for a while."""
    cluster = '[[hosts]]\n[[stragglers]]\nworkers = [0]\nto = "1 s"\nslowdown = 3'
    script = Script(size=84 * 60, batch=BATCH, epochs=3)
    steps = sizes(run_in("simulated", script, cluster=cluster, runs=tmp_path, balance=True))
    changed = [number for number in range(1, len(steps)) if steps[number] != steps[number - 1]]
    assert [steps[number] for number in (0, *changed)] == [[BATCH] * 3, DIVIDED, [BATCH] * 3]
    assert changed[0] == FIRST and (changed[1] - FIRST) % EVERY == 0


@dataclass
class Loop:
    """A loop with dropout that exchanges its loss in each step, saves after step `stop`, and may resume."""

    folder: Path
    stop: int = 0
    resume: bool = False
    slow: float = 0.0  # seconds per example on worker 1
    prefetches: bool = False  # worker 0 loads data in processes

    def __call__(self) -> None:
        session = pr.init()
        model = torch.nn.Sequential(torch.nn.Dropout(0.2), mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        examples = Examples(84 * 6, self.folder / f"seen {session.rank}")
        loaders = 2 if self.prefetches and session.rank == 0 else 0
        loader = DataLoader(examples, batch_size=BATCH, shuffle=True, num_workers=loaders)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        path, step = self.folder / f"{session.rank}.pt", 0
        if self.resume:
            saved = torch.load(path, weights_only=False)
            model.load_state_dict(saved["model"])
            session.load_state_dict(saved["session"])
        while loader.epoch < 3:
            for x, y in loader:
                time.sleep(self.slow * len(x) if session.rank == 1 else 0.0)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                session.mean(loss.item(), len(x))
                step += 1
                if step == self.stop:
                    torch.save({"model": model.state_dict(), "session": session.state_dict()}, path)


@pytest.mark.parametrize("strategy", ["allreduce", "local:4"])
def test_a_run_resumes_with_its_division(strategy: str, tmp_path: Path) -> None:
    """Saved between two exchanges of speeds, in the middle of an epoch: the bits of the run that went on."""
    options: dict[str, Any] = {"strategy": strategy, "cluster": UNEQUAL, "runs": tmp_path, "balance": True}
    whole = run_in("simulated", Loop(tmp_path, stop=8), **options)
    resumed = run_in("simulated", Loop(tmp_path, resume=True), **options)
    assert resumed["digest"] == whole["digest"]
    assert sizes(resumed) == sizes(whole)[8:] == [DIVIDED] * 10  # to exchange the loss is not to compute


def test_real_workers_agree_while_one_draws_ahead(tmp_path: Path) -> None:
    """Worker 1 sleeps for each example. Worker 0 has drawn some rounds when the division changes."""
    program = Loop(tmp_path, slow=0.001, prefetches=True)
    found = run_in("real", program, runs=tmp_path, balance=True, check_replicas=3)
    seen = [Counter(map(int, (tmp_path / f"seen {rank}").read_text().split())) for rank in range(WORKERS)]
    assert sum(seen, Counter()) == Counter([*range(84 * 6)] * 3)
    steps = sizes(found)
    assert steps[:FIRST] == [[BATCH] * 3] * FIRST and {sum(each) for each in steps} == {84}
    assert steps[-1][1] < BATCH < max(steps[-1])


# --- what it cannot do ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("async", "under async fast workers take more batches already: leave out --balance"),
        ("gossip", "--balance needs workers that stay the same, and under gossip they may die"),
    ],
)
def test_strategies_that_cannot_be_balanced_are_refused(strategy: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_in("simulated", Script(), strategy=strategy, balance=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Examples(20))


@pytest.mark.parametrize("stream", [False, True])
def test_batches_that_cannot_be_divided_are_refused(stream: bool) -> None:
    def script() -> None:
        session, model = pr.init(), mlp()
        whole = BatchSampler(SequentialSampler(range(20)), 4, drop_last=False)
        loader = (
            DataLoader(Stream(), batch_size=4)
            if stream
            else DataLoader(
                Examples(20), batch_sampler=type("Own", (BatchSampler,), {})(whole.sampler, 4, False)
            )
        )
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    with pytest.raises(UsageError, match="has a batch sampler of its own or reads a stream"):
        run_in("simulated", script, balance=True)
