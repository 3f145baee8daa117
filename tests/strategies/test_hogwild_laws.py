"""The laws of HogWild!: equality with one worker, lost updates, saving, and workers that die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from benchmarks.sparse import Logistic
from polyrhythm.core.errors import NotFinite, PolyrhythmError, UsageError
from polyrhythm.model.replica import Replica
from polyrhythm.session.seeds import mix
from polyrhythm.strategies.hogwild.checks import check_devices
from polyrhythm.strategies.hogwild.strategy import HogWildWorker
from tests.support.combine import each_value
from tests.support.programs import SPEEDS, events, same, trained
from tests.support.runs import run_hogwild, run_in
from tests.support.saving import CLUSTERS, Stopping, saved_states, went_on_and_resumed

both_worlds = pytest.mark.parametrize("world", ["simulated", "real"])


# --- the same bits as one worker --------------------------------------------------------------------


class Parts(nn.Module):
    """A table in which each worker has its own rows, and a dense vector for each worker."""

    def __init__(self, workers: int, rows: int = 40) -> None:
        super().__init__()
        self.rows = rows
        self.table = nn.Embedding(workers * rows, 3, sparse=True)
        self.dense = nn.ParameterList(nn.Parameter(torch.ones(50)) for _ in range(workers))

    def forward(self, rank: int, chosen: Tensor) -> Tensor:
        hidden = self.table(rank * self.rows + chosen).sum(0)
        return (hidden.sum() * self.dense[rank]).square().sum()


@dataclass
class Disjoint:
    """Each worker takes `count` steps on its own parameters; alone, one worker takes them for all in turn."""

    workers: int
    count: int
    seed: int

    def __call__(self) -> nn.Module:
        session = pr.init()
        alone = session.strategy is None
        model = Parts(self.workers)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        for rank in range(self.workers) if alone else [session.rank]:
            generator = torch.Generator().manual_seed(1000 * self.seed + rank)
            for _ in range(self.count):
                optimizer.zero_grad()
                model(rank, torch.randint(model.rows, (5,), generator=generator)).backward()
                optimizer.step()
        return model


def serial(script: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(mix("model", seed))
    return dict(script().state_dict())


@each_value(("world", ["simulated", "real"]), ("seed", range(4)))
def test_disjoint_supports_give_the_bits_of_one_worker(world: str, seed: int, tmp_path: Path) -> None:
    """If no two workers touch the same element, the order of steps does not matter."""
    script = Disjoint(workers=3, count=150, seed=seed)
    summary = run_hogwild(script, world, 3, tmp_path, seed=seed)
    assert same(trained(summary), serial(script, seed))
    assert summary["lost_updates"] == {"counted": 3 * 150 * (5 + 50), "lost": 0, "share": 0.0}


class Bag(nn.Module):
    """A sparse table, followed by a dense layer."""

    def __init__(self, rows: int = 100) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def grouped(model: Bag) -> torch.optim.Optimizer:
    """Dense parameters may have momentum and weight decay."""
    head = {"params": model.head.parameters(), "momentum": 0.9, "weight_decay": 0.01}
    return torch.optim.SGD([{"params": model.table.parameters()}, head], lr=0.1)


def sparse_adam(model: Bag) -> torch.optim.Optimizer:
    """The dense parameters are frozen."""
    model.head.requires_grad_(False)
    return torch.optim.SparseAdam(model.table.parameters(), lr=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "groups": grouped,
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "sparse adam": sparse_adam,
}


@dataclass
class Bags:
    """Trains a `Bag` with a named optimizer; a step may accumulate several backward passes."""

    optimizer: str = "sgd"
    accumulate: int = 1
    set_to_none: bool = True
    size: int = 96

    def __call__(self) -> nn.Module:
        session = pr.init()
        model = Bag()
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(100, (self.size, 6), generator=generator)
        loader = DataLoader(TensorDataset(x, (x.sum(1) > 300).long()), batch_size=4)
        model, optimizer, loader = session.prepare(model, OPTIMIZERS[self.optimizer](model), loader)
        for _ in range(2):
            for number, (x, y) in enumerate(loader, 1):
                F.cross_entropy(model(x), y).backward()
                assert model.table.weight.grad.is_sparse
                if number % self.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=self.set_to_none)
        return model


@each_value(
    ("world", ["simulated", "real"]), ("optimizer", OPTIMIZERS), ("strategy", ["hogwild", "hogwild:lock=yes"])
)
def test_hogwild_with_one_worker_is_plain_pytorch(
    world: str, optimizer: str, strategy: str, tmp_path: Path
) -> None:
    script = Bags(optimizer)
    summary = run_hogwild(script, world, 1, tmp_path, strategy)
    assert same(trained(summary), serial(script))
    assert summary["lost_updates"]["lost"] == 0 < summary["lost_updates"]["counted"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_sparse_gradients_can_be_accumulated(set_to_none: bool, tmp_path: Path) -> None:
    script = Bags(accumulate=3, set_to_none=set_to_none)
    assert same(trained(run_hogwild(script, "simulated", 1, tmp_path)), serial(script))


class Bowl(nn.Module):
    """f = x^2 / 2: each step shrinks x by a fixed factor, so a step on a stale x shows."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(1, 2, size))

    def forward(self) -> Tensor:
        return self.x.square().sum() / 2


