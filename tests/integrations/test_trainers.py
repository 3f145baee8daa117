"""Scripts of Lightning and Transformers, with the real libraries: alone, simulated and on two workers."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import polyrhythm as pr
from polyrhythm.integrations.trainers import ModelSwap
from tests.support.combine import few
from tests.support.programs import trained
from tests.support.runs import run_in

tqdm.monitor_interval = 0  # or the first progress bar starts a thread that never ends
FOLDER = Path(__file__).parents[1] / "scripts"
LIBRARIES = ("lightning", "transformers")
STRATEGIES = ("allreduce", "async", "local:8", "async+topk:0.01")
EXAMPLES = {"lightning": 1437, "transformers": 200}

Row = dict[str, Any]  # what a worker wrote at the end


@functools.cache
def script(library: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"train_{library}", FOLDER / f"train_{library}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(library: str, folder: Path, *options: str) -> Callable[[], None]:
    return functools.partial(script(library).main, ["--folder", str(folder), *options])


def rows(folder: Path) -> list[Row]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]


def saved(library: str, folder: Path) -> dict[str, Tensor]:
    """The model that the script saved after training."""
    if library == "transformers":
        return load_file(folder / "final" / "model.safetensors")
    state: dict[str, Tensor] = torch.load(folder / "final.ckpt", weights_only=False)["state_dict"]
    return state


def check(library: str, strategy: str, world: str, folder: Path, workers: int) -> list[Row]:
    """Trains two epochs; what must be so under every strategy."""
    runs = folder / "runs"
    summary = run_in(world, program(library, folder), strategy=strategy, workers=workers, runs=runs)
    found = rows(folder)
    assert [row["rank"] for row in found] == list(range(workers))
    for name in ("digest", "accuracy"):  # all workers evaluated one model
        assert len({row[name] for row in found}) == 1, name
    assert summary["samples"] == 2 * EXAMPLES[library]  # each example once per epoch
    if strategy in ("adpsgd", "broadcast"):  # exchanges that have begun end after the script
        return found
    result, there = trained(summary), saved(library, folder)
    for name, tensor in result.items():  # saved once, from the consensus, and the run's own result
        assert torch.equal(tensor, there[name]), name
    return found


@few("library", LIBRARIES, quick=1)
def test_alone_the_script_gives_the_bits_of_the_plain_library(library: str, tmp_path: Path) -> None:
    """And so does a run with one worker, which draws the same batches if they are not shuffled."""
    program(library, tmp_path / "plain", "--plain", "--sequential", "--accumulate", "2")()
    program(library, tmp_path / "alone", "--sequential", "--accumulate", "2")()
    one = program(library, tmp_path / "one", "--sequential", "--accumulate", "2")
    run_in("simulated", one, strategy="allreduce", workers=1)
    (plain,), (alone,), (run,) = (rows(tmp_path / name) for name in ("plain", "alone", "one"))
    assert plain == alone == run


@pytest.mark.parametrize(("library", "strategy"), [("lightning", "async"), ("transformers", "allreduce")])
def test_simulated_workers_train_one_model(library: str, strategy: str, tmp_path: Path) -> None:
    check(library, strategy, "simulated", tmp_path, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_workers_train_one_model(library: str, strategy: str, tmp_path: Path) -> None:
    found = check(library, strategy, "real", tmp_path, workers=2)
    if library == "lightning":  # sync_dist: the mean over all examples of the epoch
        assert found[0]["train_loss"] == found[1]["train_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "strategy", ["allreduce", "async", "local:8", "gossip", "adpsgd", "broadcast", "async+topk:0.01"]
)
def test_eight_simulated_workers_train_one_model(library: str, strategy: str, tmp_path: Path) -> None:
    check(library, strategy, "simulated", tmp_path, workers=8)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_schedule_by_batches_ends_with_the_data(
    library: str, strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In lockstep it counts the steps of a worker. Elsewhere it is at the worker's last batch in the run."""
    options = ["--decay"] if library == "lightning" else []
    cluster = '[[hosts]]\nstep_time = "10 ms"\n[[stragglers]]\nworkers = [1]\nslowdown = 3.3\n'
    run_in("simulated", program(library, tmp_path, *options), strategy=strategy, workers=2, cluster=cluster)
    found, batches = rows(tmp_path), {"lightning": 45, "transformers": 25}[library]
    if strategy == "allreduce":
        assert [row["scheduled"] for row in found] == [row["steps"] for row in found]
    else:
        assert found[0]["steps"] > 2 * found[1]["steps"]
        scheduled = [row["scheduled"] for row in found]
        assert max(scheduled) == 2 * batches and min(scheduled) > batches
    assert "once per batch" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_each_worker_takes_the_steps_that_were_asked_for(strategy: str, tmp_path: Path) -> None:
    run_in("real", program("transformers", tmp_path, "--steps", "30"), strategy=strategy, workers=2)
    assert [row["steps"] for row in rows(tmp_path)] == [30, 30]
    assert [row["rate"] for row in rows(tmp_path)] == [0, 0]  # the schedule ends where training does


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_resumed_run_ends_like_one_that_was_not_interrupted(library: str, tmp_path: Path) -> None:
    """Under a strategy in lockstep, with the data of the second epoch in its order."""
    for name, *options in (("whole",), ("parts", "--stop"), ("parts", "--resume")):
        run_in("simulated", program(library, tmp_path / name, *options), strategy="allreduce", workers=2)
    for whole, parts in zip(rows(tmp_path / "whole"), rows(tmp_path / "parts"), strict=True):
        assert whole["digest"] == parts["digest"] and whole["steps"] == parts["steps"]


