"""The run folder holds all that a replay, a report and a user of the trained model need."""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import polyrhythm as pr
from polyrhythm.record.folder import RunFolder, spread
from tests.scripts.train import EXAMPLES, network, train

Lines = list[dict[str, Any]]
BATCHES = EXAMPLES // 4
EPOCHS = 2


class Folder:
    """A run's folder, read."""

    def __init__(self, summary: dict[str, Any]) -> None:
        self.summary, self.path = summary, Path(summary["folder"])
        self.events, self.metrics = (
            [json.loads(line) for line in (self.path / name).read_text().splitlines()]
            for name in ("events.jsonl", "metrics.jsonl")
        )

    def of(self, *kinds: str) -> Lines:
        return [line for line in self.events if line["event"] in kinds]


@pytest.fixture(scope="module", params=["run", "simulate"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    start = pr.run if request.param == "run" else pr.simulate
    runs = tmp_path_factory.mktemp("runs")
    program = partial(train, epochs=EPOCHS)
    return Folder(start(program, workers=3, servers=2, strategy="async", seed=7, runs=runs, name="it"))


def test_run_folder_has_the_config_and_the_returned_summary(folder: Folder) -> None:
    """What was asked is there, and the summary on disk is the one that was returned."""
    config = json.loads((folder.path / "config.json").read_text())
    asked = {"workers": 3, "servers": 2, "strategy": "async", "seed": 7, "polyrhythm": pr.__version__}
    assert config.items() >= asked.items()
    assert json.loads((folder.path / "summary.json").read_text()) == folder.summary


def test_every_applied_push_is_logged_with_its_staleness(folder: Folder) -> None:
    """Every push is recorded where it was applied: whose, which, when, how stale and how large."""
    applied = folder.of("apply")
    keys = {"node", "t", "worker", "sequence", "version", "staleness", "bytes", "step"}
    assert all(line.keys() >= keys for line in applied)
    for server in ("server 0", "server 1"):
        mine = [line for line in applied if line["node"] == server]
        assert [line["version"] for line in mine] == list(range(1, EPOCHS * BATCHES + 1))
        assert len({(line["worker"], line["sequence"]) for line in mine}) == len(mine)
    stale = [line["staleness"] for line in applied]
    assert folder.summary["staleness"]["mean"] == pytest.approx(sum(stale) / len(stale))
    assert folder.summary["staleness"]["max"] == max(stale)


def test_logged_deliveries_give_the_order_of_applied_pushes(folder: Folder) -> None:
    """Each server's order of deliveries is complete: its pushes are applied in just that order."""
    for server in ("server 0", "server 1"):
        order = [
            (line["sender"], line["sequence"])
            for line in folder.of("deliver")
            if line["node"] == server and line["kind"] == "push"
        ]
        applied = [line for line in folder.of("apply") if line["node"] == server]
        assert order == [(f"worker {line['worker']}", line["sequence"]) for line in applied]


def test_every_step_is_logged_with_compute_and_wait_time(folder: Folder) -> None:
    """Every step of every worker says how long it computed and how long it waited."""
    steps = folder.of("step")
    assert all(line["compute_s"] >= 0 and line["wait_s"] >= 0 for line in steps)
    count = Counter(line["node"] for line in steps)
    assert sum(count.values()) == folder.summary["steps"] == EPOCHS * BATCHES
    for node in count:
        assert [line["step"] for line in steps if line["node"] == node] == list(range(1, count[node] + 1))
    assert sum(line["samples"] for line in steps) == folder.summary["samples"] == EPOCHS * EXAMPLES


def test_logged_leases_cover_each_batch_of_an_epoch_once(folder: Folder) -> None:
    """The leases of an epoch cover each batch once."""
    taken = defaultdict(list)
    for line in folder.of("lease"):
        taken[line["epoch"]] += range(line["first"], line["first"] + line["count"])
    assert {epoch: sorted(batches) for epoch, batches in taken.items()} == {
        epoch: list(range(BATCHES)) for epoch in range(EPOCHS)
    }


def test_joins_and_leaves_of_all_nodes_are_logged(folder: Folder) -> None:
    """Who came and who went, and why."""
    everyone = {f"worker {rank}" for rank in range(3)} | {f"server {rank}" for rank in range(2)}
    assert {line["peer"] for line in folder.of("join")} == everyone
    assert {line["peer"]: line["reason"] for line in folder.of("leave")} == dict.fromkeys(
        everyone, "finished"
    )


def test_a_lost_worker_is_logged_with_reason_and_returned_batches(tmp_path: Path) -> None:
    """A lost worker leaves with a reason, and what it had leased goes back."""
    folder = Folder(pr.run(partial(train, do="kill", pause=0.02), workers=3, strategy="async", runs=tmp_path))
    (lost,) = (line for line in folder.of("leave") if line["reason"] != "finished")
    assert (lost["peer"], lost["reason"]) == ("worker 1", "was killed by SIGKILL")
    assert lost["returned"] >= 1


def test_a_failed_run_logs_its_error_in_the_run_folder(tmp_path: Path) -> None:
    """A run that fails leaves its folder, with the reason as an event."""
    with pytest.raises(pr.PolyrhythmError) as failure:
        pr.run(partial(train, do="kill"), workers=2, strategy="allreduce", runs=tmp_path, name="it")
    last = json.loads((tmp_path / "it" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["message"]) == ("fail", str(failure.value))


def test_metrics_are_logged_with_node_time_and_step(folder: Folder) -> None:
    """Everything that the script logs is kept with who said it, when and at which step."""
    assert Counter(line["node"] for line in folder.metrics) == {f"worker {rank}": EPOCHS for rank in range(3)}
    assert all(line.keys() == {"t", "node", "step", "epoch", "loss"} for line in folder.metrics)


def test_consensus_file_loads_into_a_plain_model_and_matches_the_digest(folder: Folder) -> None:
    """The trained parameters load into the plain model, and the digest is their SHA-256."""
    model = network()
    model.load_state_dict(safetensors.torch.load_file(folder.path / "consensus.safetensors"), strict=True)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert hashlib.sha256(flat.numpy().tobytes()).hexdigest() == folder.summary["digest"]
    assert {path.name for path in folder.path.iterdir()} == {
        "config.json", "consensus.safetensors", "events.jsonl", "metrics.jsonl", "summary.json",
    }  # fmt: skip


def test_runs_of_the_same_name_get_separate_folders(tmp_path: Path) -> None:
    """A second run of the same name does not touch the first."""
    folders = [pr.simulate(train, strategy="allreduce", runs=tmp_path, name="it")["folder"] for _ in range(3)]
    assert folders == [str(tmp_path / name) for name in ("it", "it-2", "it-3")]


def test_the_final_model_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stops a run while it writes, a file of that name can be loaded."""
    written = RunFolder(tmp_path, "it")

    def half(path: Path, blob: bytes) -> None:
        with path.open("wb") as file:
            file.write(blob[: len(blob) // 2])
        raise OSError("no space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", half)
        with pytest.raises(OSError, match="no space"):
            written.consensus(b"all of it")
    assert not (written.path / "consensus.safetensors").exists()
    written.consensus(b"all of it")
    assert (written.path / "consensus.safetensors").read_bytes() == b"all of it"
    written.close()


def test_spread() -> None:
    """The 95th percentile is the least number that 95 of 100 do not exceed."""
    assert spread(Counter({0: 94, 3: 5, 9: 1})) == {"mean": 0.24, "p95": 3.0, "max": 9.0}
    assert spread(Counter({0: 95, 3: 4, 9: 1})) == {"mean": 0.21, "p95": 0.0, "max": 9.0}
    assert spread(Counter({7: 1})) == {"mean": 7.0, "p95": 7.0, "max": 7.0}
    assert spread(Counter()) == {"mean": 0.0, "p95": 0.0, "max": 0.0}


def test_the_package_never_reads_or_writes_pickles() -> None:
    """Nothing in the package reads or writes pickles: whoever can send one can run code."""
    for path in Path(pr.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
            banned |= {"torch.load", "torch.save", "torch.package"}
            assert not banned & set(names), f"{path}:{node.lineno}"
