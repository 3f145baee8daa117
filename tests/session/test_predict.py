"""`session.predict`: outputs in order, with the bits of a single process, under every strategy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import polyrhythm as pr
from polyrhythm.session.prediction.output_exchange import packed, unpacked
from polyrhythm.session.prediction.rounds import numbers, runs
from tests.support.combine import few
from tests.support.runs import run_in

EXAMPLES, BATCH = 107, 10  # 11 batches, of which the last has 7
PIPELINE = "pipeline:2,micro_batches=2"


class Examples(TensorDataset):
    """Random examples. `on_read` is called with the number of each that is read."""

    def __init__(
        self, examples: int = EXAMPLES, on_read: Callable[[int], None] = lambda number: None
    ) -> None:
        draw = torch.Generator().manual_seed(3)
        x, y = torch.randn(examples, 6, generator=draw), torch.randint(3, (examples,), generator=draw)
        super().__init__(x, y)
        self.on_read = on_read

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        self.on_read(number)
        return super().__getitem__(number)


class Stream(IterableDataset[Any]):
    """The same examples, one after another, and nobody knows how many."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(Examples()))


class Backwards(Sampler[list[int]]):
    """A batch sampler that says nothing about its length."""

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(EXAMPLES - 1, -1, -4):
            yield list(range(first, max(first - 4, -1), -1))


def unseen() -> DataLoader[Any]:
    return DataLoader(Examples(), BATCH)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 12), nn.Tanh(),
        nn.Linear(12, 3),
    )  # fmt: skip


@torch.no_grad()
def serially(model: nn.Module, loader: DataLoader[Any]) -> list[Tensor]:
    model.eval()
    return [model(x) for x, _ in loader]


class Program:
    """Trains, and calls a function; every worker leaves what that returned."""

    def __init__(self, folder: Path, after: Callable[[Any, nn.Module], Any]) -> None:
        self.folder, self.after = folder, after

    def __call__(self) -> None:
        session = pr.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(Examples(160), BATCH, True))
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found = self.after(session, model)
        session.barrier()
        if self.folder.is_dir():
            context = getattr(session, "_context", None)
            node = getattr(context, "worker_node", getattr(context, "node", session))
            torch.save(found, self.folder / f"{node.rank}.pt")

    def left(self) -> list[Any]:
        """What the workers have left, by rank."""
        return [torch.load(path, weights_only=True) for path in sorted(self.folder.glob("*.pt"))]


def predicts(session: Any, model: nn.Module) -> Any:
    """All forms of a prediction, what one process computes, and what should be as before."""
    states = torch.get_rng_state()
    joined = session.predict(unseen())
    one_by_one = list(session.predict(unseen(), stream=True))
    on_main = session.predict(unseen(), to="main")
    streamed_to_main = list(session.predict(unseen(), to="main", stream=True))
    stream = session.predict(DataLoader(Stream(), BATCH))
    backwards = session.predict(DataLoader(Examples(), batch_sampler=Backwards()))
    unchanged = torch.equal(states, torch.get_rng_state()) and model.training and torch.is_grad_enabled()
    consensus = session.consensus()
    session.barrier()
    serial = serially(consensus, unseen())
    back = serially(consensus, DataLoader(Examples(), batch_sampler=Backwards()))
    return joined, one_by_one, on_main, streamed_to_main, stream, backwards, serial, back, unchanged


def check(left: list[Any], first: int = 1) -> None:
    """`first`: how many workers hold the first model."""
    for place, found in enumerate(left):
        joined, one_by_one, on_main, to_main, stream, backwards, serial, back, unchanged = found
        assert unchanged
        assert torch.equal(joined, torch.cat(serial))
        assert torch.equal(stream, joined)
        assert torch.equal(backwards, torch.cat(back))
        assert [*map(len, one_by_one)] == [10] * 10 + [7]
        assert all(map(torch.equal, one_by_one, serial))
        if place < first:
            assert torch.equal(on_main, joined)
            assert all(map(torch.equal, to_main, serial))
        else:
            assert on_main is None
            assert to_main == []