def test_accumulated_gradients_are_those_of_a_larger_batch(tmp_path: Path) -> None:
    """Two workers that accumulate twice take the steps of one that accumulates four times."""
    for name, workers, count in (("one", 1, "4"), ("two", 2, "2")):
        each = program("lightning", tmp_path / name, "--sequential", "--accumulate", count, "--epochs", "1")
        run_in("simulated", each, strategy="allreduce", workers=workers)
    (one,), (two, _) = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert one["steps"] == two["steps"]
    assert one["accuracy"] == pytest.approx(two["accuracy"], abs=0.02)


@pytest.mark.parametrize(
    ("library", "options", "message"),
    [
        (
            "lightning",
            ["--steps", "5"],
            r"Trainer\(max_steps=5\): under async.*use max_epochs",
        ),
        ("lightning", ["--resume"], r"fit\(ckpt_path=...\): under async.*load_from_checkpoint\(\)"),
        ("lightning", ["--each-step"], "on_step=True needs all workers.*at the end of an epoch"),
        ("transformers", ["--resume"], r"resume_from_checkpoint: under async.*from_pretrained\(\)"),
        ("transformers", ["--accumulate", "2"], "gradient_accumulation_steps=2: under async.*set it to 1"),
    ],
)
def test_what_unequal_workers_cannot_do_is_refused(
    library: str, options: list[str], message: str, tmp_path: Path
) -> None:
    if "--resume" in options:
        program(library, tmp_path, "--epochs", "1")()
    with pytest.raises(pr.UsageError, match=message):
        run_in("simulated", program(library, tmp_path, *options), strategy="async", workers=2)


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_manual_optimization_with_two_optimizers(strategy: str) -> None:
    """Each optimizer trains its own part of the module, which is one model on all workers at the end."""
    import lightning

    class Two(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

        def training_step(self, batch: list[Tensor], _: int) -> None:
            for part, optimizer in zip(self.parts, self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward((part(batch[0]) - 1).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [
                torch.optim.SGD(self.parts[0].parameters(), 0.1),
                torch.optim.Adam(self.parts[1].parameters()),
            ]

    ends: list[list[Tensor]] = []

    def train() -> None:
        model, data = Two(), TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
        before = [each.detach().clone() for each in model.parameters()]
        trainer = lightning.Trainer(
            strategy=pr.integrations.lightning.Strategy(), max_epochs=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, DataLoader(data, batch_size=2))
        ends.append([each.detach().clone() for each in model.parameters()])
        assert not any(torch.equal(one, other) for one, other in zip(before, ends[-1], strict=True))

    run_in("simulated", train, strategy=strategy, workers=2)
    assert len(ends) == 2
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_server_is_never_the_main_process() -> None:
    """It runs the script too, up to the first batch, but does not log or save."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    main: dict[str, tuple[bool, bool]] = {}

    def train() -> None:
        strategy = pr.integrations.lightning.Strategy()
        run = strategy.workers.run
        main[str(run._context.me)] = (strategy.is_global_zero, rank_zero_only(lambda: True)() or False)
        model = nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        run.consensus()  # others run meanwhile
        assert (rank_zero_only.rank == 0) == (run.rank == 0)

    run_in("simulated", train, strategy="async", workers=2)
    assert main == {"worker 0": (True, True), "worker 1": (False, False), "server 0": (False, False)}


def test_a_swapped_model_keeps_what_is_written_to_its_own_tensors() -> None:
    """Other workers may write to a replica while its model shows the consensus."""
    model, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    nn.init.constant_(other.weight, 5.0)
    other.running_mean.fill_(7.0)
    own, weight, swap = model.weight.data, model.weight, ModelSwap(model)
    swap.show(other)
    assert model.weight is weight and model.weight[0] == 5 and model.running_mean[0] == 7
    own.fill_(3.0)
    swap.restore()
    assert model.weight is weight and model.weight[0] == 3 and model.running_mean[0] == 0
    assert not swap.shown and other.weight[0] == 5
