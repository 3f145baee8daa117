"""What scripts do with loaders besides training: look, evaluate, stop, resume, sample without an end."""

from __future__ import annotations

import contextlib
import copy
import itertools
import queue
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import polyrhythm as pr
from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.session.order import order_of
from tests.support.combine import each_value
from tests.support.programs import CLASSES, FEATURES, SPEEDS, Examples, mlp
from tests.support.runs import WORLDS, run_in

LOCKSTEP, LEASED = ["allreduce", "local:3", "sync", "gossip"], ["async", "adpsgd"]
STRATEGIES = [*LOCKSTEP, *LEASED]


class Numbered(Dataset[tuple[torch.Tensor, int]]):
    """Example i is i and something to train on."""

    def __init__(self, size: int) -> None:
        self.data = Examples(size)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return (*self.data[index], index)


class Stream(IterableDataset[Any]):
    """The same as a stream, in an order of its own."""

    def __init__(self, size: int) -> None:
        self.data = Numbered(size)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[int(index)] for index in np.random.permutation(len(self.data)))


@dataclass
class Loop:
    """A script; `extra(session, model, loader, step)` is called before training and, with steps, in it.

    Each worker leaves in `seen` the examples that it has trained on, by epoch. With `stop` it saves after so
    many steps; with `resume` it continues from what was saved.
    """

    folder: Path
    loader: Callable[[], DataLoader[Any]] = lambda: DataLoader(Numbered(36), batch_size=2, shuffle=True)
    epochs: int = 2
    stop: int = -1
    resume: bool = False
    extra: Callable[[Any, Any, Any, int], Any] = lambda session, model, loader, step: None
    dropout: float = 0.0
    seen: dict[int, list[list[int]]] = field(default_factory=dict)

    def __call__(self) -> None:
        session = pr.init()
        model = nn.Sequential(mlp(), nn.Dropout(self.dropout), nn.Linear(CLASSES, CLASSES).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = self.folder / f"{session.rank}.pt"
        saved = torch.load(path, weights_only=True) if self.resume and path.exists() else None
        if saved:
            model.load_state_dict(saved["model"])
        model, optimizer, loader = session.prepare(model, optimizer, self.loader())
        steps, first = 0, 0
        if saved:
            session.load_state_dict(saved["session"])
            steps, first = saved["steps"], saved["epoch"]
        self.extra(session, model, loader, 0)
        trained: list[list[int]] = []
        for epoch in range(first, self.epochs):
            trained.append([])
            for x, y, indexes in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
                trained[-1] += indexes.tolist()
                self.extra(session, model, loader, steps)
                if steps == self.stop and not self.resume:
                    state = {"model": model.state_dict(), "epoch": epoch, "steps": steps}
                    torch.save({**copy.deepcopy(state), "session": session.state_dict()}, path)
        self.seen[session.rank] = trained
        torch.save(trained, self.folder / f"trained-{session.rank}{'-resumed' * self.resume}.pt")

    def examples(self, world: str, strategy: str, workers: int = 3, **options: Any) -> list[Counter[int]]:
        """Runs, and counts how often each example was trained on in each epoch, borrowed ones excepted."""
        summary = run_in(world, self, strategy=strategy, workers=workers, **options)
        resumed = "-resumed" * self.resume
        epochs: list[Counter[int]] = [Counter() for _ in range(self.epochs)]
        for rank in range(workers):
            trained = torch.load(self.folder / f"trained-{rank}{resumed}.pt")
            for counter, indexes in zip(reversed(epochs), reversed(trained), strict=False):
                counter.update(indexes)
        self.digest = summary["digest"]
        self.samples = summary["samples"]
        return epochs


EACH = Counter(range(36))


# --- looking ----------------------------------------------------------------------------------------


def look(ranks: set[int], count: int = 1) -> Callable[..., None]:
    def extra(session: Any, model: Any, loader: Any, step: int) -> None:
        if step == 0 and session.rank in ranks:
            for _ in itertools.islice(loader, count):
                pass

    return extra


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [{0}, {0, 1, 2}], ids=["one", "all"])
def test_looking_at_batches_changes_nothing(strategy: str, ranks: set[int], tmp_path: Path) -> None:
    """On one rank or on all: no example is lost or trained twice, and lockstep has the same bits."""
    plain = Loop(tmp_path)
    assert plain.examples("simulated", strategy) == [EACH, EACH]
    looking = Loop(tmp_path, extra=look(ranks, 3))
    assert looking.examples("simulated", strategy) == [EACH, EACH]
    assert looking.samples == plain.samples == 72
    if strategy in LOCKSTEP:
        assert looking.digest == plain.digest


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_one_rank_may_look_on_real_processes(strategy: str, tmp_path: Path) -> None:
    assert Loop(tmp_path, extra=look({1})).examples("real", strategy, workers=2) == [EACH, EACH]


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_new_iteration_for_each_step_trains_on_new_batches(strategy: str, tmp_path: Path) -> None:
    """`next(iter(loader))` in every step is not looking, if the script trains on what it gets."""
    seen: list[list[int]] = []

    def extra(session: Any, model: Any, loader: Any, step: int) -> None:
        for _ in range(4):
            x, y, indexes = next(iter(loader))
            seen.append(indexes.tolist())
            F.cross_entropy(model(x), y).backward()

    Loop(tmp_path, extra=extra, epochs=0).examples("simulated", strategy, workers=2)
    assert len({str(batch) for batch in seen}) == 8


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_two_iterations_at_a_time_are_refused(strategy: str, tmp_path: Path) -> None:
    def both(session: Any, model: Any, loader: Any, step: int) -> None:
        for _ in zip(loader, loader, strict=True):
            pass

    with pytest.raises(UsageError, match=r"one iteration at a time.*make a second DataLoader"):
        Loop(tmp_path, extra=both).examples("simulated", strategy)