RUNS = [
    ("real", "async", 2),
    ("real", PIPELINE, 2),
    ("simulated", "gossip", 8),
    ("simulated", f"local:2@{PIPELINE}", 4),
    *(("real", strategy, n) for strategy in ("allreduce", "local:3", "gossip") for n in (2, 3)),
    ("real", "async", 3),
    ("real", f"allreduce@{PIPELINE}", 4),
    *(("simulated", strategy, 8) for strategy in ("allreduce", "async", "local:3", f"async@{PIPELINE}")),
    *(("simulated", strategy, 3) for strategy in ("adpsgd", "broadcast", "hogwild", "easgd")),
]


@few("world, strategy, workers", RUNS, quick=2)
def test_outputs_are_those_of_one_process(world: str, strategy: str, workers: int, tmp_path: Path) -> None:
    program = Program(tmp_path, predicts)
    run_in(world, program, strategy=strategy, workers=workers)
    left = program.left()
    assert len(left) == workers
    check(left, first=2 if "@" in strategy or "pipeline" in strategy else 1)


@pytest.mark.slow
def test_a_divided_model_trains_on_after_a_prediction(tmp_path: Path) -> None:
    """Under `local` the model that predicts is not the one that trains: a prediction changes nothing."""

    def after(session: Any, model: nn.Module) -> Any:
        return [each.detach().clone() for each in model.parameters() if not each.is_meta]

    def predict_first(session: Any, model: nn.Module) -> Any:
        batches = session.predict(unseen(), stream=True)
        next(batches)
        during = after(session, model)
        assert len(list(batches)) == 10
        assert all(map(torch.equal, during, after(session, model)))
        return during

    found = []
    for number, each in enumerate((after, predict_first)):
        folder = tmp_path / str(number)
        folder.mkdir()
        program = Program(folder, each)
        run_in("simulated", program, strategy=f"local:3@{PIPELINE}", workers=4)
        found.append(program.left())
    assert all(all(map(torch.equal, *pair)) for pair in zip(*found, strict=True))


def test_alone(tmp_path: Path) -> None:
    program = Program(tmp_path, predicts)
    program()
    check(program.left())


def test_a_fast_worker_takes_more(tmp_path: Path) -> None:
    """And every batch is computed once."""

    def after(session: Any, model: nn.Module) -> Any:
        read: list[int] = []
        session.predict(DataLoader(Examples(400, read.append), 4))
        return read

    program = Program(tmp_path, after)
    speeds = '[[hosts]]\ncount = 1\nspeed = 4.0\n[[hosts]]\nstep_time = "10 ms"'
    run_in("simulated", program, strategy="allreduce", workers=3, cluster=speeds)
    fast, *slow = program.left()
    assert sorted([*fast, *slow[0], *slow[1]]) == [*range(400)]
    assert len(fast) > 2 * max(map(len, slow))


class Dying:
    """Ends worker 1 when it has read a batch and a half. The others wait for that in their first batch."""

    def __init__(self, folder: Path) -> None:
        self._file, self._read = folder / "dying", 0

    def predict(self, session: Any) -> Any:
        def on_read(number: int) -> None:
            self._read += 1
            if session.rank == 1 and self._read > 1.5 * BATCH and not self._file.exists():
                self._file.touch()
                os._exit(9)
            while session.rank != 1 and not self._file.exists():
                time.sleep(0.001)

        return session.predict(DataLoader(Examples(on_read=on_read), BATCH))


@few("strategy", ["gossip", "async"], quick=1)
def test_batches_of_a_dead_worker_are_done_by_others(strategy: str, tmp_path: Path) -> None:
    def after(session: Any, model: nn.Module) -> Any:
        session.barrier()
        serial = torch.cat(serially(session.consensus(), unseen()))
        return Dying(tmp_path).predict(session), serial

    program = Program(tmp_path, after)
    summary = run_in("real", program, strategy=strategy, workers=3)
    assert [*summary["lost"]] == ["worker 1"]
    left = program.left()
    assert len(left) == 2
    assert all(torch.equal(found, serial) for found, serial in left)