def descend(count: int, size: int = 64, lr: float = 1e-3) -> nn.Module:
    """Takes `count` steps in a bowl."""
    session = pr.init()
    model = Bowl(size)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    for _ in range(count):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    return model


@both_worlds
def test_hogwild_with_a_lock_equals_serial_training(world: str, tmp_path: Path) -> None:
    """No other worker writes between reading and writing: all steps are serial."""
    summary = run_hogwild(partial(descend, 100), world, 3, tmp_path, "hogwild:lock=yes")
    assert same(trained(summary), serial(partial(descend, 300)))
    assert summary["lost_updates"] == {"counted": 3 * 100 * 64, "lost": 0, "share": 0.0}


def test_hogwild_without_a_lock_computes_stale_gradients(tmp_path: Path) -> None:
    """In simulation no update is lost, but a worker's parameters are stale when it writes."""
    summary = run_hogwild(partial(descend, 100), "simulated", 3, tmp_path)
    assert not same(trained(summary), serial(partial(descend, 300)))
    assert summary["lost_updates"]["lost"] == 0


@pytest.mark.parametrize("cluster", SPEEDS)
def test_a_lock_takes_turns_in_simulation(cluster: str, tmp_path: Path) -> None:
    """Workers take the lock in turn: none starves, however fast the others are, and times add up."""
    summary = run_hogwild(
        partial(descend, 40), "simulated", 4, tmp_path, "hogwild:lock=yes", cluster=SPEEDS[cluster]
    )
    order = [line["node"] for line in events(summary, "step")]
    for rank in range(4):
        places = [place for place, node in enumerate(order) if node == f"worker {rank}"]
        assert max(b - a for a, b in pairwise(places)) <= 4
    if cluster == "constant":
        assert summary["wall_s"] == pytest.approx(4 * 40 * 0.010)


@pytest.mark.parametrize("collective", ["direct", "ring", "shared"])
def test_hogwild_works_with_every_collective(collective: str, tmp_path: Path) -> None:
    """There is one, at the start."""
    summary = run_hogwild(partial(descend, 5), "real", 3, tmp_path, "hogwild:lock=yes", collective=collective)
    assert same(trained(summary), serial(partial(descend, 15)))


def test_worker_0_has_the_first_values(tmp_path: Path) -> None:
    """Whatever the models of the others are."""

    def main() -> None:
        session = pr.init()
        model = Bowl(4)
        with torch.no_grad():
            model.x.fill_(session.rank + 5)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        assert model.x.tolist() == [5.0] * 4

    for world in ("simulated", "real"):
        assert trained(run_hogwild(main, world, 3, tmp_path))["x"].tolist() == [5.0] * 4


# --- sparse data needs no lock ----------------------------------------------------------------------


