"""threshold: pulses and residual are what there was, residuals are bounded, and tau moves as it should."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.compress import feedback
from polyrhythm.compress.codecs.threshold import AdaptedTau, Threshold
from polyrhythm.compress.kernels import selection
from polyrhythm.compress.state import CodecState
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import parse_codec

PATIENT = settings(deadline=None)  # the first call compiles
KINDS = [torch.float32, torch.float64]


def sent(codec: Threshold, values: torch.Tensor, state: CodecState) -> torch.Tensor:
    """What a receiver gets."""
    got = torch.zeros_like(values)
    codec.decode(feedback.encode(codec, values, state), got)
    state.sent()
    return got


def noise(size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype).normal_(generator=torch.Generator().manual_seed(seed))


@given(
    size=st.sampled_from((1, 100, 5000)),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(KINDS),
    power=st.integers(-60, 20),
    spread=st.sampled_from((0.3, 1.0, 30.0, 1e5)),
    pulses=st.sampled_from(("one", "many")),
)
@PATIENT
def test_threshold_pulses_plus_residual_equal_the_input_exactly(size, seed, dtype, power, spread, pulses):
    """Bit for bit if tau is a power of two: then no difference rounds while |r| < 2^24 tau."""
    tau = 2.0**power
    codec, state = Threshold(tau, pulses=pulses), CodecState.alone(count=size, dtype=dtype)
    for step in range(3):
        gradient = noise(size, seed + step, dtype) * (tau * spread)
        before = state.residual + gradient
        got = sent(codec, gradient, state)
        assert torch.equal(got + state.residual, before)
        assert (got.abs() <= tau).all() if pulses == "one" else (state.residual.abs() < tau).all()
        assert torch.equal(got != 0, before.abs() >= tau)


@pytest.mark.parametrize("dtype", KINDS)
def test_threshold_sent_plus_residual_equals_the_sum_for_any_tau(dtype):
    codec, state = Threshold(1e-3, exact=False, pulses="many"), CodecState.alone(count=1000, dtype=dtype)
    given_, got = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for step in range(100):
        gradient = noise(1000, step, dtype) * 2e-3
        given_ += gradient
        got += sent(codec, gradient, state)
    assert codec.tau_for(state) == selection.single(1e-3) != 1e-3
    assert torch.allclose(got + state.residual, given_, rtol=0, atol=1e-7)


def test_one_pulse_keeps_up_with_updates_of_tau_at_most():
    """|r| <= tau forever if |u| <= tau; if not, the residual grows without bound."""
    codec = Threshold(0.25)
    slow, fast = CodecState.alone(count=1000), CodecState.alone(count=1000)
    for step in range(60):
        sent(codec, noise(1000, step).clamp(-1, 1) * 0.25, slow)
        assert slow.residual.abs().max() <= 0.25
        sent(codec, torch.full((1000,), 0.3), fast)
    assert fast.residual.min() > 10 * 0.25 * 0.2


def test_many_pulses_keep_up_with_anything():
    codec, state = Threshold(0.25, pulses="many"), CodecState.alone(count=1000)
    for step in range(30):
        sent(codec, noise(1000, step) * 10 ** (step % 5), state)
        assert state.residual.abs().max() < 0.25


def test_threshold_limits_pulses_to_24_bits_and_ignores_nan():
    """What is beyond 2^24 of them waits; what is not a number is not taken."""
    for pulses in ("one", "many"):
        state = CodecState.alone(count=4)
        got = sent(Threshold(1.0, pulses=pulses), torch.tensor([1e30, math.nan, -3.0, 0.5]), state)
        assert got[0] == (1.0 if pulses == "one" else (1 << 24) - 1)
        assert got[1:].tolist() == [0.0, -1.0 if pulses == "one" else -3.0, 0.0]


@given(st.floats(1e-20, 1e20))
@PATIENT
def test_the_power_of_two_next_to_tau_is_used(tau):
    used = Threshold(tau).tau_for(CodecState.alone(count=1))
    assert math.frexp(used)[0] == 0.5 and abs(math.log2(used / tau)) <= 0.5 + 1e-9


# tau that adapts.


def steps(codec: Threshold, gradients) -> list[float]:
    state = None
    taus = [codec.tau]
    for gradient in gradients:
        state = state or CodecState.alone(count=len(gradient))
        state.residual.zero_()  # so that the share that is sent is that of the gradient
        sent(codec, gradient, state)
        taus.append(state.own(AdaptedTau).tau)
    return taus


def test_tau_falls_when_too_little_is_sent_and_rises_when_too_much():
    """DL4J's rule in the direction of its code, which its documentation has backwards."""
    codec = Threshold(1e-3, adaptive=True)
    quiet = steps(codec, [torch.zeros(1000)] * 40)
    assert all(b < a for a, b in pairwise(quiet))
    loud = steps(codec, [torch.ones(1000)] * 40)
    assert all(b > a for a, b in pairwise(loud))
    for taus in (quiet, loud):
        for early, late in zip(taus, taus[20:], strict=False):
            assert max(early / late, late / early) == pytest.approx(2)