def test_a_replacement_computes_what_it_has_missed(tmp_path: Path) -> None:
    """Worker 1 dies after the others have got the first of two predictions."""

    def after(session: Any, model: nn.Module) -> Any:
        return session.predict(unseen()), Dying(tmp_path).predict(session)

    program = Program(tmp_path, after)
    summary = run_in("real", program, strategy="async", workers=3, restarts=1)
    assert summary["replaced"] == {"worker 1": 1}
    left = program.left()
    assert len(left) == 3
    for first, second in left:
        assert torch.equal(first, left[0][0])
        assert torch.equal(second, first)


def test_a_dead_worker_ends_a_run_that_cannot_do_without(tmp_path: Path) -> None:
    program = Program(tmp_path, lambda session, model: Dying(tmp_path).predict(session))
    with pytest.raises(pr.PolyrhythmError, match=r"worker 1 .*under allreduce no worker can continue"):
        run_in("real", program, strategy="allreduce", workers=2)


# --- outputs and inputs -----------------------------------------------------------------------------


class Returns(nn.Module):
    """Returns what a function makes of its inputs."""

    def __init__(self, made: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(6, 2), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.linear(x))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(x) * scale + shift[:, None]


def session_with(model: nn.Module) -> Any:
    session = pr.init()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return session


def test_outputs_may_be_tuples_and_dicts(tmp_path: Path) -> None:
    def made(y: Tensor) -> Any:
        return {"y": y, "pair": (y.argmax(1), [y > 0]), "half": y.bfloat16(), "none": None}

    def main() -> None:
        torch.manual_seed(0)
        session = session_with(Returns(made))
        found = session.predict(unseen())
        outputs = list(session.predict(unseen(), stream=True))
        torch.save((found, outputs), tmp_path / f"{session.rank}.pt")

    run_in("simulated", main, workers=3)
    torch.manual_seed(0)
    model, x = Returns(lambda y: y), Examples().tensors[0]
    with torch.no_grad():
        whole = torch.cat([model(part) for part in x.split(BATCH)])
    for rank in range(3):
        found, outputs = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(found["y"], whole)
        assert torch.equal(found["pair"][0], whole.argmax(1))
        assert torch.equal(found["pair"][1][0], whole > 0)
        assert torch.equal(found["half"], whole.bfloat16())
        assert found["none"] is None
        assert torch.equal(outputs[10]["y"], whole[100:])


def test_the_model_gets_what_its_forward_needs() -> None:
    model = TwoInputs()
    session = session_with(model)
    x, y = Examples().tensors
    expected = torch.cat([model(*part) for part in zip(x.split(4), y.split(4), strict=True)])
    assert torch.equal(session.predict(DataLoader(TensorDataset(x, y), 4)), expected)
    assert torch.equal(session.predict(DataLoader(TensorDataset(x, y, y), 4)), expected)
    rows = [{"x": a, "shift": b, "label": b} for a, b in zip(x, y, strict=True)]
    assert torch.equal(session.predict(DataLoader(rows, 4)), expected)
    found = session.predict(DataLoader(rows, 4), inputs=lambda batch: (batch["x"], batch["shift"], 2.0))
    assert torch.equal(
        found, torch.cat([model(*part, 2.0) for part in zip(x.split(4), y.split(4), strict=True)])
    )


def test_modes_are_restored_after_an_error() -> None:
    def fails(y: Tensor) -> Tensor:
        raise ZeroDivisionError

    model = Returns(fails)
    session = session_with(model)
    model.linear.eval()
    with pytest.raises(ZeroDivisionError):
        session.predict(unseen())
    assert model.training
    assert not model.linear.training
    assert torch.is_grad_enabled()


