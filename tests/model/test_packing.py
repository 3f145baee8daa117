"""Nested state as tensors: what comes out is what went in, and bad bytes are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from polyrhythm.core.errors import WireError
from polyrhythm.model.packing import pack, unpack

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
tensors = some.builds(
    lambda shape, dtype: (torch.arange(math.prod(shape)) % 2).reshape(shape).to(dtype),
    some.lists(some.integers(0, 3), max_size=3),
    some.sampled_from(DTYPES),
)
plain = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text()
keys = some.text() | some.integers() | some.tuples(some.integers(), some.text())
states = some.recursive(
    plain | tensors,
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.lists(inner, max_size=3).map(tuple)
        | some.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


@given(states)
def test_unpacked_state_equals_the_packed_one(state: Any) -> None:
    """Types, order of keys and bits; and everything that travels is a flat tensor."""
    packed = pack(state)
    assert all(part.dim() == 1 for part in packed)
    assert alike(unpack(packed), state)


def test_unpacked_tensors_do_not_share_memory() -> None:
    vector = torch.zeros(3)
    again = unpack(pack({"vector": vector}))["vector"]
    again.fill_(1.0)
    assert vector.sum() == 0


def test_only_plain_values_are_packed() -> None:
    with pytest.raises(TypeError, match="tensors and plain values, not object"):
        pack([object()])


@pytest.mark.parametrize(
    "packed",
    [
        [],
        [torch.tensor([1, 2, 3], dtype=torch.uint8)],
        [torch.frombuffer(bytearray(b'{"tensor": 0, "shape": [1]}'), dtype=torch.uint8)],
        [torch.frombuffer(bytearray(b'{"other": 1}'), dtype=torch.uint8)],
        [torch.frombuffer(bytearray(b'{"tensor": 0, "shape": [2]}'), dtype=torch.uint8), torch.zeros(3)],
        [torch.frombuffer(bytearray(b'{"dict": [1]}'), dtype=torch.uint8)],
    ],
)
def test_bad_bytes_are_refused(packed: list[Tensor]) -> None:
    with pytest.raises(WireError, match="not a packed state"):
        unpack(packed)