def test_tau_stays_within_the_band():
    gradient = torch.zeros(10_000)
    for share in (1, 50, 100):
        gradient[:share] = 1.0
        assert steps(Threshold(1e-3, adaptive=True), [gradient] * 10) == [1e-3] * 11
    gradient[:101] = 1.0
    assert steps(Threshold(1e-3, adaptive=True), [gradient])[-1] > 1e-3


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("start", [1e-6, 10.0, 100.0])
def test_tau_finds_the_band(start, exact):
    """From far above and far below, on gradients that stay as they are; and then it rests."""
    codec = Threshold(start, adaptive=True, low=1e-3, exact=exact)
    state, shares, used = CodecState.alone(count=10_000), [], set()
    for step in range(800):
        if step >= 700:
            used.add(codec.tau_for(state))
        shares.append(float((sent(codec, noise(10_000, step), state) != 0).float().mean()))
    assert 1e-3 <= sum(shares[-100:]) / 100 <= 1e-2
    assert len(used) == 1 or not exact


def test_tau_stays_in_range_however_long_nothing_comes():
    codec, state = Threshold(1e-3, adaptive=True), CodecState.alone(count=10)
    state.own(AdaptedTau).tau = 2.0**-100
    sent(codec, torch.zeros(10), state)
    assert state.own(AdaptedTau).tau == 2.0**-100


def test_threshold_with_a_fixed_tau_stores_no_tau():
    state = CodecState.alone(count=10)
    sent(Threshold(), torch.ones(10), state)
    assert not state.own(AdaptedTau).tau


def test_warm_up_begins_at_a_64th_of_tau():
    codec, state = Threshold(0.5, warmup=6, adaptive=True), CodecState.alone(count=10)
    taus = []
    for _ in range(8):
        taus.append(codec.tau_for(state))
        assert bool(state.own(AdaptedTau).tau) == (state.count > 6)  # it adapts when it is warm
        sent(codec, torch.ones(10), state)
    assert taus[:7] == [0.5 / 2**left for left in range(6, -1, -1)]


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_threshold_reply_codec_chooses_its_own_tau(size: float):
    """Parameters have another size than gradients: the largest changes go, in multiples, whatever tau is."""
    codec = Threshold(0.25, high=0.05, warmup=5).for_replies()
    theirs, mine = torch.zeros(1000), noise(1000, 0) * size
    codec.decode(feedback.encode(codec, mine - theirs, CodecState.alone(count=1000, feedback=False)), theirs)
    sent = theirs != 0
    assert 50 <= sent.sum() <= 350  # the power of two below lets more through
    assert (mine - theirs)[sent].abs().max() < mine[sent].abs().min()
    assert mine[~sent].abs().max() <= mine[sent].abs().min()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("threshold:0", "tau"),
        ("threshold:-1", "tau"),
        ("threshold:inf", "tau"),
        ("threshold:0.1,low=0.5", "low"),
        ("threshold:0.1,feedback=no", "feedback"),
        ("threshold:0.1,warmup=-2", "warmup"),
        ("threshold:0.1,pulses=two", "one or many"),
    ],
)
def test_threshold_refuses_invalid_settings(text, why):
    with pytest.raises(UsageError, match=why):
        parse_codec(text)
