"""The run folder holds all that a replay, a report and a user of the trained model need."""

from __future__ import annotations

import ast
import hashlib
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors.torch
import torch

import polyrhythm as pr
from polyrhythm.core.event_counts import EventCounts
from polyrhythm.core.events import (
    Applied,
    Delivered,
    Event,
    LeaseTaken,
    NodeJoined,
    NodeLeft,
    Record,
    RunFailed,
    StepDone,
)
from polyrhythm.record.folder import RunFolder
from polyrhythm.record.reader import read_events, read_metrics
from tests.scripts.train import EXAMPLES, network, train

E = TypeVar("E", bound=Event)
BATCHES = EXAMPLES // 4
EPOCHS = 2


class Folder:
    """A run's folder, read."""

    def __init__(self, summary: dict[str, Any]) -> None:
        self.summary, self.path = summary, Path(summary["folder"])
        self.records, self.metrics = list(read_events(self.path)), read_metrics(self.path)

    def of(self, kind: type[E], node: str = "") -> list[E]:
        """The events of a kind, of one node or of all."""
        found = [record for record in self.records if not node or record.node == node]
        return [record.event for record in found if isinstance(record.event, kind)]

    def nodes(self, kind: type[Event]) -> Counter[str]:
        """How many events of a kind each node has logged."""
        return Counter(record.node for record in self.records if isinstance(record.event, kind))


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
    applied = folder.of(Applied)
    assert all(None not in (event.worker, event.sequence, event.bytes, event.step) for event in applied)
    for server in ("server 0", "server 1"):
        mine = folder.of(Applied, server)
        assert [event.version for event in mine] == list(range(1, EPOCHS * BATCHES + 1))
        assert len({(event.worker, event.sequence) for event in mine}) == len(mine)
    stale = [event.staleness for event in applied]
    assert folder.summary["staleness"]["mean"] == pytest.approx(sum(stale) / len(stale))
    assert folder.summary["staleness"]["max"] == max(stale)


def test_logged_deliveries_give_the_order_of_applied_pushes(folder: Folder) -> None:
    """Each server's order of deliveries is complete: its pushes are applied in just that order."""
    for server in ("server 0", "server 1"):
        order = [
            (event.sender, event.sequence) for event in folder.of(Delivered, server) if event.kind == "push"
        ]
        applied = folder.of(Applied, server)
        assert order == [(f"worker {event.worker}", event.sequence) for event in applied]


def test_every_step_is_logged_with_compute_and_wait_time(folder: Folder) -> None:
    """Every step of every worker says how long it computed and how long it waited."""
    steps = folder.of(StepDone)
    assert all(event.compute_s >= 0 and event.wait_s >= 0 for event in steps)
    count = folder.nodes(StepDone)
    assert sum(count.values()) == folder.summary["steps"] == EPOCHS * BATCHES
    for node in count:
        assert [event.step for event in folder.of(StepDone, node)] == list(range(1, count[node] + 1))
    assert sum(event.samples for event in steps) == folder.summary["samples"] == EPOCHS * EXAMPLES


def test_logged_leases_cover_each_batch_of_an_epoch_once(folder: Folder) -> None:
    """The leases of an epoch cover each batch once."""
    taken = defaultdict(list)
    for lease in folder.of(LeaseTaken):
        taken[lease.epoch] += range(lease.first, lease.first + lease.count)
    assert {epoch: sorted(batches) for epoch, batches in taken.items()} == {
        epoch: list(range(BATCHES)) for epoch in range(EPOCHS)
    }


def test_joins_and_leaves_of_all_nodes_are_logged(folder: Folder) -> None:
    """Who came and who went, and why."""
    everyone = {f"worker {rank}" for rank in range(3)} | {f"server {rank}" for rank in range(2)}
    assert {event.peer for event in folder.of(NodeJoined)} == everyone
    assert {event.peer: event.reason for event in folder.of(NodeLeft)} == dict.fromkeys(everyone, "finished")


def test_a_lost_worker_is_logged_with_reason_and_returned_batches(tmp_path: Path) -> None:
    """A lost worker leaves with a reason, and what it had leased goes back."""
    folder = Folder(pr.run(partial(train, do="kill", pause=0.02), workers=3, strategy="async", runs=tmp_path))
    (lost,) = (event for event in folder.of(NodeLeft) if event.reason != "finished")
    assert (lost.peer, lost.reason) == ("worker 1", "was killed by SIGKILL")
    assert lost.returned >= 1


def test_a_failed_run_logs_its_error_in_the_run_folder(tmp_path: Path) -> None:
    """A run that fails leaves its folder, with the reason as an event."""
    with pytest.raises(pr.PolyrhythmError) as failure:
        pr.run(partial(train, do="kill"), workers=2, strategy="allreduce", runs=tmp_path, name="it")
    (record,) = read_events(tmp_path / "it", RunFailed)
    assert record == Record("coordinator", record.t, RunFailed(str(failure.value)))


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
    logs = {f"worker-{rank}.log" for rank in range(3)}
    assert {path.name for path in folder.path.iterdir()} == logs | {
        "config.json", "consensus.safetensors", "events.jsonl.gz", "metrics.jsonl", "summary.json",
    }  # fmt: skip


def test_runs_of_the_same_name_get_separate_folders(tmp_path: Path) -> None:
    """A second run of the same name does not touch the first."""
    folders = [pr.simulate(train, strategy="allreduce", runs=tmp_path, name="it")["folder"] for _ in range(3)]
    assert folders == [str(tmp_path / name) for name in ("it", "it-2", "it-3")]


@pytest.mark.parametrize("error", [OSError("no space left on device"), SystemExit("killed")], ids=repr)
def test_the_final_model_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Whatever stops a run while it writes, a file of that name can be loaded."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    written = RunFolder(tmp_path, "it")

    class Half(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield self[0]
            raise error

    disk = isinstance(error, OSError)
    expected = r"could not be written to .* \(no space .*elsewhere" if disk else "killed"
    with pytest.raises(pr.PolyrhythmError if disk else SystemExit, match=expected):
        written.consensus(Half([b"all ", b"of it"]))
    assert [*tmp_path.rglob("*.safetensors"), *Path.cwd().iterdir()] == []
    assert not disk or not [*tmp_path.rglob("*.part")]
    assert written.consensus([b"all ", b"of it"]) == written.path / "consensus.safetensors"
    assert (written.path / "consensus.safetensors").read_bytes() == b"all of it"
    written.close()


def test_spread() -> None:
    """The 95th percentile is the least number that 95 of 100 do not exceed."""

    def spread(staleness: Counter[int]) -> dict[str, float]:
        counts = EventCounts()
        counts.merge(staleness, 0, None)
        return counts.spread()

    assert spread(Counter({0: 94, 3: 5, 9: 1})) == {"mean": 0.24, "p95": 3.0, "max": 9.0}
    assert spread(Counter({0: 95, 3: 4, 9: 1})) == {"mean": 0.21, "p95": 0.0, "max": 9.0}
    assert spread(Counter({7: 1})) == {"mean": 7.0, "p95": 7.0, "max": 7.0}
    assert spread(Counter()) == {"mean": 0.0, "p95": 0.0, "max": 0.0}


def test_the_package_never_reads_or_writes_pickles() -> None:
    """Nothing in the package reads pickles, whose sender can run code. It writes none of its own."""
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
            if path.parts[-2:] == ("session", "exchange.py"):
                banned.remove("torch.save")  # `session.save` is torch.save of what the script gives it
            assert not banned & set(names), f"{path}:{node.lineno}"