def updates(seed: int, workers: int, **problem: Any) -> int:
    """The number of updates to reach the target, in simulation."""
    script = Logistic(seed, **problem)
    pr.simulate(script, workers=workers, strategy="hogwild", threads=1, seed=seed)
    return script.reached


@pytest.mark.slow
def test_sparse_data_needs_no_lock_and_dense_data_does() -> None:
    """8 workers reach the loss of one with at most 10 % more updates if an update touches 1 feature in 200.

    If it touches half of the features, gradients are stale, and they need at least 50 % more.
    """
    sparse: dict[str, Any] = {"features": 1000, "touched": 5, "lr": 2.0}
    dense: dict[str, Any] = {"features": 40, "touched": 20, "lr": 0.5}
    for seed in range(5):
        assert updates(seed, 8, **sparse) <= 1.1 * updates(seed, 1, **sparse)
    many = sum(updates(seed, 8, **dense) for seed in range(5))
    assert many >= 1.5 * sum(updates(seed, 1, **dense) for seed in range(5))


# --- lost updates -----------------------------------------------------------------------------------


def test_every_update_of_a_hot_vector_is_counted(tmp_path: Path) -> None:
    """Two processes at full speed on one vector: all updates are counted, and no more are lost than made."""
    summary = run_hogwild(partial(descend, 300, 1 << 18, 1e-6), "real", 2, tmp_path)
    told = summary["lost_updates"]
    assert told["counted"] == 2 * 300 * (1 << 16) and 0 <= told["lost"] < told["counted"]
    assert told["share"] == told["lost"] / told["counted"]
    (line,) = events(summary, "lost updates")
    assert {key: line[key] for key in told} == told
    print(told)


def test_large_tables_are_counted_on_a_sample(tmp_path: Path) -> None:
    """Of 2^20 rows one in 16 is counted, the same ones by all workers."""

    def main() -> None:
        session = pr.init()
        model = nn.Embedding(1 << 20, 1, sparse=True)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(10):
            optimizer.zero_grad()
            model(torch.arange(64) + 64 * step).sum().backward()
            optimizer.step()

    for world in ("simulated", "real"):
        told = run_hogwild(main, world, 2, tmp_path)["lost_updates"]
        assert told["counted"] == 2 * 10 * 64 // 16


class Large(TorchDispatchMode):
    """Records the operations that see a dense tensor of this many elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in (*args, *(result if isinstance(result, tuple | list) else [result])):
            if isinstance(each, Tensor) and not each.is_sparse and each.numel() >= self.size:
                self.seen.add(function.__name__)
        return result


def test_a_step_costs_what_it_touches(tmp_path: Path) -> None:
    """Only the lookup and the optimizer's sparse addition see all rows of a table."""
    rows = 100_000
    watch = Large(rows)

    def main() -> None:
        session = pr.init()
        model = Bag(rows)
        model, optimizer = session.prepare(model, OPTIMIZERS["sgd"](model))
        for _ in range(3):
            with watch:
                optimizer.zero_grad()
                model(torch.arange(12).view(3, 4)).sum().backward()
                optimizer.step()
        session.log(rows=model.table.weight.grad._nnz())

    assert run_hogwild(main, "simulated", 1, tmp_path)["metrics"] == {"rows": 12}
    views = {"slice.Tensor", "view.default", "detach.default"}  # their cost does not depend on the size
    assert watch.seen - views == {"_embedding_bag.default", "add_.Tensor"}


def test_finite_check_finds_infinities_in_sparse_gradients() -> None:
    model = Bag()
    replica = Replica(model, OPTIMIZERS["sgd"](model), sparse=True)
    replica.gradients.before_backward()
    (model(torch.tensor([[1, 2]])) * float("inf")).sum().backward()
    replica.gradients.after_backward()
    with pytest.raises(NotFinite, match=r"the gradient of table\.weight and 2 more at step 1"):
        replica.check_finite("worker 0", 1)


