"""The weight of a batch goes to its own gradient, in whatever way a script draws and keeps batches.

The examples are one-hot and the learning rate is 1, so each parameter is how much its example has counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.support.combine import each_value
from tests.support.programs import trained
from tests.support.runs import WORLDS, run_in

# Two workers, batches of two: in the last round worker 0 has two of the last three examples.
ONCE = [0.25] * 8 + [0.3333] * 3


def loader(count: int = 11) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.eye(11)[:count]), batch_size=2)


def ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Draws each batch before the one before it is used."""
    source = iter(batches)
    following = next(source, None)
    while following is not None:
        batch, following = following, next(source, None)
        yield batch


def in_groups(batches: Iterable[Any]) -> Iterator[Any]:
    """Draws two batches at a time."""
    source = iter(batches)
    while group := list(islice(source, 2)):
        yield from group


def copied(batches: Iterable[Any]) -> Iterator[Any]:
    """Draws ahead, and gives out new tensors."""
    for (x,) in ahead(batches):
        yield (x.clone(),)


def counted(
    world: str,
    folder: Path,
    draw: Callable[[Iterable[Any]], Iterable[Any]],
    strategy: str = "allreduce",
    twice: int = 1,
    source: DataLoader[Any] | None = None,
) -> list[float]:
    """How much each example counts; `twice`: how many passes each batch is used for."""

    def main() -> None:
        session = pr.init()
        model = nn.Linear(11, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, batches = session.prepare(model, optimizer, source or loader())
        for (x,) in draw(batches):
            for _ in range(twice):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()

    summary = run_in(world, main, strategy=strategy, workers=2, runs=folder)
    return [round(-each, 4) + 0.0 for each in trained(summary)["weight"][0].tolist()]


@each_value(
    ("world", WORLDS), ("strategy", ["allreduce", "sync"]), ("draw", [iter, ahead, copied, list, in_groups])
)
def test_each_batch_has_its_own_weight(
    world: str, strategy: str, draw: Callable[[Iterable[Any]], Iterable[Any]], tmp_path: Path
) -> None:
    assert counted(world, tmp_path, draw, strategy) == ONCE


class Views(TensorDataset):
    """Gives out batches that are views of one tensor."""

    def __getitems__(self, indexes: list[int]) -> Any:
        return (
            self.tensors[0][indexes[0] : indexes[-1] + 1 : indexes[1] - indexes[0] if indexes[1:] else 1],
        )


def test_views_of_one_tensor_are_used_in_the_order_in_which_they_were_drawn(tmp_path: Path) -> None:
    data = DataLoader(Views(torch.eye(11)), batch_size=2, collate_fn=lambda batch: batch)
    assert counted("simulated", tmp_path, ahead, source=data) == ONCE


def test_batches_that_are_used_again_have_their_weight_again(tmp_path: Path) -> None:
    rounds = 3  # a worker has three batches in an epoch
    found = counted("simulated", tmp_path, lambda batches: islice(cycle(batches), 2 * rounds))
    assert found == pytest.approx([2 * each for each in ONCE], abs=2e-4)


@pytest.mark.parametrize("draw", [iter, ahead, copied])
def test_several_passes_on_a_batch_have_its_weight(
    draw: Callable[[Iterable[Any]], Iterable[Any]], tmp_path: Path
) -> None:
    assert counted("simulated", tmp_path, draw, twice=3) == pytest.approx(
        [3 * each for each in ONCE], abs=2e-4
    )


def test_batches_that_are_skipped_change_no_weight(tmp_path: Path) -> None:
    """As a script does that goes on where it was in an epoch."""
    found = counted("simulated", tmp_path, lambda batches: islice(batches, 1, None))
    assert found == [0.0] * 4 + ONCE[4:]


def run_two(main: Callable[[pr.Session], None], capfd: pytest.CaptureFixture[str]) -> str:
    run_in("simulated", lambda: main(pr.init()), strategy="allreduce", workers=2)
    return capfd.readouterr().err


def prepared(session: pr.Session, *loaders: DataLoader[Any]) -> Any:
    model = nn.Linear(11, 1, bias=False)
    return session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Tensor) -> None:
    optimizer.zero_grad()
    torch.stack([model(x).mean() for x in batches]).sum().backward()
    optimizer.step()


