"""Both backends of quantizers give the same bits. And random draws, of which many are needed to judge."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from polyrhythm.compress import feedback
from polyrhythm.compress.kernels import dense
from polyrhythm.compress.kernels.dense import plain
from polyrhythm.core.codec import Codec
from polyrhythm.core.registry import parse_codec
from tests.support.combine import each_value, few
from tests.support.quantizers import ALL, FAIR, LENGTHS, WIDTHS, alone, drawn, sent, units

pytest.importorskip("numba")


def every(texts: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("text", texts)


def same(module: ModuleType, _: Tensor) -> ModuleType:
    return module


@every(ALL)
@each_value(
    ("dtype", [pytest.param(each, id=str(each)) for each in WIDTHS]), ("scale", [1.0, 1e-38, 1e-45, 1e37])
)
def test_compiled_and_plain_quantizers_give_the_same_bits(
    text: str, dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = dense._compiled()
    codec = parse_codec(text)
    for count in LENGTHS:
        ways = []
        for module in (compiled, plain):
            monkeypatch.setattr(dense, "backend", partial(same, module))
            state, into = alone(codec, torch.zeros(count, dtype=dtype)), drawn(count, dtype, seed=9)
            codes = []
            for seed in range(2):
                codes.append(feedback.encode(codec, drawn(count, dtype, seed, scale), state))
                state.sent()
                codec.decode(codes[-1], into, 0.7)
            ways.append([*codes, into, *([] if state.residual is None else [state.residual])])
        for one, two in zip(*ways, strict=True):
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def test_quantizers_warn_once_and_use_tensor_operations_without_numba(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("compiled", "loops"):
        monkeypatch.delattr(dense, name, raising=False)
        monkeypatch.delitem(sys.modules, f"{dense.__name__}.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    dense._compiled.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match="five times slower on a CPU without numba, which is not installed"
        ):
            assert dense.backend(torch.zeros(1)) is plain
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            assert dense.backend(torch.zeros(1)) is plain
    finally:
        dense._compiled.cache_clear()


@few("text", FAIR, quick=2)
def test_stochastic_quantizers_are_unbiased(text: str) -> None:
    """A z-test of 10,000 draws for each of 24 numbers, over streams; another one over indexes."""
    codec = parse_codec(text)
    values = drawn(24)
    values[0], values[1] = 1e-3, -0.02
    state, draws = alone(codec, values, feedback=False), 10_000
    total = torch.zeros(24).double()
    for _ in range(draws):
        total += sent(codec, values, state)
    assert_fair(codec, values, total / draws, draws)

    if codec.name != "terngrad":
        # Blocks of the same numbers, so that all have the same unit.
        block = codec.block  # type: ignore[attr-defined]
        values = drawn(block, seed=1)
        many = values.repeat(draws)
        got = sent(codec, many, alone(codec, many, feedback=False))
        assert_fair(codec, values, got.view(draws, block).double().mean(0), draws)


def assert_fair(codec: Codec, values: Tensor, mean: Tensor, draws: int) -> None:
    unit = units(codec, values).double()
    share = (values.double().abs() / unit).frac()  # how likely it is to be rounded up
    spread = unit * ((share * (1 - share)).clamp_min(1 / draws) / draws).sqrt()
    assert float(((mean - values).abs() / spread).max()) < 4.5
