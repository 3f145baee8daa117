"""What a worker's loop over a loader means: splits, early ends, pairs, sizes, counts, replacements."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

import polyrhythm as pr
from polyrhythm.coordination.leases import Leases
from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.lease import Lease
from polyrhythm.session.counting import Counting
from polyrhythm.session.dataset_identity import identity_of
from tests.support.runs import WORLDS, run_in


def rows(count: int) -> TensorDataset:
    """Example i is i."""
    return TensorDataset(torch.arange(float(count))[:, None])


def prepared(session: Any) -> tuple[Any, Any]:
    model = nn.Linear(1, 1)
    made: tuple[Any, Any] = session.prepare(model, SGD(model.parameters(), lr=0.0))
    return made


def take(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


def leave(folder: Path, session: Any, found: Any) -> None:
    torch.save(found, folder / f"{session.rank}.pt")


def found_by(folder: Path, workers: int) -> list[Any]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(workers)]


# --- the training set is the same on all workers ----------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_split_after_prepare_is_the_same_on_all_workers(world: str, strategy: str, tmp_path: Path) -> None:
    """Nothing that one worker keeps for validation is trained on by another; dropout still differs."""

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        train, held = random_split(rows(24), [16, 8])
        loader = session.prepare(DataLoader(train, batch_size=2, shuffle=True))
        seen = []
        for (x,) in loader:
            seen += x.flatten().tolist()
            take(model, optimizer, x)
        leave(tmp_path, session, (seen, sorted(held.indices), torch.rand(3)))

    run_in(world, script, strategy=strategy, workers=2)
    (one, held, drawn), (other, also_held, also_drawn) = found_by(tmp_path, 2)
    assert held == also_held
    assert sorted([*one, *other, *held]) == list(range(24))
    assert not torch.equal(drawn, also_drawn)


@pytest.mark.parametrize("strategy", ["allreduce", "async", "gossip"])
@pytest.mark.parametrize("leaves", [False, True])
def test_workers_that_split_differently_are_named(strategy: str, leaves: bool) -> None:
    """Also if the script leaves its loop after the first batch."""

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        torch.manual_seed(session.rank)
        train, _ = random_split(rows(24), [16, 8])
        for (x,) in session.prepare(DataLoader(train, batch_size=2)):
            take(model, optimizer, x)
            if leaves:
                break

    with pytest.raises(
        PolyrhythmError, match=r"worker . trains on Subset of 16 .*random_split\(data"
    ) as told:
        run_in("simulated", script, strategy=strategy, workers=2)
    assert "\n" not in str(told.value)


def test_what_is_seen_of_a_dataset_is_what_was_chosen_of_it() -> None:
    data = rows(8)

    def seen(dataset: Any, **options: Any) -> str:
        return identity_of(DataLoader(dataset, **options))

    chosen = Subset(data, [1, 2, 3])
    same = [Subset(rows(8), [1, 2, 3]), Subset(data, torch.tensor([1, 2, 3])), Subset(data, range(1, 4))]  # type: ignore[arg-type]
    assert {seen(each) for each in same} == {seen(chosen)}
    others = [
        data, rows(9), Subset(data, [1, 2, 4]), Subset(rows(9), [1, 2, 3]), Subset(chosen, [0, 1, 2]),
        Subset(Subset(data, [1, 2, 4]), [0, 1, 2]), ConcatDataset([data, chosen]),
        ConcatDataset([chosen, data]),
        TensorDataset(torch.zeros(8, 2)), TensorDataset(torch.zeros(8, 1, dtype=torch.float64)),
        TensorDataset(torch.zeros(8, 2), torch.arange(8)),
        TensorDataset(torch.zeros(8, 2), torch.arange(8).flip(0)),
    ]  # fmt: skip
    assert len({seen(each) for each in [chosen, *others]}) == 1 + len(others)
    samplers = [SubsetRandomSampler([0, 1]), SubsetRandomSampler([0, 2])]
    assert len({seen(data, sampler=each) for each in samplers}) == 2


# --- an epoch that is left early is over ------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("looks", [False, True])
def test_what_all_workers_leave_of_an_epoch_does_not_come_back(
    world: str, looks: bool, tmp_path: Path
) -> None:
    """With leases, each epoch has batches of its own order only: no example comes twice in an epoch."""

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        loader = session.prepare(DataLoader(rows(64), batch_size=1))
        epochs = []
        for _ in range(3):
            if looks:
                next(iter(loader))
            epochs.append([])
            for number, (x,) in enumerate(loader, 1):
                epochs[-1] += x.flatten().tolist()
                take(model, optimizer, x)
                if number == 5:
                    break
            session.barrier()  # all have left the epoch
        leave(tmp_path, session, epochs)

    summary = run_in(world, script, strategy="async", workers=2)
    for one, other in zip(*found_by(tmp_path, 2), strict=True):
        assert len(one) == len(other) == 5
        assert set(Counter(one + other).values()) == {1}
    assert summary["batches_undone"] == 0


def test_leases_of_a_worker_that_leaves_are_for_others_in_the_same_epoch() -> None:
    """Those of a lost worker are for a later epoch too, also if who has taken them over leaves."""
    leases, workers = Leases(), [0, 1, 2]

    def take_lease(worker: int, epoch: int) -> Lease | None:
        return leases.take(worker, 0, epoch, 48, workers, 8)

    assert take_lease(0, 0) == Lease(0, 0, 8) and take_lease(1, 0) == Lease(0, 8, 6)
    leases.give_back(0, 0, [Lease(0, 5, 3)])
    assert take_lease(0, 1) == Lease(1, 0, 8), "the epoch is over for who left it"
    assert take_lease(1, 0) == Lease(0, 5, 3), "and not for others"
    leases.give_back(1, 0, [Lease(0, 6, 2)])
    assert take_lease(1, 1) == Lease(1, 8, 6)
    assert take_lease(2, 0) == Lease(0, 6, 2)
    leases.give_back(2, 0, [Lease(0, 7, 1)])
    assert take_lease(2, 1) == Lease(1, 14, 5) and not leases.position(0).left, "all have left it"
    assert leases.lose(1) == leases.undone == 6
    workers.remove(1)
    assert take_lease(0, 2) == Lease(1, 8, 6)
    leases.give_back(0, 0, [Lease(1, 9, 5)])
    assert leases.undone == 5 and take_lease(2, 3) == Lease(1, 9, 5)


def test_what_was_left_of_an_epoch_is_saved_for_those_in_it() -> None:
    leases = Leases()
    assert leases.take(0, 0, 2, 16, [0, 1], 8) == Lease(2, 0, 4)
    leases.give_back(0, 0, [Lease(2, 3, 1)])
    assert leases.position(0).left == [Lease(2, 3, 1)] and not leases.position(0).returned


# --- loaders that are iterated together -------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(self.size))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def sequential() -> tuple[Any, ...]:
    return DataLoader(rows(24), batch_size=2), DataLoader(rows(24), batch_size=2)


def seeded() -> tuple[Any, ...]:
    return tuple(DataLoader(rows(24), 2, shuffle=True, generator=generator()) for _ in range(2))


def streams() -> tuple[Any, ...]:
    return DataLoader(Stream(), batch_size=2), DataLoader(Stream(), batch_size=2)


def by_hand(one: Any, other: Any) -> Iterator[Any]:
    rest = iter(other)
    for each in one:
        yield each, next(rest)


def together(loaders: Callable[[], Any], pairs: Callable[..., Any], folder: Path) -> Callable[[], None]:
    """A script that iterates over two loaders together, and keeps what it has got."""

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        seen = []
        for (x,), (y,) in pairs(*session.prepare(*loaders())):
            seen.append((x.flatten().tolist(), y.flatten().tolist()))
            take(model, optimizer, torch.cat([x, y]))
        leave(folder, session, seen)

    return script


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("loaders", [sequential, seeded, streams])
def test_lockstep_keeps_pairs_together(world: str, loaders: Any, tmp_path: Path) -> None:
    run_in(world, together(loaders, zip, tmp_path), strategy="allreduce", workers=2)
    pairs = [pair for found in found_by(tmp_path, 2) for pair in found]
    assert all(one == other for one, other in pairs)
    assert sorted(index for one, _ in pairs for index in one) == list(range(24))


@pytest.mark.parametrize("pairs", [zip, by_hand])
@pytest.mark.parametrize("loaders", [sequential, seeded, streams])
def test_leased_pairs_are_refused(loaders: Any, pairs: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pairs are lost: use one dataset that returns both.*StackDataset"):
        run_in("simulated", together(loaders, pairs, tmp_path), strategy="async", workers=2)


def test_leased_pairs_are_refused_on_real_processes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pairs are lost"):
        run_in("real", together(sequential, zip, tmp_path), strategy="async", workers=2)


@pytest.mark.parametrize("other", [lambda: DataLoader(rows(48), 4), lambda: DataLoader(Stream(), 2)])
def test_pairs_that_lockstep_divides_differently_are_refused(other: Any, tmp_path: Path) -> None:
    def loaders() -> tuple[Any, ...]:
        return DataLoader(rows(24), batch_size=2), other()

    with pytest.raises(UsageError, match=r"divide their batches differently.*give both the same batch_size"):
        run_in("simulated", together(loaders, zip, tmp_path), strategy="allreduce", workers=2)


def test_pairs_of_whole_batches_of_different_sizes_are_kept(tmp_path: Path) -> None:
    def loaders() -> tuple[Any, ...]:
        return DataLoader(Stream(), batch_size=2), DataLoader(Stream(48), batch_size=4)

    run_in("simulated", together(loaders, zip, tmp_path), strategy="allreduce", workers=2)
    for one, other in (pair for found in found_by(tmp_path, 2) for pair in found):
        assert other == [2 * one[0] + more for more in range(4)]


def independent() -> tuple[Any, ...]:
    return DataLoader(rows(24), 2, shuffle=True), DataLoader(rows(24), 2, shuffle=True)


def of_different_lengths() -> tuple[Any, ...]:
    return DataLoader(rows(24), batch_size=2), DataLoader(rows(32), batch_size=2)


def one_after_the_other(one: Any, other: Any) -> Iterator[Any]:
    for loader in (one, other, one):
        for (x,) in loader:
            yield (x,), (x,)


def one_within_the_other(one: Any, other: Any) -> Iterator[Any]:
    for each in one:
        for same in other:
            yield each, same


@pytest.mark.parametrize(
    ("loaders", "pairs", "workers"),
    [
        (independent, zip, 2),
        (of_different_lengths, zip, 2),
        (sequential, zip, 1),
        (sequential, one_after_the_other, 2),
        (sequential, one_within_the_other, 2),
    ],
)
def test_loaders_without_pairs_to_lose_may_be_leased(
    loaders: Any, pairs: Any, workers: int, tmp_path: Path
) -> None:
    run_in("simulated", together(loaders, pairs, tmp_path), strategy="async", workers=workers)


def test_one_dataset_that_returns_both_keeps_pairs_together(tmp_path: Path) -> None:
    """What the refusal recommends works."""

    def stacked() -> Any:
        return DataLoader(StackDataset(rows(24), rows(24)), batch_size=2)

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        for (x,), (y,) in session.prepare(stacked()):
            assert torch.equal(x, y)
            take(model, optimizer, x + y)

    run_in("simulated", script, strategy="async", workers=2)


# --- sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_drop_last_keeps_the_batch_size_in_every_round(world: str, strategy: str, tmp_path: Path) -> None:
    """Each full batch counts once; a worker without one borrows a full batch, which does not count."""

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        loader = session.prepare(DataLoader(rows(23), batch_size=4, drop_last=True))
        seen = []
        for (x,) in loader:
            assert len(x) == 4
            take(model, optimizer, x)
            if session.count(x):
                seen += x.flatten().tolist()
        leave(tmp_path, session, seen)

    summary = run_in(world, script, strategy=strategy, workers=3)
    assert sorted(index for seen in found_by(tmp_path, 3) for index in seen) == list(range(20))
    assert summary["samples"] == 20


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("examples", "batch", "advice"), [(12, 6, "batch_size=4 or less, or "), (2, 1, "")])
def test_fewer_leased_batches_than_workers_are_noted(
    world: str, examples: int, batch: int, advice: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def script(under: int = batch) -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        for (x,) in session.prepare(DataLoader(rows(examples), batch_size=under)):
            take(model, optimizer, x)

    assert run_in(world, script, strategy="async", workers=3)["samples"] == examples
    says = f"has 2 batches for 3 workers: under async some get none in an epoch; use {advice}--workers 2\n"
    assert capfd.readouterr().err.count(says) == 1
    run_in(world, script, strategy="async", workers=2)
    run_in(world, script, strategy="allreduce", workers=3)
    assert "some get none" not in capfd.readouterr().err


# --- means by examples ------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_borrowed_examples_do_not_count_in_a_mean(world: str, tmp_path: Path) -> None:
    """Batch by batch, and over an epoch, if the script counts by `session.count`."""

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        loader = session.prepare(DataLoader(rows(20), batch_size=4, drop_last=True))
        total, examples, means = 0.0, 0, []
        for (x,) in loader:
            take(model, optimizer, x)
            means.append(session.mean(x.mean().item(), weight=session.count(x)))
            total += x.mean().item() * session.count(x)
            examples += session.count(x)
        means.append(session.mean(total / max(1, examples), weight=examples))
        leave(tmp_path, session, means)

    run_in(world, script, strategy="allreduce", workers=3)
    for means in found_by(tmp_path, 3):
        assert means == [5.5, 15.5, 9.5]  # of 0 to 11, of 12 to 19, of all


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("each", [False, True], ids=["epoch", "batch"])
def test_a_weight_with_borrowed_examples_is_told(
    counts: bool, each: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays as it is: it may be a number of other examples."""

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        loader = session.prepare(DataLoader(rows(7), batch_size=2))
        for _ in range(2):
            examples = 0
            for (x,) in loader:
                take(model, optimizer, x)
                examples += session.count(x) if counts else len(x)
                if each:
                    session.mean(1.0, weight=session.count(x) if counts else len(x))
            session.mean(1.0, weight=examples)
        assert session.mean(float(session.rank), weight=1) == 1.0, "as large as the last batch"

    run_in("simulated", script, strategy="allreduce", workers=3)
    told = "".join(capsys.readouterr()).count("include examples that a worker has borrowed")
    assert told == (not counts), "once, although two workers have borrowed some, in two epochs"


