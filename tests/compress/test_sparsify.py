"""topk and randomk: what is sent and what is kept is what there was, and no more goes than asked for."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.compress import feedback
from polyrhythm.compress.codecs.sparsify import RandomK, TopK
from polyrhythm.compress.kernels import selection
from polyrhythm.compress.state import CodecState
from polyrhythm.core.errors import UsageError, WireError
from polyrhythm.core.registry import parse_codec

PATIENT = settings(deadline=None)  # the first call compiles
KINDS = [torch.float32, torch.float64]
SIZES = st.sampled_from((1, 2, 7, 300, selection.SMALL + 3, 70_001))


@st.composite
def vectors(draw):
    """Gaussian, of very different magnitudes, of few different values, all equal, all zero or all but one."""
    size, dtype = draw(SIZES), draw(st.sampled_from(KINDS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    made = torch.empty(size, dtype=dtype).normal_(generator=generator)
    match draw(st.sampled_from(("gauss", "steep", "ties", "equal", "zero", "one"))):
        case "steep":
            made = made.sign() * 10 ** (4 * made)
        case "ties":
            made = made.mul(2).round()
        case "equal":
            made = made.sign() * 0.1
        case "zero":
            made.zero_()
        case "one":
            last = made[-1].item()
            made.zero_()[-1] = last
    return made * draw(st.sampled_from((1e-30, 1e-6, 1.0, 1e6)))


def sent(codec, values: torch.Tensor, state: CodecState) -> torch.Tensor:
    """What a receiver gets."""
    got = torch.zeros_like(values)
    codec.decode(feedback.encode(codec, values, state), got)
    state.sent()
    return got


def state_for(values: torch.Tensor, **more) -> CodecState:
    return CodecState.alone(count=len(values), dtype=values.dtype, **more)


@given(vectors(), vectors(), st.sampled_from(("fp16", "fp32")), st.sampled_from((1e-4, 0.01, 0.3, 1.0)))
@PATIENT
def test_topk_sent_values_plus_residual_equal_the_input_exactly(first, second, values, density):
    """Bit for bit: zeroing, or subtracting a value with fewer bits, rounds nothing."""
    codec, state = TopK(density, values=values), state_for(first)
    second = torch.resize_as_(second.to(first.dtype), first) if len(second) >= len(first) else first.flip(0)
    for update in (first, second):
        before, asked = state.residual + update, update.clone()
        got = sent(codec, update, state)
        assert torch.equal(got + state.residual, before)
        assert torch.equal(update, asked)
        if values == "fp32":
            assert ((got == 0) | (state.residual == 0)).all()


@given(vectors(), st.sampled_from((1, 3, 50, 1000, 10**5)))
@PATIENT
def test_exactly_the_largest_are_picked(values, count):
    """Of equal ones the first; never a zero."""
    count = min(count, len(values))
    order = np.lexsort((np.arange(len(values)), -values.abs().numpy()))[:count]
    wanted = np.sort(order[values.numpy()[order] != 0])
    assert selection.largest(values, count, exact=True).tolist() == wanted.tolist()


@given(vectors(), st.sampled_from((1, 3, 50, 1000, 10**5)))
@PATIENT
def test_a_sample_picks_some_of_the_largest(values, count):
    """No more than asked for, and none that is smaller than one that stays."""
    found = selection.largest(values, count, exact=False)
    assert len(found) <= count and (found.diff() > 0).all()
    if 0 < len(found) < len(values):
        rest = values.abs().clone()
        rest[found] = 0
        assert values.abs()[found].min() >= rest.max()


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("size", [70_001, 1_000_000])
@pytest.mark.parametrize("shape", ["gauss", "steep", "stripes"])
def test_a_sample_is_close_to_exact(density, size, shape):
    generator = torch.Generator().manual_seed(5)
    values = torch.empty(size).normal_(generator=generator)
    if shape == "steep":
        values = values.sign() * 10 ** (3 * values)
    if shape == "stripes":  # only every 64th is large: a sample at fixed distances would see all or none
        values[torch.arange(size) % 64 != 5] *= 1e-3
    count = round(size * density)
    assert 0.9 * count <= len(selection.largest(values, count, exact=False)) <= count


def test_exact_selection_corrects_a_sampled_threshold_that_is_too_high(monkeypatch):
    """Where the sample's threshold lets too few through, the vector's own is found."""
    values = torch.empty(100_000).normal_(generator=torch.Generator().manual_seed(6))
    monkeypatch.setattr(selection, "_aim", lambda length, count: (100, 1))
    assert len(selection.largest(values, 5000, exact=False)) < 1000
    found = selection.largest(values, 5000, exact=True)
    assert torch.equal(found, values.abs().topk(5000).indices.sort().values)


@pytest.mark.parametrize("codec", ["topk:0.01", "topk:0.2,values=fp32,pick=exact", "threshold:0.5",
                                   "threshold:0.3,pulses=many,exact=no", "randomk:0.1"])  # fmt: skip
@pytest.mark.parametrize("dtype", KINDS)
def test_tensor_operations_give_the_same_bits(codec, dtype, monkeypatch):
    """What tensors on other devices go through, and the same again: nothing is left to chance."""
    codec = parse_codec(codec)
    runs = []
    for compiled in (True, False, True):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(selection, "compiled", lambda tensor: False)
            generator = torch.Generator().manual_seed(7)
            state, into = CodecState.alone(count=50_000, dtype=dtype), torch.ones(50_000, dtype=dtype)
            codes = []
            for _ in range(4):
                codes.append(
                    feedback.encode(codec, torch.empty_like(into).normal_(generator=generator), state)
                )
                codec.decode(codes[-1], into, -0.3)
                state.sent()
            runs.append((codes, state.residual, into))
    for codes, residual, into in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(codes, runs[0][0], strict=True))
        assert torch.equal(residual, runs[0][1]) and torch.equal(into, runs[0][2])


@pytest.mark.parametrize("codec", [TopK(0.01), TopK(0.01, pick="exact"), TopK(0.5, values="fp32")])
@pytest.mark.parametrize("backend", ["compiled", "tensor operations"])
def test_topk_of_nan_values_terminates_and_sends_finite_values(codec, backend, monkeypatch):
    if backend != "compiled":
        monkeypatch.setattr(selection, "compiled", lambda tensor: False)
    for share in (0.001, 0.5, 1.0):
        values = torch.empty(50_000).normal_(generator=torch.Generator().manual_seed(8))
        values[: int(share * len(values))] = math.nan
        got = sent(codec, values, state_for(values))
        assert got.isfinite().all()


def test_topk_sent_plus_residual_equals_the_gradient_sum_over_many_steps():
    """Over many steps only the sums of residuals and gradients round."""
    generator = torch.Generator().manual_seed(9)
    codec, state = TopK(0.05), CodecState.alone(count=2000)
    given_, got = torch.zeros(2000, dtype=torch.float64), torch.zeros(2000, dtype=torch.float64)
    for _ in range(200):
        gradient = torch.empty(2000).normal_(generator=generator)
        given_ += gradient
        got += sent(codec, gradient, state)
    assert torch.allclose(got + state.residual, given_, rtol=0, atol=1e-4)


@given(vectors())
@PATIENT
def test_a_density_of_one_sends_all_as_it_is(values):
    state = state_for(values)
    assert torch.equal(sent(TopK(1.0, values="fp32"), values, state), values)
    assert not state.residual.any()


def test_without_feedback_nothing_is_kept():
    values = torch.arange(1.0, 11.0)
    state = CodecState.alone(count=10, feedback=False)
    assert sent(TopK(0.1, feedback=False), values, state).tolist() == [0.0] * 9 + [10.0]
    assert state.residual is None


@pytest.mark.parametrize("codec", [TopK(0.001, warmup=4), RandomK(0.001, warmup=4)])
def test_warm_up_comes_down_to_the_density_by_equal_factors(codec):
    quotas = [codec.quota(10**6, count) for count in range(7)]
    assert quotas[0] == 250_000 and quotas[4:] == [1000] * 3
    assert [a / b for a, b in pairwise(quotas[:5])] == pytest.approx([250 ** (1 / 4)] * 4, rel=1e-3)


def test_a_quota_is_one_at_least():
    assert TopK(0.001).quota(10, 0) == 1 and TopK(1.0).quota(10, 0) == 10 and TopK(0.5).quota(0, 0) == 0
    assert feedback.encode(TopK(0.5), torch.zeros(0), CodecState.alone(count=0)).dtype == torch.uint8


@pytest.mark.parametrize(
    "text", ["topk:0", "topk:1.5", "randomk:-1", "topk:0.1,warmup=-1", "topk:0.1,values=fp8"]
)
def test_topk_and_randomk_refuse_invalid_settings(text):
    with pytest.raises(UsageError, match=text):
        parse_codec(text)


@pytest.mark.parametrize("codec", [TopK(), parse_codec("threshold")])
def test_sparse_codecs_refuse_malformed_codes(codec):
    for code in (torch.zeros(30), torch.zeros(30, dtype=torch.uint8), torch.zeros(3, 3, dtype=torch.uint8)):
        with pytest.raises(WireError):
            codec.decode(code, torch.zeros(10))


# Drawn by lot.


@given(vectors(), st.sampled_from((1e-4, 0.01, 0.3, 1.0)))
@PATIENT
def test_randomk_sent_values_plus_residual_equal_the_input_exactly(values, density):
    state = state_for(values)
    for _ in range(2):
        before = state.residual + values
        got = sent(RandomK(density), values, state)
        assert torch.equal(got + state.residual, before)
        assert (got != 0).sum() <= RandomK(density).quota(len(values), 0)


def test_randomk_workers_pick_the_same_entries_and_new_ones_each_step():
    """So the mean of their codes is the code of their mean; on another step other entries go."""
    codec, size = RandomK(0.1, feedback=False), 1000
    generator = torch.Generator().manual_seed(10)
    vectors_ = [torch.empty(size).normal_(generator=generator) for _ in range(3)]
    states = [CodecState.alone(count=size, feedback=False, seed=5, worker=rank) for rank in range(3)]
    drawn = []
    for _ in range(3):
        codes = [feedback.encode(codec, v, m) for v, m in zip(vectors_, states, strict=True)]
        mean, each = torch.zeros(size), torch.zeros(size)
        codec.decode(torch.stack(codes).mean(0), mean)
        for code in codes:
            codec.decode(code, each, 1 / 3)
        assert torch.allclose(mean, each, atol=1e-4)
        drawn.append(frozenset(mean.nonzero().view(-1).tolist()))
        for state in states:
            state.sent()
    assert len(set(drawn)) == 3


def test_randomk_without_feedback_is_unbiased():
    """Each entry within five deviations of itself, over 4,000 draws; sizes that do not divide evenly too."""
    codec, values = RandomK(0.3, feedback=False), torch.arange(1.0, 11.0, dtype=torch.float64)
    state = CodecState.alone(count=10, feedback=False, dtype=torch.float64)
    total, draws = torch.zeros(10, dtype=torch.float64), 4000
    for _ in range(draws):
        total += sent(codec, values, state)
    deviation = values * math.sqrt(3.0 / draws)  # a cell of at most 4: variance 3 times the square
    assert ((total / draws - values).abs() < 5 * deviation).all()


def test_answers_of_servers_are_not_scaled():
    """What an answer leaves out is in the next difference, so scaling would send it twice."""
    codec = RandomK(0.5, feedback=False).for_replies()
    got = sent(codec, torch.ones(10), CodecState.alone(count=10, feedback=False))
    assert set(got.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("workers", [2, 3, 7, 1000])
def test_randomk_seed_survives_averaging_of_the_codes(dtype, workers):
    """However it rounds."""
    for seed in range(20):
        code = feedback.encode(
            RandomK(0.1), torch.ones(50, dtype=dtype), CodecState.alone(count=50, dtype=dtype, seed=seed)
        )
        for mean in (
            code * workers / workers,
            code * workers * (1 / workers),
            sum([code / workers] * workers),
        ):
            got = torch.zeros(50, dtype=dtype)
            RandomK(0.1).decode(mean, got)
            assert (got != 0).sum() == 5


def test_randomk_refuses_a_mean_of_codes_with_different_seeds():
    codes = [
        feedback.encode(RandomK(0.1), torch.ones(50), CodecState.alone(count=50, seed=seed))
        for seed in range(2)
    ]
    with pytest.raises(WireError, match="out of step"):
        RandomK(0.1).decode((codes[0] + codes[1]) / 2, torch.zeros(50))
    for code in (torch.full((10,), math.nan), torch.zeros(3), torch.zeros(99), torch.full((10,), 1e9),
                 torch.zeros(10, dtype=torch.uint8)):  # fmt: skip
        with pytest.raises(WireError):
            RandomK(0.1).decode(code, torch.zeros(50))
    for place in range(10):  # a byte of the seed, or of its checksum
        damaged = codes[0].clone()
        damaged[place] = (damaged[place] + 1) % 256
        with pytest.raises(WireError, match="damaged"):
            RandomK(0.1).decode(damaged, torch.zeros(50))