def test_outputs_travel_as_bytes() -> None:
    outputs = {
        3: {"x": torch.randn(2, 3), "flags": torch.tensor([True, False])},
        10: (torch.tensor([1 + 2j]).conj(), torch.empty(0, 4), torch.arange(6).view(2, 3).T, None),
    }
    found = unpacked(packed(outputs))
    assert torch.equal(found[3]["x"], outputs[3]["x"])  # type: ignore[call-overload, index]
    assert torch.equal(found[3]["flags"], outputs[3]["flags"])  # type: ignore[call-overload, index]
    assert all(map(torch.equal, found[10][:3], outputs[10][:3]))  # type: ignore[index]
    with pytest.raises(pr.WireError, match="not the outputs of a worker"):
        unpacked(packed(outputs)[:-3])


def test_runs_of_numbers() -> None:
    assert runs([0, 1, 2, 5, 7, 8]) == [[0, 3], [5, 1], [7, 2]]
    assert [*numbers(runs([0, 1, 2, 5, 7, 8]))] == [0, 1, 2, 5, 7, 8]


# --- wrong uses -------------------------------------------------------------------------------------

SHUFFLED = DataLoader(Examples(), BATCH, shuffle=True)
WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda session: session.predict(SHUFFLED), "this one shuffles.*shuffle=False"),
    (lambda session: session.predict(Examples()), "takes a DataLoader, not Examples"),
    (lambda session: session.predict(unseen(), to="rank1"), "to 'all' workers or to 'main', not to 'rank1'"),
    (lambda session: session.predict(DataLoader(Examples(0), BATCH)), "got no batch from the loader"),
]


@pytest.mark.parametrize("use, why", WRONG, ids=lambda each: each if isinstance(each, str) else "")
def test_wrong_loaders(use: Callable[[Any], Any], why: str) -> None:
    with pytest.raises(pr.UsageError, match=why):
        use(session_with(network()))


OUTPUTS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda y: y.sum(), "output is a single number for a batch of 10 examples"),
    (lambda y: {"a": (y.T,)}, r"output.a.0 has shape \[2, 10\] for a batch of 10 examples"),
    (lambda y: [3.5], r"the output\[0\] is of type float: wrap the model"),
    (lambda y: y[:, : int(len(y) > 7) + 1], "one batch and .* in another.*stream=True"),
    (lambda y: (y,) * (1 + int(len(y) > 7)), "differs between batches in its type or its keys"),
]


@pytest.mark.parametrize("made, why", OUTPUTS, ids=lambda each: each if isinstance(each, str) else "")
def test_outputs_that_cannot_be_joined(made: Callable[[Tensor], Any], why: str) -> None:
    with pytest.raises(pr.UsageError, match=why):
        session_with(Returns(made)).predict(unseen())


def test_other_wrong_uses() -> None:
    with pytest.raises(pr.UsageError, match=r"call session.prepare\(.*before session.predict"):
        pr.init().predict(unseen())
    first, second = nn.Linear(6, 2), nn.Linear(6, 2)
    session = pr.init()
    session.prepare(first, second, torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    with pytest.raises(pr.UsageError, match=r"by one model, and session.prepare.. got 2"):
        session.predict(unseen())


def test_workers_must_predict_the_same(tmp_path: Path) -> None:
    def after(session: Any, model: nn.Module) -> Any:
        return session.predict(DataLoader(Examples(), BATCH + session.rank))

    with pytest.raises(pr.UsageError, match=r"worker 1 predicts on .* but worker 0 on .*: all workers must"):
        run_in("simulated", Program(tmp_path, after), workers=2)


def test_models_of_different_statistics_are_not_mixed(tmp_path: Path) -> None:
    program = Program(tmp_path, lambda session, model: session.predict(unseen()))
    with pytest.raises(pr.PolyrhythmError, match=r"workers 0 and 1 have different models.*batch_norm=local"):
        run_in("simulated", program, workers=2, batch_norm="local")