def test_a_gradient_may_be_sparse_now_and_dense_then() -> None:
    """The flat gradient holds dense gradients only."""
    model = Bag(rows=5)
    replica = Replica(model, OPTIMIZERS["sgd"](model), sparse=True)
    flat = replica.layout.view(replica.gradient, replica.layout.pieces[0])
    for dense in (False, True, True, False, False):
        model.table.sparse = not dense
        model.zero_grad()
        replica.gradients.before_backward()
        model(torch.tensor([[1, 2]])).sum().backward()
        replica.gradients.after_backward()
        assert bool(flat.any()) == dense and model.table.weight.grad.is_sparse != dense
        values = [parameter.grad.to_dense().sum() for parameter in model.parameters()]
        assert sum(map(float, replica.gradients._sums)) == pytest.approx(float(sum(values)))
        replica.gradients.bind()


# --- saving -----------------------------------------------------------------------------------------

LOCKS = ["hogwild", "hogwild:lock=yes"]


@each_value(("strategy", LOCKS), ("stop", [4, 8]), ("workers", [2, 4]), ("cluster", CLUSTERS))
def test_resumed_hogwild_run_has_the_bits_of_the_run_that_went_on(
    strategy: str, stop: int, workers: int, cluster: str, tmp_path: Path
) -> None:
    went_on, resumed = went_on_and_resumed(strategy, tmp_path, stop, workers, cluster)
    assert went_on["digest"] == resumed["digest"]
    assert went_on["lost_updates"] == resumed["lost_updates"]


@both_worlds
@pytest.mark.parametrize("strategy", LOCKS)
def test_hogwild_workers_save_the_same_parameters(world: str, strategy: str, tmp_path: Path) -> None:
    """No worker steps while another saves; and the run can be resumed."""
    run_hogwild(Stopping(tmp_path, 0, 40, 80, staggered=True), world, 3, tmp_path, strategy)
    first, *others = saved_states(tmp_path, 3)
    for other in others:
        assert all(map(torch.equal, first["parameters"], other["parameters"]))
        assert (first["counted"], first["lost"]) == (other["counted"], other["lost"])
    assert first["counted"] == (3 * 40 - 3) * (8 + 8 + 3 + 3) and 0 <= first["lost"] <= first["counted"]
    summary = run_hogwild(Stopping(tmp_path, 40, 40, 80), world, 3, tmp_path, strategy)
    assert summary["lost_updates"]["counted"] == (3 * 80 - 3) * (8 + 8 + 3 + 3)


@both_worlds
def test_hogwild_refuses_to_resume_from_different_checkpoints(world: str, tmp_path: Path) -> None:
    run_hogwild(Stopping(tmp_path, 0, 5, 9), world, 3, tmp_path)
    message = "resumed from a different checkpoint"
    with pytest.raises(UsageError, match=message):
        run_hogwild(Stopping(tmp_path, 5, 5, 500, forgets=1), world, 3, tmp_path)
    state = torch.load(tmp_path / "2.pt", weights_only=True)
    state["session"]["worker"]["parameters"][0][0] += 1
    torch.save(state, tmp_path / "2.pt")
    with pytest.raises(UsageError, match=message):
        run_hogwild(Stopping(tmp_path, 5, 5, 9), world, 3, tmp_path)


def test_hogwild_refuses_to_load_after_a_step(tmp_path: Path) -> None:
    def main() -> None:
        session = pr.init()
        model = Bowl(4)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = session.state_dict()
        model().backward()
        optimizer.step()
        session.load_state_dict(state)

    with pytest.raises(UsageError, match="must be called before the first step"):
        run_hogwild(main, "simulated", 2, tmp_path)


def test_saving_with_a_lock_between_forward_and_backward_does_not_deadlock(tmp_path: Path) -> None:
    def main() -> None:
        session = pr.init()
        model = Bowl(4)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            optimizer.zero_grad()
            loss = model()
            if step == 2:
                session.state_dict()
            loss.backward()
            optimizer.step()

    assert run_hogwild(main, "simulated", 3, tmp_path, "hogwild:lock=yes")["steps"] == 12