def test_which_weights_include_borrowed_examples() -> None:
    counting = Counting()
    counting.mark("epoch")
    for examples, counts in [(4, True), (4, True), (3, False)]:
        counting.give(examples, counts)
    assert [weight for weight in range(20) if counting.includes_borrowed(weight)] == [3, 11]
    counting.mark("mean")
    counting.mark("epoch")
    counting.give(4, True)
    assert [weight for weight in range(20) if counting.includes_borrowed(weight)] == [15]
    assert counting.count("four") == 4 and not counting.includes_borrowed(15)


def test_a_single_process_counts_all_examples() -> None:
    session = pr.init()
    assert session.count([1, 2, 3]) == session.count(torch.zeros(3, 5)) == 3


# --- replacements -----------------------------------------------------------------------------------


def test_a_variable_that_an_empty_loop_leaves_unset_is_explained(tmp_path: Path) -> None:
    """A replacement runs past epochs without a batch."""

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        loader = session.prepare(DataLoader(rows(12), batch_size=2))
        for epoch in range(3):
            for (x,) in loader:
                take(model, optimizer, x)
                loss = x
            if epoch == 1 and session.rank == 1 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            session.log(loss=loss.mean())
            session.barrier()

    says = (
        "UnboundLocalError: .*'loss'.*replaces one that was lost, and gets no batch.*set the variable before"
    )
    with pytest.raises(PolyrhythmError, match=says):
        run_in("real", script, strategy="async", workers=2, restarts=1)


