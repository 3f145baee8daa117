"""Each simulated node has its own copies of the script's modules, as processes have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import polyrhythm as pr
from polyrhythm.core.registry import load_builtins
from polyrhythm.core.strategy import Strategy
from polyrhythm.record.reader import read_metrics
from tests.support.runs import WORLDS, run_in

HELPER = """
calls = 0

def count():
    global calls
    calls += 1
    return calls
"""
SCRIPT = """
import pickle
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
import package.part
from package import helper
from polyrhythm.core.worker import Worker

steps = 0


class Net(nn.Linear):
    made = 0


@dataclass(frozen=True)
class Mine(pr.Strategy):
    name: ClassVar[str] = "mine"
    seen = []

    def worker(self, node, replica, group):
        return Alone(self, node, replica, group)


class Alone(Worker):
    def step(self):
        from package import helper as again  # imported while other nodes are in the middle of a step

        self.group.all_reduce(*self.replica.gradient, op="mean")
        from package import part

        assert again is helper and part.helper is helper
        Mine.seen.append(self.node.rank)
        self.replica.apply()


def main():
    global steps
    session = pr.init(Mine())
    assert type(session.strategy) is Mine
    model = Net(1, 1)
    Net.made += 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=1)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        package.part.helper.count()
    from package import late

    late.items.append(session.rank)
    assert pickle.loads(pickle.dumps(Net)) is Net
    session.log(made=Net.made, steps=steps, calls=helper.calls, seen=str({*Mine.seen}), late=str(late.items))


if __name__ == "__main__":
    main()
"""


def written(folder: Path) -> Path:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text(HELPER)
    (package / "part.py").write_text("from package import helper")
    (package / "late.py").write_text("items = []")
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


@pytest.mark.parametrize("world", WORLDS)
def test_state_in_modules_belongs_to_one_worker(world: str, tmp_path: Path) -> None:
    """Counters in the script, in its modules and in its classes count the steps of one worker alone."""
    load_builtins()
    before, known = {*sys.modules}, dict(Strategy.registry)
    path, main, finders = [*sys.path], sys.modules["__main__"], [*sys.meta_path]
    try:
        summary = run_in(world, written(tmp_path), workers=3, strategy=None, runs=tmp_path)
    finally:
        sys.path[:] = path
    for line in read_metrics(summary["folder"]):
        rank = str(line["node"]).removeprefix("worker ")
        found = {name: line[name] for name in ("made", "steps", "calls", "seen", "late")}
        assert found == {"made": 1, "steps": 4, "calls": 4, "seen": f"{{{rank}}}", "late": f"[{rank}]"}
    assert sys.modules["__main__"] is main and sys.meta_path == finders
    assert dict(Strategy.registry) == known
    assert not {name for name in {*sys.modules} - before if name.startswith("package")}


def test_modules_of_the_caller_are_hidden_and_come_back(tmp_path: Path, monkeypatch: Any) -> None:
    """A module that the caller has imported already is imported again by each node, and stays as it was."""
    script = written(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    from package import helper  # type: ignore[import-not-found]

    try:
        helper.count()
        pr.simulate(script, workers=2)
        assert sys.modules["package.helper"] is helper and helper.calls == 1
    finally:
        for name in [name for name in sys.modules if name.startswith("package")]:
            del sys.modules[name]


def test_installed_packages_are_shared(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch, numpy, polyrhythm as pr\n"
        "from torch import nn\n"
        "session = pr.init()\n"
        "torch.shared_by_test = [*getattr(torch, 'shared_by_test', []), session.rank]\n"
        "model = nn.Linear(1, 1)\n"
        "session.prepare(model, torch.optim.SGD(model.parameters()))\n"
    )
    import torch

    pr.simulate(tmp_path / "script.py", workers=2)
    try:
        assert sorted(torch.shared_by_test) == [0, 1]  # type: ignore[attr-defined]
    finally:
        del torch.shared_by_test  # type: ignore[attr-defined]