@dataclass
class Saves:
    """Trains some epochs, and saves after each."""

    folder: Path

    def __call__(self) -> None:
        session = pr.init()
        model = Bag()
        x = torch.arange(96 * 6).view(96, 6) % 100
        loader = DataLoader(TensorDataset(x, x[:, 0] % 2), batch_size=4)
        model, optimizer, loader = session.prepare(model, OPTIMIZERS["sgd"](model), loader)
        for epoch in range(4):
            for batch, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(batch), y).backward()
                optimizer.step()
            state = session.state_dict()["worker"]
            if state:
                torch.save(state, self.folder / f"{epoch}.{session.rank}.{session._node.incarnation}.pt")


@each_value(("strategy", LOCKS), ("seed", range(6)))
def test_hogwild_saves_consistently_while_workers_die_and_are_replaced(
    strategy: str, seed: int, tmp_path: Path
) -> None:
    """No save waits for ever, and all workers that save after an epoch save the same parameters."""
    at = (40 + 25 * seed) * (3 if "lock" in strategy else 1)
    deaths = "".join(
        f'[[failures]]\nworkers = [{who}]\nat = "{at + more} ms"\n{back}'
        for who, more, back in ((seed % 3, 0, f'back = "{at + 35} ms"\n'), ((seed + 1) % 3, 20, ""))
    )
    cluster = f"{SPEEDS['exponential']}\n{deaths}"
    summary = run_hogwild(Saves(tmp_path), "simulated", 4, tmp_path, strategy, cluster=cluster, seed=seed)
    assert summary["batches_undone"] == 0 and len(summary["lost"]) == 2
    for epoch in range(4):
        first, *others = (torch.load(path, weights_only=True) for path in tmp_path.glob(f"{epoch}.*.pt"))
        assert all(map(torch.equal, *(state["parameters"] for state in (first, other))) for other in others)
        assert others


# --- workers that die -------------------------------------------------------------------------------


@dataclass
class Killed:
    """Workers kill themselves once, in the step of this number; -1: after the last."""

    folder: Path
    kills: dict[int, int]
    size: int = 120

    def __call__(self) -> None:
        session = pr.init()
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(100, (self.size, 6), generator=generator)
        model = Bag()
        loader = DataLoader(TensorDataset(x, (x.sum(1) > 300).long()), batch_size=4)
        model, optimizer, loader = session.prepare(model, OPTIMIZERS["sgd"](model), loader)
        for steps, (batch, y) in enumerate(loader, 1):
            if steps == 2 and session.rank not in self.kills:
                self.leave_data_for_the_victims()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), y)  # with a lock the worker has it from here on
            self.die(session.rank, steps)
            time.sleep(0.005)  # so that the others are still there when they hear of a death
            loss.backward()
            optimizer.step()
        self.die(session.rank, -1)
        session.log(loss=F.cross_entropy(session.consensus()(x), (x.sum(1) > 300).long()).item())

    def leave_data_for_the_victims(self) -> None:
        deadline = time.monotonic() + 60
        marks = [self.folder / f"killed {rank}" for rank, step in self.kills.items() if step > 0]
        while not all(mark.exists() for mark in marks) and time.monotonic() < deadline:
            time.sleep(0.005)

    def die(self, rank: int, now: int) -> None:
        mark = self.folder / f"killed {rank}"
        if self.kills.get(rank) == now and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@each_value(
    ("strategy", ["hogwild", "hogwild:lock=yes"]),
    ("kills", [pytest.param(each, id=str(each)) for each in [{0: 2}, {1: 2}, {0: 2, 2: 3}]]),
    ("restarts", [0, 3]),
)
def test_hogwild_survivors_finish_the_data_of_killed_workers(
    strategy: str, kills: dict[int, int], restarts: int, tmp_path: Path
) -> None:
    """With the lock or without, all examples are trained on and the parameters are complete."""
    summary = run_hogwild(
        Killed(tmp_path, kills), "real", 3, tmp_path, strategy, restarts=restarts, timeout=60.0
    )
    assert set(summary["lost"]) == {f"worker {rank}" for rank in kills}
    # Without restarts a worker is replaced only if it was the last one, to save the result.
    assert summary["joined"] == len(kills) if restarts else summary["joined"] <= 1
    # Steps that a dead worker had not reported are not counted.
    assert summary["samples"] >= 120 - 4 * sum(kills.values()) and summary["batches_undone"] == 0
    Bag().load_state_dict(trained(summary), strict=True)
    # A dead worker may have counted a step for itself that is not in the shared counts.
    assert 0 <= summary["lost_updates"]["lost"] <= summary["lost_updates"]["counted"]