def test_other_name_errors_stay_as_they_are() -> None:
    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        for (x,) in session.prepare(DataLoader(rows(12), batch_size=2)):
            take(model, optimizer, x)
        print(undefined)  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(PolyrhythmError, match=r"name 'undefined' is not defined$"):
        run_in("simulated", script, strategy="async", workers=2)


@pytest.mark.parametrize("alone", [True, False])
def test_epochs_count_like_range(alone: bool) -> None:
    def script() -> None:
        session = pr.init()
        if not alone:
            _, optimizer = prepared(session)
            optimizer.step()
        assert list(session.epochs(3)) == [0, 1, 2]
        assert list(session.epochs(2, 5)) == [2, 3, 4] and not list(session.epochs(5, 5))

    script() if alone else run_in("simulated", script, workers=2)


# --- resuming ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce+topk:0.5", "async"])
def test_a_state_without_a_position_is_loaded_and_told(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        loader = session.prepare(DataLoader(rows(12), batch_size=2))
        state = session.state_dict()
        del state["data"]
        session.load_state_dict(state)
        for (x,) in loader:
            take(model, optimizer, x)

    summary = run_in("simulated", script, strategy=strategy, workers=2)
    assert summary["samples"] == 12
    assert "".join(capsys.readouterr()).count("without the position in the data") == 1


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_state_saved_before_training_has_numbers_of_each_worker(strategy: str, tmp_path: Path) -> None:
    """Workers that continue from it do not draw equal numbers."""

    def script() -> None:
        session = pr.init()
        prepared(session)
        path = tmp_path / f"state-{session.rank}.pt"
        if path.exists():
            session.load_state_dict(torch.load(path))
        else:
            torch.save(session.state_dict(), path)
        leave(tmp_path, session, torch.rand(2))

    run_in("simulated", script, strategy=strategy, workers=2)
    first = found_by(tmp_path, 2)
    run_in("simulated", script, strategy=strategy, workers=2)
    again = found_by(tmp_path, 2)
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_prepare_returns_one_thing_by_itself() -> None:
    """As Accelerate does; alone and in a run."""

    def script() -> None:
        session = pr.init()
        model, optimizer = prepared(session)
        loader, other = session.prepare(DataLoader(rows(8), 2)), session.prepare(evaluate=DataLoader(rows(8)))
        assert isinstance(loader, DataLoader) and isinstance(other, DataLoader)
        for (x,) in loader:
            take(model, optimizer, x)

    script()
    run_in("simulated", script, workers=2)