# --- evaluating -------------------------------------------------------------------------------------


def under_no_grad(session: Any, model: Any, loader: Any, step: int) -> None:
    if step == 0:
        with torch.no_grad():
            for _ in loader:
                pass


def in_eval_mode(session: Any, model: Any, loader: Any, step: int) -> None:
    if step == 1:
        model.eval()
        for x, _, _ in loader:
            with torch.no_grad():
                model(x)


@pytest.mark.parametrize("strategy", ["allreduce", "async", "gossip"])
@pytest.mark.parametrize("evaluate", [under_no_grad, in_eval_mode])
def test_evaluating_on_a_training_loader_is_refused(strategy: str, evaluate: Any, tmp_path: Path) -> None:
    """Before training, or in an epoch: each worker would see only a part, under async maybe none."""
    with pytest.raises(UsageError, match=r"used to evaluate: pass it as session.prepare\(..., evaluate"):
        Loop(tmp_path, extra=evaluate).examples("simulated", strategy)


def test_reading_all_training_data_without_training_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(session: Any, model: Any, loader: Any, step: int) -> None:
        if step == 0:
            sum(x.sum() for x, _, _ in loader)

    Loop(tmp_path, extra=read).examples("simulated", "allreduce")
    assert "read to its end without a backward pass" in "".join(capsys.readouterr())


@pytest.mark.parametrize("world", WORLDS)
def test_evaluation_loaders_give_each_example_to_one_worker(world: str, tmp_path: Path) -> None:
    """Shuffled or not, for any number of iterations on any worker, also at once, and from a stream."""

    def script() -> None:
        session = pr.init()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = [
            DataLoader(Numbered(25), batch_size=3),
            DataLoader(Numbered(25), batch_size=3, shuffle=True),
            DataLoader(Stream(25), batch_size=3),
        ]
        train = DataLoader(Numbered(8), batch_size=2)
        model, optimizer, train, *given = session.prepare(model, optimizer, train, evaluate=loaders)
        for x, y, _ in train:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        for loader in given:
            for _ in range(session.rank):
                next(iter(loader))
        with torch.no_grad():
            found = [[indexes.tolist() for _, _, indexes in loader] for loader in given]
            assert all(isinstance(loader, DataLoader) for loader in (train, *given))
        assert [len(batches) for batches in found[:2]] == [len(loader) for loader in given[:2]]
        torch.save(found, tmp_path / f"{session.rank}.pt")

    run_in(world, script, strategy="async", workers=2)
    for each in zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True):
        seen = [index for batches in each for batch in batches for index in batch]
        assert sorted(seen) == list(range(25))


def test_what_to_evaluate_on_must_be_a_loader() -> None:
    with pytest.raises(UsageError, match=r"evaluate=...\) takes DataLoaders, not Linear"):
        pr.init().prepare(mlp(), evaluate=[nn.Linear(1, 1)])


