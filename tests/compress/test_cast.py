"""Numbers rounded to 16 bits: those beyond the range become the largest, and what is infinite stays so."""

from __future__ import annotations

import math

import pytest
import torch

from polyrhythm.compress.state import CodecState
from polyrhythm.core.registry import parse_codec


@pytest.mark.parametrize(("text", "most"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fp16_and_bf16_clamp_finite_values_and_keep_inf_and_nan(
    text: str, most: float, dtype: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([3.4e38, -3.4e38, largest, -largest, most, 1.0, math.inf, -math.inf], dtype=dtype)
    code = parse_codec(text).encode(values, CodecState.alone(8, feedback=False))
    assert code.tolist() == [most, -most, most, -most, most, 1.0, math.inf, -math.inf]
    assert math.isnan(parse_codec(text).encode(torch.tensor([math.nan]), CodecState.alone(1, feedback=False)))


@pytest.mark.parametrize(("text", "bits"), [("fp16", 11), ("bf16", 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_nearest_is_sent(text: str, bits: int, dtype: torch.dtype) -> None:
    """So many bits of precision: off by half of the last one at most, as often up as down."""
    codec = parse_codec(text)
    values = torch.randn(10_000, dtype=dtype, generator=torch.Generator().manual_seed(0))
    got = torch.zeros_like(values)
    codec.decode(codec.encode(values, CodecState.alone(10_000, feedback=False)), got)
    error = (got - values) / values.abs()
    assert error.abs().max() <= 2.0**-bits and error.abs().max() > 0.9 * 2.0**-bits
    assert abs((got.abs() > values.abs()).double().mean() - 0.5) < 0.02


@pytest.mark.parametrize("text", ["fp16", "bf16"])
def test_decoding_adds_times_a_scale(text: str) -> None:
    codec, into = parse_codec(text), torch.ones(3)
    codec.decode(
        codec.encode(torch.tensor([1.0, -2.0, 0.5]), CodecState.alone(3, feedback=False)), into, 0.25
    )
    assert into.tolist() == [1.25, 0.5, 1.125]