def test_hogwild_result_is_saved_if_the_last_worker_dies(tmp_path: Path) -> None:
    """The shared parameters outlive the workers: a replacement attaches to them and saves the result."""
    script = Killed(tmp_path, {0: -1})
    summary = run_hogwild(script, "real", 1, tmp_path, timeout=60.0)
    assert set(summary["lost"]) == {"worker 0"} and summary["joined"] == 1
    assert same(trained(summary), trained(run_hogwild(Killed(tmp_path, {}), "real", 1, tmp_path)))


def test_death_of_the_holder_frees_the_lock_in_simulation(tmp_path: Path) -> None:
    failures = "".join(
        f'[[failures]]\nworkers = [{rank}]\nat = "{at} ms"\n' for rank, at in ((0, 15), (2, 44))
    )
    summary = run_hogwild(
        Bags(), "simulated", 3, tmp_path, "hogwild:lock=yes", cluster=f"{SPEEDS['constant']}\n{failures}"
    )
    assert set(summary["lost"]) == {"worker 0", "worker 2"} and summary["batches_undone"] == 0


# --- refusals ---------------------------------------------------------------------------------------


def sparse_with(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[], None]:
    def main() -> None:
        session = pr.init()
        model = Bag()
        session.prepare(model, make(model.parameters()))

    return main


@both_worlds
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "SGD with momentum=0.9"),
        (
            partial(torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.01),
            "SGD with momentum=0.5 and weight_decay=0.01",
        ),
        (partial(torch.optim.Adagrad, weight_decay=0.1), "Adagrad with weight_decay=0.1"),
        (torch.optim.Adam, "Adam"),
        (torch.optim.RMSprop, "RMSprop"),
    ],
    ids=["momentum", "both", "adagrad", "adam", "rmsprop"],
)
def test_optimizers_that_touch_all_rows_are_refused(world: str, make: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        run_hogwild(sparse_with(make), world, 2, tmp_path)
    assert str(error.value).startswith(
        f"hogwild: table (EmbeddingBag with sparse=True) has sparse gradients, and {what} would turn each "
        "into an update of all rows: use SGD without momentum and weight decay, Adagrad or SparseAdam for "
        "it, or leave out sparse=True (test_hogwild_laws.py, line "
    )


@both_worlds
@pytest.mark.parametrize("begin", [1, 3])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "SGD with momentum=0.9"),
        (partial(torch.optim.SGD, lr=0.1, weight_decay=0.1), "SGD with weight_decay=0.1"),
        (torch.optim.Adam, "Adam"),
    ],
    ids=["momentum", "decay", "adam"],
)
def test_hogwild_refuses_dense_optimizers_at_the_first_sparse_gradient(
    world: str, begin: int, make: Any, what: str, tmp_path: Path
) -> None:
    """Before the first step with such a gradient: the shared parameters do not change."""

    def main() -> None:
        session = pr.init()
        model = nn.Module()
        model.rows = nn.Parameter(torch.ones(6, 2))
        _, optimizer = session.prepare(model, make(model.parameters()))
        for step in range(1, 5):
            optimizer.zero_grad()
            found = nn.functional.embedding(torch.tensor([1, 4]), model.rows, sparse=step >= begin)
            found.sum().backward()
            before = model.rows.detach().clone()
            try:
                optimizer.step()
            except UsageError:
                assert step == begin and (session.workers > 1 or torch.equal(model.rows, before))
                raise

    for workers in (1, 2):
        with pytest.raises(UsageError) as error:
            run_hogwild(main, world, workers, tmp_path)
        assert f"hogwild: rows has sparse gradients, and {what} would turn each into an" in str(error.value)