# --- stopping and resuming --------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [2, 6, 8], ids=["within", "at the end", "later"])
@pytest.mark.parametrize("strategy", [*LOCKSTEP, "async"])
def test_a_run_resumes_in_the_middle_of_an_epoch(strategy: str, stop: int, tmp_path: Path) -> None:
    """With dropout and a shuffle: the bits of the run that went on, and each example once per epoch."""
    options: dict[str, Any] = {"cluster": SPEEDS["constant"]} if strategy == "async" else {}
    whole = Loop(tmp_path, stop=stop, dropout=0.3, epochs=3)
    assert whole.examples("simulated", strategy, **options) == [EACH] * 3
    resumed = Loop(tmp_path, resume=True, dropout=0.3, epochs=3)
    resumed.examples("simulated", strategy, **options)
    assert resumed.digest == whole.digest
    for rank, trained in resumed.seen.items():
        rest = list(itertools.chain(*trained))
        assert list(itertools.chain(*whole.seen[rank]))[-len(rest) :] == rest


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_real_run_resumes_in_the_middle_of_an_epoch(strategy: str, tmp_path: Path) -> None:
    """In lockstep with the same bits; elsewhere each example is trained on once."""
    whole = Loop(tmp_path, stop=2, dropout=0.3)
    before = whole.examples("real", strategy, workers=2)
    resumed = Loop(tmp_path, resume=True, dropout=0.3)
    after = resumed.examples("real", strategy, workers=2)
    assert before == [EACH, EACH] and after[-1] == EACH
    if strategy == "allreduce":
        assert resumed.digest == whole.digest
    assert not after[0] - EACH and after[0].total() <= 36 - 2 * 2 * 2


def test_a_worker_that_does_not_load_its_position_is_named(tmp_path: Path) -> None:
    """Where batches are leased, it would take what others have trained on."""
    Loop(tmp_path, stop=2).examples("simulated", "async")
    (tmp_path / "1.pt").unlink()
    with pytest.raises(PolyrhythmError, match="continues from a saved state, but worker 1 does not"):
        Loop(tmp_path, resume=True).examples("simulated", "async")


def test_workers_in_lockstep_must_resume_from_the_same_step(tmp_path: Path) -> None:
    Loop(tmp_path, stop=2).examples("simulated", "allreduce")
    one = (tmp_path / "1.pt").read_bytes()
    Loop(tmp_path, stop=3).examples("simulated", "allreduce")
    (tmp_path / "1.pt").write_bytes(one)
    with pytest.raises(PolyrhythmError, match="worker 1 resumed from batch 2 of epoch 0, but worker 0 from"):
        Loop(tmp_path, resume=True).examples("simulated", "allreduce")


# --- samplers and streams ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "async"])
def test_endless_samplers_are_drawn_as_they_are_needed(strategy: str, tmp_path: Path) -> None:
    """Ten billion examples: `len` is known, and a few steps are quick."""
    data = Numbered(36)

    def endless() -> DataLoader[Any]:
        return DataLoader(data, batch_size=2, sampler=RandomSampler(data, True, num_samples=10**10))

    def script() -> None:
        session = pr.init()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = session.prepare(model, optimizer, endless())
        assert len(loader) == 10**10 // 4
        seen = []
        for x, y, indexes in itertools.islice(loader, 5):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen.append(indexes.tolist())
        drawn[session.rank] = seen

    drawn: dict[int, list[list[int]]] = {}
    run_in("simulated", script, strategy=strategy, workers=2)
    assert len({str(batch) for batches in drawn.values() for batch in batches}) == 10


def test_len_does_not_draw_the_next_epoch(tmp_path: Path) -> None:
    """Weights that change between epochs count."""
    weights = [1.0] + [0.0] * 7

    def weighted() -> DataLoader[Any]:
        sampler = WeightedRandomSampler(list(weights), 8)
        return DataLoader(Numbered(8), batch_size=2, sampler=sampler)

    def script() -> None:
        session = pr.init()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = session.prepare(model, optimizer, weighted())
        for epoch in range(2):
            assert len(loader) == 2
            next(iter(loader))
            loader.sampler.weights = torch.eye(8)[epoch]
            for x, y, indexes in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                assert indexes.tolist() == [epoch, epoch]

    run_in("simulated", script, strategy="allreduce", workers=2)


@pytest.mark.parametrize("strategy", [*LOCKSTEP, "async"])
@pytest.mark.parametrize("batch", [2, 5])
def test_streams_are_shared_by_batches(strategy: str, batch: int, tmp_path: Path) -> None:
    """Every worker reads the stream and takes its share: what counts is each example once per epoch."""
    loop = Loop(tmp_path, loader=lambda: DataLoader(Stream(36), batch_size=batch))
    epochs = loop.examples("simulated", strategy)
    assert loop.samples == 72
    assert all(set(epoch) == set(EACH) for epoch in epochs)
    if strategy == "async":
        assert epochs == [EACH, EACH]


