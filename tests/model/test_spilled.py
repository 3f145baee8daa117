"""Parameters that are kept in a file while a script builds its model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyrhythm.core.errors import UsageError
from polyrhythm.model.spilled import SMALL, SpilledParameters, paging

RESIDENT = 1 << 16


@contextmanager
def spilled() -> Iterator[SpilledParameters]:
    kept = SpilledParameters(RESIDENT)
    kept.start()
    try:
        yield kept
    finally:
        kept.close(())


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))


def initialized() -> nn.Module:
    model = mlp()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.orthogonal_(parameter)
    with torch.no_grad():
        model[3][0].weight[5] = 1.0
        model[4][0].weight.data.mul_(2).add_(torch.randn(64, 64))
        model[5][0].weight.numpy()[0] = 3.0
    return model


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 4)


def tied() -> nn.Module:
    model = nn.Sequential(mlp(), nn.LSTM(64, 64), nn.Linear(64, 64))
    model[2].weight = model[0][0][0].weight
    return model.double()


def lazy() -> nn.Module:
    model = nn.Sequential(mlp(), nn.LazyLinear(200))
    model(torch.randn(2, 64))
    return model


def loaded() -> nn.Module:
    model, other = mlp(), mlp()
    model.load_state_dict({name: each + 1 for name, each in other.state_dict().items()})
    return nn.Sequential(model, copy.deepcopy(other))


def trained() -> nn.Module:
    """A script may train before it calls `prepare`; backward passes use parameters, too."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("build", [mlp, initialized, transformer, tied, lazy, loaded, trained])
def test_a_model_that_is_built_in_a_file_has_the_same_bits(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    expected, drawn = build().state_dict(), torch.rand(3)
    torch.manual_seed(0)
    with spilled() as kept:
        model = build()
        assert torch.equal(torch.rand(3), drawn)
        kept.stop()
        assert in_memory(model) < sum(each.nbytes for each in expected.values()) / 2
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def in_memory(model: nn.Module) -> int:
    return sum(each.untyped_storage().nbytes() for each in {*model.parameters()})


def test_operations_may_use_the_parameters_until_the_model_is_prepared() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(3, 64), mlp()
    expected = model(x)
    torch.manual_seed(0)
    torch.randn(3, 64)
    with spilled() as kept:
        built = mlp()
        kept.stop()
        with paging():
            assert torch.equal(built(x), expected)
        exported = torch.export.export(built, (x,), strict=False)  # needs no data
        assert in_memory(built) <= RESIDENT + 24 * SMALL
    assert torch.equal(exported.module()(x), expected)


def test_what_others_use_without_operations_stays_in_memory() -> None:
    with spilled():
        first = nn.Parameter(torch.zeros(1 << 14))
        view: np.ndarray = first.detach().numpy()
        others = [nn.Parameter(torch.ones(1 << 14)) for _ in range(9)]
        view[:] = 7.0
        assert len(others) == 9
    assert bool((first == 7).all())


def test_parameters_of_other_workers_are_not_read() -> None:
    kept = SpilledParameters(RESIDENT)
    kept.start()
    model, other = mlp(), mlp()
    mine, theirs = model[0][0].weight, model[1][0].weight
    held = theirs  # as in a list of the script
    kept.close([theirs])
    assert bool(held.isnan().all()) and theirs.untyped_storage().nbytes() < 64
    assert not bool(mine.isnan().any()) and not any(bool(each.isnan().any()) for each in other.parameters())


def test_memory_that_is_shared_with_a_parameter_of_another_worker_is_read() -> None:
    kept = SpilledParameters(RESIDENT)
    kept.start()
    model = mlp()
    mine, theirs = nn.Parameter(model[0][0].weight.data), model[0][0].weight
    expected = mine.detach().clone()
    model[1:](torch.randn(2, 64))  # other parameters take its place in memory
    kept.close([theirs])
    assert mine.untyped_storage().nbytes() == mine.nbytes
    assert torch.equal(mine, expected) and bool(theirs.isnan().all())


def test_memory_of_parameters_that_are_gone_is_not_kept() -> None:
    with spilled() as kept:
        for _ in range(40):
            nn.Parameter(torch.zeros(1 << 13))
        assert len(kept._pages) <= 1 + RESIDENT // (4 << 13)


def test_prepare_inside_a_mode_is_refused() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with spilled() as kept, Mode(), pytest.raises(UsageError, match="end the mode before"):
        kept.stop()


def test_a_default_device_may_be_set_while_the_model_is_built() -> None:
    with spilled() as kept:
        with torch.device("meta"):
            model: Tensor = nn.Linear(64, 64).weight
        torch.set_default_device("cpu")
        kept.stop()
        torch.set_default_device(None)
    assert model.is_meta
