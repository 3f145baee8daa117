"""The file of the final parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import polyrhythm as pr
from polyrhythm.session import result
from tests.support.programs import trained
from tests.support.runs import WORLDS, run_in


class Model(nn.Module):
    """Tensors of every type, large and small, tied, empty and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.norm = nn.Linear(300, 200), nn.BatchNorm1d(5)
        self.tied = self.large
        self.short = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer('a "quoted" näme', torch.tensor([True, False]))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("transposed", torch.randn(3, 4).t())
        for dtype in result._NAMES:
            self.register_buffer(str(dtype).replace(".", "_"), torch.ones(3).to(dtype))


def test_the_file_has_the_bytes_that_the_library_would_write() -> None:
    model = Model()
    parts = result.safetensors(model)
    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    assert b"".join(part.numpy().tobytes() for part in parts) == safetensors.torch.save(state)
    assert model.large.weight.data_ptr() in {part.data_ptr() for part in parts}
    assert len(parts) < 8


class Unusual(nn.Module):
    """A model with state that the format cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("waves", torch.zeros(1, dtype=torch.complex128))
        self.register_buffer("eye", torch.eye(2).to_sparse())

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_a_note_names_what_the_file_leaves_out() -> None:
    model = Unusual()
    note = result.left_out(model)
    entries = "waves (torch.complex128), eye (torch.sparse_coo), _extra_state (dict)"
    assert note == f"consensus.safetensors leaves out what its format cannot hold: {entries}"
    model.register_buffer("nothing", torch.empty(1, device="meta"))
    assert (result.left_out(model) or "").endswith(" and 1 more")
    assert result.left_out(Model()) is None
    file = b"".join(part.numpy().tobytes() for part in result.safetensors(model))
    assert safetensors.torch.load(file).keys() == {"layer.weight", "layer.bias"}


def test_conjugate_and_negative_views_are_written_with_their_values() -> None:
    model = nn.Module()
    model.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
    model.register_buffer("negative", torch.tensor([1 + 2j]).conj().imag)
    file = b"".join(part.numpy().tobytes() for part in result.safetensors(model))
    state = safetensors.torch.load(file)
    assert (state["conjugate"].item(), state["negative"].item()) == (1 - 2j, -2)


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_says_once_what_the_file_leaves_out(
    world: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def main() -> None:
        session = pr.init()
        model, optimizer = Unusual(), torch.optim.SGD
        session.prepare(model, optimizer(model.parameters(), lr=0.1))
        print("prepared", file=sys.stderr)

    summary = run_in(world, main, strategy="allreduce", workers=2, runs=tmp_path)
    error = capfd.readouterr().err
    assert error.count("leaves out") == 1 and error.index("leaves out") < error.index("prepared")
    assert trained(summary).keys() == {"layer.weight", "layer.bias"}
