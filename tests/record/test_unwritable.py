"""A run folder that is deleted, read-only or on a full disk never ends a run, and the result is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.events import StepDone
from polyrhythm.launch.console import Console
from polyrhythm.record import folder as folders
from polyrhythm.record.folder import RunFolder
from polyrhythm.record.reader import read_events
from tests.support.programs import MOMENTUM, Examples, mlp

Trouble = Literal["deleted", "read-only", "full"]
SIZE, EPOCHS, BATCH = 60, 4, 4
ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="mounts a file system, which only root may do")


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


def unmount(path: Path) -> None:
    subprocess.run(["umount", "-l", path], check=False, capture_output=True)


def make_read_only(folder: Path) -> None:
    """Root may write anywhere, except to a file system that is read-only."""
    if ROOT:
        mount("--bind", folder, folder)
        mount("-o", "remount,bind,ro", folder)
    else:
        folder.chmod(0o500)


def fill(folder: Path) -> None:
    """Writes until the disk is full."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


BREAK = {"deleted": shutil.rmtree, "read-only": make_read_only, "full": fill}


@dataclass
class Disturbed:
    """Trains, and in the second epoch worker 0 makes the run folder unusable."""

    folder: Path
    trouble: Trouble

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        loader = DataLoader(Examples(SIZE), batch_size=BATCH)
        model, optimizer, loader = here.prepare(model, MOMENTUM(model.parameters()), loader)
        for epoch in here.epochs(EPOCHS):
            if epoch == 1 and here.rank == 0:
                {"deleted": shutil.rmtree, "read-only": make_read_only, "full": fill}[self.trouble](
                    self.folder
                )
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            here.log(epoch=epoch)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """Where run folders go: a small disk of its own, if that is possible."""
    path = tmp_path / "runs"
    path.mkdir()
    if ROOT:
        mount("-t", "tmpfs", "-o", "size=256k", "none", path)
    try:
        yield path
    finally:
        if ROOT:
            unmount(path / "it")
            unmount(path)
        elif (path / "it").exists():
            (path / "it").chmod(0o700)


def check_result(summary: dict[str, Any], place: Path) -> None:
    """All was trained on, and the final parameters are in a file in this place."""
    assert summary["steps"] == EPOCHS * SIZE // BATCH and summary["samples"] == EPOCHS * SIZE
    assert summary["metrics"] == {"epoch": EPOCHS - 1}
    path = Path(summary["parameters"])
    assert path.parent.parent == place
    model = mlp()
    model.load_state_dict(safetensors.torch.load_file(path), strict=True)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert hashlib.sha256(flat.numpy().tobytes()).hexdigest() == summary["digest"]
    assert json.loads(path.with_name("summary.json").read_text()) == summary
    assert {each.name for each in path.parent.iterdir()} == {path.name, "config.json", "summary.json"}


@pytest.mark.parametrize("start", [pr.run, pr.simulate], ids=["run", "simulate"])
@pytest.mark.parametrize("trouble", ["deleted", "read-only", pytest.param("full", marks=as_root)])
def test_a_run_outlives_its_folder_and_saves_the_result_elsewhere(
    tmp_path: Path,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    start: Any,
    trouble: Trouble,
) -> None:
    monkeypatch.chdir(tmp_path)
    summary = start(
        Disturbed(runs / "it", trouble), workers=2, strategy="async", runs=runs, name="it", threads=1,
        console=Console(sys.stderr),
    )  # fmt: skip
    check_result(summary, tmp_path)
    told = capsys.readouterr().err.splitlines()
    assert len([line for line in told if "cannot write to the run folder" in line]) == 1
    assert [line for line in told if "the final parameters are in" in line] == [
        f"the final parameters are in {summary['parameters']}"
    ]
    if trouble != "deleted":  # the log ends somewhere, and can be read so far
        assert all(record.t >= 0 for record in read_events(runs / "it"))


def test_a_deleted_folder_is_reported_while_the_run_goes_on(tmp_path: Path) -> None:
    """It is noticed although files that are open can still be written."""
    said: list[str] = []
    run = RunFolder(tmp_path, "it", say=said.append)
    run.event("worker 0", 1.0, StepDone(1, 4, 0.1, 0.1))
    run._writer.wake()
    shutil.rmtree(run.path)
    until = time.monotonic() + 20
    while not said and time.monotonic() < until:
        time.sleep(0.05)
    run.close()
    assert len(said) == 1 and "it is gone; training continues" in said[0]


@as_root
def test_a_disk_that_fills_up_ends_only_the_log(runs: Path) -> None:
    """The log fails in the middle of a write: it ends there, and later calls do nothing."""
    said: list[str] = []
    run = RunFolder(runs, "it", say=said.append)
    run.config({"workers": 2})
    for number in range(60_000):
        run.event(
            f"worker {number % 7}",
            number * 1.01,
            StepDone(number, number * 7919 % 64, number / 7, number / 3),
        )
    run.close()
    assert len(said) == 1 and "No space left on device; training continues" in said[0]
    run.summary({"steps": 60_000})
    assert len(said) == 1
    steps = [record.event.step for record in read_events(run.path)]  # type: ignore[union-attr]
    assert 0 < len(steps) < 60_000 and steps == list(range(len(steps)))


def test_a_result_that_no_place_takes_fails_the_run_and_names_all_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_fallback_folders", lambda: [tmp_path / "missing"])
    with pytest.raises(pr.PolyrhythmError) as failure:
        pr.run(Disturbed(tmp_path / "it", "deleted"), strategy="async", runs=tmp_path, name="it", threads=1)
    message = str(failure.value)
    assert message.startswith(f"the final parameters could not be written to {tmp_path / 'it'} (No such file")
    assert f", nor to {tmp_path / 'missing'} (No such file" in message and "\n" not in message


@pytest.mark.slow
def test_the_summary_on_the_screen_names_the_place_of_the_parameters(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom tests.record.test_unwritable import Disturbed\n"
        f"Disturbed(Path({str(tmp_path / 'runs' / 'it')!r}), 'deleted')()\n"
    )
    command = [sys.executable, "-m", "polyrhythm", "run", str(script), "-s", "async", "--name", "it"]
    environment = os.environ | {"PYTHONPATH": str(Path(pr.__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path / "polyrhythm-it" / "consensus.safetensors"
    assert f"parameters: {path}, because the run folder could not be written" in done.stderr.splitlines()
    assert path.is_file() and done.stderr.count("cannot write to the run folder") == 1