def test_what_counts_is_known_for_each_loader(tmp_path: Path) -> None:
    """Though the last round of one is not the last of the other."""
    found: list[int] = []

    def main() -> None:
        session = pr.init()
        model, optimizer, one, two = prepared(session, loader(), loader(6))
        for (x,), (y,) in zip(one, two, strict=False):
            step(model, optimizer, x, y)
            found.append(session.count(x))

    run_in("simulated", main, strategy="allreduce", workers=2)
    assert sum(found) == 8  # the shorter one ends before the last round of the other


def test_batches_of_different_weights_in_one_pass_are_noted(capfd: pytest.CaptureFixture[str]) -> None:
    def main(session: pr.Session) -> None:
        model, optimizer, one, two = prepared(session, loader(8), loader(7))
        for (x,), (y,) in zip(one, two, strict=True):
            step(model, optimizer, x, y)

    assert run_two(main, capfd).count("one backward pass uses batches of different weights") == 1


def test_training_on_another_loader_afterwards_is_noted(capfd: pytest.CaptureFixture[str]) -> None:
    def main(session: pr.Session) -> None:
        model, optimizer, one = prepared(session, loader())
        for (x,) in one:
            step(model, optimizer, x)
        for (x,) in loader():
            step(model, optimizer, x)

    assert run_two(main, capfd).count("trains on something else after it has read a prepared loader") == 1


def test_a_step_and_an_evaluation_after_the_last_batch_are_not(capfd: pytest.CaptureFixture[str]) -> None:
    def main(session: pr.Session) -> None:
        model, optimizer, one = prepared(session, loader())
        for _ in range(2):
            for (x,) in one:
                model(x).mean().backward()
            optimizer.step()  # the rest of what was accumulated
            optimizer.zero_grad()
            model.eval()
            for (x,) in loader():
                model(x)  # without no_grad()
            model.train()

    assert "trains on something else" not in run_two(main, capfd)


def test_a_state_that_is_saved_while_a_batch_is_ahead_has_that_batch(tmp_path: Path) -> None:
    def part(begin: bool) -> list[int]:
        seen: list[int] = []

        def main() -> None:
            session = pr.init()
            model, optimizer, batches = prepared(
                session, DataLoader(TensorDataset(torch.eye(11)), batch_size=1)
            )
            if not begin:
                session.load_state_dict(torch.load(tmp_path / f"{session.rank}.pt", weights_only=True))
            for number, (x,) in enumerate(ahead(batches)):
                if begin and number == 2:
                    torch.save(session.state_dict(), tmp_path / f"{session.rank}.pt")
                    break
                step(model, optimizer, x)
                seen.append(int(x.argmax()))

        run_in("simulated", main, strategy="allreduce", workers=2)
        return seen

    assert sorted(set(part(begin=True) + part(begin=False))) == list(range(11))


@pytest.mark.parametrize("strategy", ["allreduce", "sync"])
def test_gradients_of_single_examples_have_the_weight_of_their_batch(strategy: str, tmp_path: Path) -> None:
    """Inside `torch.func` the tensors of a batch are wrapped, and the script sets `.grad` itself."""

    def main() -> None:
        session = pr.init()
        model = nn.Linear(11, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, batches = session.prepare(model, optimizer, loader())

        def loss(weight: Tensor, x: Tensor) -> Tensor:
            found: Tensor = functional_call(model, {"weight": weight}, (x[None],))
            return found.sum()

        for (x,) in batches:
            each = vmap(grad(loss), in_dims=(None, 0))(model.weight.detach(), x)
            model.weight.grad = each.mean(0)
            optimizer.step()

    summary = run_in("simulated", main, strategy=strategy, workers=2, runs=tmp_path)
    assert [round(-each, 4) for each in trained(summary)["weight"][0].tolist()] == ONCE