@pytest.mark.parametrize("loaders", [0, 2])
def test_streams_are_shared_on_real_processes(loaders: int, tmp_path: Path) -> None:
    loop = Loop(tmp_path, loader=lambda: DataLoader(Split(36), batch_size=3, num_workers=loaders))
    assert loop.examples("real", "allreduce", workers=2) == [EACH, EACH]


class Split(Stream):
    """A stream that the processes of a loader divide among themselves."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.islice(super().__iter__() if info is None else self.plain(), first, None, step)

    def plain(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


class Private(torch.utils.data.Sampler[int]):
    """A sampler whose numbers are its own on each worker."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.permutation(36).tolist())

    def __len__(self) -> int:
        return 36


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_workers_that_draw_different_orders_are_named(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(PolyrhythmError, match="draw different orders of the data in epoch 0: a sampler must"):
        Loop(tmp_path, loader=lambda: DataLoader(Numbered(36), 2, sampler=Private())).examples(
            "simulated", strategy
        )


def test_a_distributed_sampler_is_refused(tmp_path: Path) -> None:
    def divided() -> DataLoader[Any]:
        data = Numbered(36)
        return DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=3, rank=0))

    with pytest.raises(UsageError, match=r"has a DistributedSampler.*use shuffle=True"):
        Loop(tmp_path, loader=divided).examples("simulated", "allreduce")


# --- steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "sync", "local:8", "gossip", "push", "noloco:4"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_ends_early_in_lockstep_is_named(strategy: str, rank: int) -> None:
    with pytest.raises(PolyrhythmError, match=f"worker {rank} ended after 2 steps, but worker . is at step"):
        run_in("simulated", leaves(rank), strategy=strategy)


@pytest.mark.parametrize("strategy", ["sync", "push"])
def test_a_real_worker_that_ends_early_in_lockstep_is_named(strategy: str) -> None:
    with pytest.raises(UsageError, match=r"worker 1 ended after 2 steps.*or use async"):
        run_in("real", leaves(1), strategy=strategy)


def leaves(rank: int) -> Callable[[], None]:
    """A script that one worker leaves after two steps."""

    def script() -> None:
        session = pr.init()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Examples(48), batch_size=4)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for step, (x, y) in enumerate(loader):
            if session.rank == rank and step == 2:
                return
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return script


def test_every_worker_has_a_batch_in_each_epoch_however_slow_it_is(tmp_path: Path) -> None:
    """A script may use the last loss after its loop."""
    loop = Loop(tmp_path, epochs=4)
    assert loop.examples("simulated", "async", cluster=SPEEDS["heterogeneous"]) == [EACH] * 4
    assert all(len(epoch) for trained in loop.seen.values() for epoch in trained)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_without_a_loader_is_told_so(workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    def script() -> None:
        session = pr.init()
        model = nn.Linear(FEATURES, CLASSES)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.step()

    run_in("simulated", script, workers=workers)
    told = "".join(capsys.readouterr()).count("all workers train on the same batches")
    assert told == (workers > 1)


def test_two_shuffled_loaders_of_one_dataset_have_different_orders() -> None:
    def main() -> None:
        session = pr.init()
        model = nn.Linear(1, 1)
        one, other = (DataLoader(TensorDataset(torch.arange(64.0)[:, None]), 2, shuffle=True) for _ in "ab")
        model, optimizer, one, other = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.0), one, other
        )
        equal = 0
        for (x,), (y,) in zip(one, other, strict=True):
            equal += int((x == y).sum())
            model(x + y).sum().backward()
            optimizer.step()
        assert equal < 8

    pr.simulate(main, workers=2, strategy="allreduce")


def test_a_loader_with_an_iter_of_its_own_is_refused() -> None:
    class Scaled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return ((x / 2,) for (x,) in super().__iter__())

    def main() -> None:
        model = nn.Linear(1, 1)
        loader = Scaled(TensorDataset(torch.ones(8, 1)))
        pr.init().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    with pytest.raises(UsageError, match=r"Scaled has an __iter__ of its own.*collate_fn"):
        pr.simulate(main, workers=2, strategy="async")


