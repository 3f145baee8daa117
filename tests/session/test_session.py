"""The session: alone it changes nothing; in a run it counts epochs and keeps the model apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def test_prepare_without_a_run_returns_the_same_objects(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain PyTorch: prepare gives back what it got, epochs count, log prints a line."""
    session, given = pr.init(), parts()
    assert all(one is other for one, other in zip(session.prepare(*given), given, strict=True))
    assert list(session.epochs(3)) == [0, 1, 2]
    session.log(epoch=1, loss=torch.tensor(0.25))
    assert capsys.readouterr().out == "epoch 1  loss 0.25\n"


def test_consensus_without_a_run_is_an_independent_copy() -> None:
    """Evaluating it neither turns dropout off in training nor sees later steps."""
    session, (model, optimizer, loader) = pr.init(), parts()
    session.prepare(model, optimizer, loader)
    seen = session.consensus().eval()
    assert model.training and seen is not model
    before = seen[0].weight.clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(seen[0].weight, before)
    assert torch.equal(session.consensus()[0].weight, before + 1) and session.consensus().training


def epochs() -> None:
    session = pr.init()
    model, optimizer, loader = session.prepare(*parts())
    counted = []
    for epoch in session.epochs(3):
        counted.append(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    session.log(epochs=str(counted), workers=session.workers)


@pytest.mark.parametrize("world", [pr.run, pr.simulate])
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_epochs_count_in_a_run(world: Any, strategy: str) -> None:
    """`session.epochs(n)` is `range(n)` for a worker that is there from the start."""
    summary = world(epochs, workers=2, strategy=strategy, runs=None)
    assert summary["metrics"] == {"epochs": "[0, 1, 2]", "workers": 2}
    assert summary["samples"] == 3 * 8


@pytest.mark.parametrize("world", [pr.run, pr.simulate])
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_later_init_returns_the_session_of_the_run(world: Any, strategy: str) -> None:
    """A helper module may call it too: its exchanges are those of the script."""

    def main() -> None:
        first = pr.init()
        model, optimizer, loader = first.prepare(*parts())
        assert first.gather(first.rank) == [0, 1]
        later = pr.init()
        assert later is first and later.gather(10 * later.rank) == [0, 10]
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert pr.init().mean(later.rank) == 0.5

    world(main, workers=2, strategy=strategy, runs=None)


@pytest.mark.parametrize("world", [pr.run, pr.simulate])
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_run_trains_once(world: Any, strategy: str) -> None:
    """The second fold of a cross-validation would go on from the parameters of the first on the servers."""

    def main() -> None:
        for _ in range(2):
            session = pr.init()
            model, optimizer, loader = session.prepare(*parts())
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    main()  # alone each fold has a session of its own
    with pytest.raises(
        pr.UsageError, match="a run trains once, so train each fold or seed in a run of its own"
    ):
        world(main, workers=2, strategy=strategy, runs=None)


def test_a_later_init_cannot_ask_for_something_else() -> None:
    def main(*later: str | None) -> None:
        pr.init("local:4", batch_norm="mean")
        pr.init(*later[:1], batch_norm=later[1])
        pr.init().prepare(*parts())

    for same in ((None, None), ("local:4", "mean")):
        pr.simulate(lambda same=same: main(*same), workers=2)
    with pytest.raises(
        pr.UsageError, match="called with async, and before with local:4: a run has one of them"
    ):
        pr.simulate(lambda: main("async", None), workers=2)
