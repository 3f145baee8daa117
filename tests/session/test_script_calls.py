"""Calls that all workers make together: one that leaves a call out, or makes another, is told at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.support.combine import each_value
from tests.support.runs import WORLDS, run_in

AT = 4  # the step after which something happens
UNEQUAL = '[[hosts]]\ncount = 1\nspeed = 0.2\nstep_time = "10 ms"\n[[hosts]]\nstep_time = "10 ms"\n'
HERE = r"\(test_script_calls\.py, line \d+\)"


def train(
    session: pr.Session,
    between: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
    *modules: nn.Module,
) -> None:
    """Calls `between` backward and step, and `after` each step."""
    model: Any = nn.Sequential(nn.Linear(2, 4), *modules, nn.Linear(4, 1))
    loader: Any = DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=2)
    model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        between(step)
        optimizer.step()
        after(step)


def refused(world: str, main: Callable[[pr.Session], object], strategy: str) -> str:
    """The error of a run; without one it would wait for half an hour."""
    with pytest.raises(pr.PolyrhythmError) as caught:
        run_in(world, lambda: main(pr.init()), strategy=strategy, workers=2)
    assert isinstance(caught.value, pr.UsageError) and "\n" not in str(caught.value)
    return str(caught.value)


CALLS: dict[str, Callable[[pr.Session, Path], object]] = {
    "session.barrier()": lambda session, folder: session.barrier(),
    "session.mean()": lambda session, folder: session.mean(1.0),
    "session.gather()": lambda session, folder: session.gather(1),
    'session.save("model.pt")': lambda session, folder: session.save(1, folder / "model.pt"),
    "session.consensus()": lambda session, folder: session.consensus(),
}
SOME = [
    ("simulated", "allreduce", "session.barrier()"),
    ("simulated", "local:3", "session.mean()"),
    ("simulated", "gossip", "session.gather()"),
    ("simulated", "sync", 'session.save("model.pt")'),
    ("simulated", "local:3", "session.consensus()"),
    ("simulated", "gossip", "session.consensus()"),
    ("simulated", "diloco:3", "session.consensus()"),
    ("real", "allreduce", "session.barrier()"),
    ("real", "local:3", "session.consensus()"),
]


@each_value(("world, strategy, name", SOME), ("rank", [0, 1]))
def test_a_call_that_one_worker_leaves_out_is_named_with_both_lines(
    world: str, strategy: str, name: str, rank: int, tmp_path: Path
) -> None:
    def main(session: pr.Session) -> None:
        def after(step: int) -> None:
            if step == AT and session.rank == rank:
                CALLS[name](session, tmp_path)

        train(session, after=after)

    message = refused(world, main, strategy)
    assert re.search(rf"^worker {rank} (waits|is) in {re.escape(name)} {HERE}, ", message), message
    if (world, strategy) != ("real", "local:3"):  # there the other may be further, or at its end
        goes_on = rf"but worker {1 - rank} is in step {AT + 2} {HERE}: all workers must make this call$"
        assert re.search(goes_on, message), message


def test_statistics_of_batch_norm_make_consensus_a_common_call() -> None:
    def main(session: pr.Session) -> None:
        def after(step: int) -> None:
            if step == AT and session.is_main:
                session.consensus()

        train(session, lambda step: None, after, nn.BatchNorm1d(4))

    assert "worker 0 waits in session.consensus()" in refused("simulated", main, "allreduce")


def another_call(session: pr.Session, folder: Path) -> None:
    def after(step: int) -> None:
        if step == AT:
            session.consensus() if session.is_main else session.barrier()

    train(session, after=after)


def before_prepare(session: pr.Session, folder: Path) -> None:
    if session.is_main:
        session.barrier()
    train(session)


def at_the_end(session: pr.Session, folder: Path) -> None:
    train(session)
    if session.is_main:
        session.barrier()


def a_better_model(session: pr.Session, folder: Path) -> None:
    train(session)
    if session.is_main:
        session.save("the best", folder / "best.pt")
    session.save("the last", folder / "last.pt")


def a_file_of_each(session: pr.Session, folder: Path) -> None:
    train(session)
    session.save(session.rank, folder / f"{session.rank}.pt")


ORDER: dict[Callable[[pr.Session, Path], None], tuple[list[str], str]] = {
    another_call: (
        ["local:3"],
        r"worker \d is in session\.\w+\(\) \(.*\), and worker \d in session\.\w+\(\)",
    ),
    before_prepare: (
        ["allreduce", "async"],
        r"(?=.*worker 0 (is )?in session\.barrier\(\)).*session\.prepare\(\)",
    ),
    at_the_end: (["gossip", "async"], r"worker 0 is in session\.barrier\(\).*worker 1 has not called"),
    a_better_model: (
        ["async", "local:3"],
        r'session\.save\("(best|last)\.pt"\).*session\.save\("(best|last)',
    ),
    a_file_of_each: (
        ["async"],
        r'session\.save\("[01]\.pt"\).*and worker [01] in session\.save\("[01]\.pt"\)',
    ),
}


@pytest.mark.parametrize(("wrong", "strategy"), [(each, s) for each in ORDER for s in ORDER[each][0]])
def test_different_calls_are_told_when_the_second_one_is_made(
    wrong: Callable[[pr.Session, Path], None], strategy: str, tmp_path: Path
) -> None:
    message = refused("simulated", lambda session: wrong(session, tmp_path), strategy)
    assert re.search(ORDER[wrong][1], message), message
    assert re.search(HERE, message)


def test_a_conditional_save_is_told_on_real_processes(tmp_path: Path) -> None:
    message = refused("real", lambda session: a_better_model(session, tmp_path), "async")
    assert re.search(ORDER[a_better_model][1], message), message


@each_value(("world", WORLDS), ("strategy", ["allreduce", "local:3", "gossip", "async"]))
def test_calls_at_any_point_of_a_step_are_no_mistake(world: str, strategy: str) -> None:
    """Also if one worker is slow: another waits in a call while it is still in the exchange before."""

    def main() -> None:
        session = pr.init()
        barrier = session.barrier
        if session.is_main:
            barrier()  # as in a script in which one worker downloads first
        else:
            barrier()

        def between(step: int) -> None:
            if step < AT:  # where workers go at their own pace, each has so many batches
                assert session.mean(1.0) == 1.0

        def after(step: int) -> None:
            if step < AT:
                session.consensus()
                session.barrier()

        train(session, between, after)

    run_in(world, main, strategy=strategy, workers=2, cluster=UNEQUAL if world == "simulated" else None)


@pytest.mark.parametrize("world", WORLDS)
def test_a_wrong_use_is_told_with_its_line(world: str) -> None:
    def main(session: pr.Session) -> None:
        train(session)
        session.mean("a text")

    line = main.__code__.co_firstlineno + 2
    assert refused(world, main, "allreduce").endswith(f" (test_script_calls.py, line {line})")