@pytest.mark.parametrize(
    ("per_batch", "assigned", "says"),
    [(True, True, "StepLR is stepped once per batch"), (False, False, "use what prepare\\(\\) returns")],
)
def test_what_a_script_forgets_is_noted(
    per_batch: bool, assigned: bool, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        session = pr.init()
        model = nn.Linear(1, 1)
        loader = DataLoader(TensorDataset(torch.ones(16, 1)), 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, shared = session.prepare(model, optimizer, loader)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        for _ in range(2):
            for (x,) in shared if assigned else DataLoader(loader.dataset, 2):
                model(x).sum().backward()
                optimizer.step()
                if per_batch:
                    scheduler.step()
            if not per_batch:
                scheduler.step()

    pr.simulate(main, workers=2, strategy="allreduce")
    noted = capfd.readouterr().err
    assert re.search(says, noted) and noted.count("once per batch") == per_batch


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_loader_that_is_read_without_training_is_noted_once_by_any_worker(
    world: str, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if worker 0 gets none of its batches."""

    def main() -> None:
        session = pr.init()
        model: Any = nn.Linear(2, 1)
        batches, second = (DataLoader(TensorDataset(torch.randn(rows, 2)), batch_size=2) for rows in (24, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader, other = session.prepare(model, optimizer, batches, second)
        for _ in range(2):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            if session.rank:
                list(other)
            session.barrier()

    run_in(world, main, strategy=strategy, workers=3)
    assert capfd.readouterr().err.count("read to its end without a backward pass") == 1


@pytest.mark.parametrize("strategy", ["gossip", "push", "noloco:4"])
def test_the_length_of_a_loader_follows_the_workers_that_share_the_epoch(strategy: str) -> None:
    """A worker dies in the first epoch: in the next ones the others get longer shares, and `len` says so."""
    lengths: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}

    def main() -> None:
        session = pr.init()
        model: Any = nn.Linear(2, 1)
        loader: Any = DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in range(3):
            steps = 0
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                steps += 1
            lengths[session.rank].append((steps, len(loader)))

    cluster = '[[hosts]]\nstep_time = "10 ms"\n[[failures]]\nworkers = [1]\nat = "25 ms"\n'
    run_in("simulated", main, strategy=strategy, workers=3, cluster=cluster)
    assert lengths == {0: [(4, 4), (6, 6), (6, 6)], 1: [], 2: [(4, 4), (6, 6), (6, 6)]}


def test_a_loader_that_a_thread_reads_in_simulation_is_told_at_once() -> None:
    """The script waits for its thread, which cannot wait for other workers; on real processes it can."""

    def main() -> None:
        session = pr.init()
        model: Any = nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        loader: Any = DataLoader(TensorDataset(torch.randn(26, 2)), batch_size=2)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        batches: queue.Queue[Any] = queue.Queue(2)

        def read() -> None:
            with contextlib.suppress(pr.PolyrhythmError):
                for (x,) in loader:
                    batches.put(x)
                batches.put(None)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        while (x := batches.get()) is not None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        reader.join()

    for strategy in ("allreduce", "async"):
        run_in("real", main, strategy=strategy, workers=2)
    for handler in (signal.default_int_handler, lambda *_: None):  # the script's own does not matter
        before = signal.signal(signal.SIGINT, handler)
        with pytest.raises(UsageError, match=r"a thread of the script reads a prepared.* polyrhythm run"):
            run_in("simulated", main, strategy="async", workers=2)
        signal.signal(signal.SIGINT, before)


class Divided(IterableDataset[Any]):
    """Numbers of which each worker reads a part, or all read all."""

    def __init__(self, start: int, step: int) -> None:
        self.numbers = range(start, 40, step)

    def __iter__(self) -> Iterator[Any]:
        return (torch.full((2,), float(number)) for number in self.numbers)


@each_value(("world", WORLDS), ("strategy", ["allreduce", "async"]), ("divides", [False, True]))
def test_a_stream_that_divides_itself_is_told_once(
    world: str, strategy: str, divides: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """`prepare` would divide each part again, and most of the data would be lost."""

    def main() -> None:
        session = pr.init()
        model: Any = nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
        data = Divided(session.rank, session.workers) if divides else Divided(0, 1)
        loader: Any = DataLoader(data, batch_size=2)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in range(2):
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    run_in(world, main, strategy=strategy, workers=2)
    assert capfd.readouterr().err.count("divides itself by rank") == divides


def test_a_stream_of_any_tensors_is_compared() -> None:
    """Views that are conjugated when they are read, nested and sparse ones, and other objects."""
    z = torch.ones(2, dtype=torch.complex64)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    batch = [z.conj(), z.conj().imag, nested, torch.eye(2).to_sparse(), "text", 3, object(), None]

    def digest(value: Any) -> str:
        data: Any = [value]
        loader: Any = DataLoader(Streamed(data), batch_size=None)
        return order_of(loader, 0).digest(0)

    assert digest(batch) == digest([*batch[:6], object(), None])
    assert digest(batch) != digest([z, *batch[1:]][::-1]) and digest([1.0]) != digest([2.0])


class Streamed(IterableDataset[Any]):
    def __init__(self, values: Any) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)
