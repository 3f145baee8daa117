"""The file of the final parameters."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

from polyrhythm.core.errors import UsageError
from polyrhythm.session import result


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


def test_a_type_that_the_format_does_not_have_is_named() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("waves", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(UsageError, match=r"waves is torch\.complex128"):
        result.safetensors(model)