def test_hogwild_refuses_a_codec() -> None:
    with pytest.raises(UsageError, match=r"hogwild\+topk:0\.1: hogwild takes no codec"):
        pr.parse("hogwild+topk:0.1")


@pytest.mark.parametrize("how", [{"here": 1}, {"listen": "tcp:127.0.0.1:0"}], ids=str)
def test_hogwild_refuses_options_for_several_hosts(how: dict[str, Any], tmp_path: Path) -> None:
    """Before anything starts."""
    with pytest.raises(UsageError, match="share, so they must be on one host: leave out --here and --listen"):
        pr.run(partial(descend, 1), workers=2, strategy="hogwild", runs=tmp_path, key=tmp_path / "key", **how)
    assert not list(tmp_path.iterdir())


def test_hogwild_chosen_in_the_script_refuses_several_hosts(tmp_path: Path) -> None:
    def main() -> None:
        session = pr.init("hogwild")
        model = Bowl()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(UsageError, match="needs memory that all workers share, so they must be on one host"):
        pr.run(main, workers=2, runs=tmp_path, listen="tcp:127.0.0.1:0")


@pytest.mark.parametrize("chosen", ["outside", "in the script"])
@pytest.mark.parametrize("link", ['latency = "1 ms"', 'bandwidth = "1 Gbit/s"', 'site = "a"'])
def test_no_memory_is_shared_across_simulated_links(link: str, chosen: str, tmp_path: Path) -> None:
    """If messages take time, workers are on several hosts, in simulation too."""

    def main() -> None:
        session = pr.init("hogwild")
        model = Bowl()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(UsageError, match="and in the cluster file they are on hosts with links between them"):
        strategy = "hogwild" if chosen == "outside" else None
        run_hogwild(main, "simulated", 2, tmp_path, strategy, cluster=f"[[hosts]]\n{link}\n")


def test_hogwild_refuses_parameters_that_are_not_on_the_cpu() -> None:
    groups = [{"params": [torch.zeros(1), torch.zeros(1, device="meta")]}]
    with pytest.raises(UsageError, match="hogwild works on memory that processes share, and the model is on"):
        check_devices(pr.parse("hogwild"), groups)


def test_no_worker_left_is_a_clear_failure(tmp_path: Path) -> None:
    failures = '[[failures]]\nworkers = [0, 1]\nat = "15 ms"\n'
    with pytest.raises(PolyrhythmError, match="no worker is left to send the final parameters"):
        run_hogwild(Bags(), "simulated", 2, tmp_path, cluster=f"{SPEEDS['constant']}\n{failures}")


def test_a_worker_that_is_slow_to_start_saves_the_first_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may be at it already when this worker begins to reply to them."""
    share_loop = HogWildWorker.share_loop

    def slow(self: HogWildWorker, lock: Any) -> bool:
        if self.node.rank == 1:
            time.sleep(0.5)
        return share_loop(self, lock)

    monkeypatch.setattr(HogWildWorker, "share_loop", slow)
    run_hogwild(Stopping(tmp_path, 0, 5, 9), "real", 2, tmp_path)
    assert all("parameters" in state for state in saved_states(tmp_path, 2))


def test_a_worker_that_accumulates_while_others_step_makes_no_update_by_hand(tmp_path: Path) -> None:
    """The parameters that it sees change before its first step are those that all workers share."""

    def main() -> None:
        session = pr.init()
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(torch.ones(240, 4)), batch_size=4)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for number, (x,) in enumerate(loader, 1):
            model(x).sum().backward()
            if session.rank == 0 or number % 12 == 0:
                optimizer.step()
                optimizer.zero_grad()

    summary = run_in("simulated", main, strategy="hogwild", workers=2, runs=tmp_path)
    assert summary["samples"] == 240 and summary["steps"] > 20
