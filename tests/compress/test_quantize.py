"""The laws of quantizers: what is sent and what is kept, fair lots, votes, and bytes nobody can trust."""

from __future__ import annotations

import math
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from polyrhythm.compress import feedback
from polyrhythm.compress.codecs.quantize import HEADER
from polyrhythm.compress.compressor import Decompressor
from polyrhythm.compress.kernels import dense
from polyrhythm.compress.kernels.dense import plain
from polyrhythm.compress.reducers import reducer_for
from polyrhythm.compress.state import CodecState
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError, WireError
from polyrhythm.core.registry import parse_codec
from polyrhythm.integrations.bucket_state import BucketLayout
from tests.support.quantizers import ALL, FAIR, LENGTHS, NEAREST, WIDTHS, alone, decoded, drawn, sent, units

widths = pytest.mark.parametrize("dtype", WIDTHS, ids=["32", "64"])


def every(texts: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("text", texts)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every law holds for both backends."""
    if request.param == "plain":
        monkeypatch.setattr(dense, "backend", lambda _: plain)
    else:
        pytest.importorskip("numba")
    return request.param


# --- what is sent and what is kept ------------------------------------------------------------------


@every(NEAREST)
@widths
@settings(max_examples=60, deadline=None)
@given(data=some.data())
def test_nearest_quantizers_sent_plus_residual_equal_the_input_exactly(
    text: str, dtype: torch.dtype, data: some.DataObject
) -> None:
    codec = parse_codec(text)
    numbers = some.floats(width=8 * dtype.itemsize, allow_nan=False, allow_infinity=False)  # type: ignore[arg-type]
    values = torch.tensor(data.draw(some.lists(numbers, max_size=40)), dtype=dtype)
    state = alone(codec, values)
    got = sent(codec, values, state)
    assert state.residual is not None
    assert torch.equal(got + state.residual, values)
    assert bool(got.isfinite().all())


@every(NEAREST)
@widths
def test_nearest_quantizers_sent_plus_residual_is_exact_over_many_steps(
    text: str, dtype: torch.dtype
) -> None:
    """Each step exactly; all of them together as far as sums of floats go."""
    codec, count = parse_codec(text), 3001
    state, total, told = (
        alone(codec, torch.zeros(count, dtype=dtype)),
        torch.zeros(count),
        torch.zeros(count),
    )
    total, told = total.double(), told.double()
    assert state.residual is not None
    for step in range(30):
        values = drawn(count, dtype, step, scale=10.0 ** (step % 5))
        meant = state.residual + values
        got = sent(codec, values, state)
        assert torch.equal(got + state.residual, meant)
        total, told = total + values, told + got
    rounding = 30 * torch.finfo(dtype).eps * 1e5
    assert (told + state.residual - total).abs().max() < rounding


@every([*FAIR, "sign", "terngrad"])
@widths
def test_stochastic_and_sign_quantizers_keep_the_residual_to_rounding(text: str, dtype: torch.dtype) -> None:
    codec, values = parse_codec(text), drawn(3001, dtype)
    state = alone(codec, values, feedback=True)
    got = sent(codec, values, state)
    assert state.residual is not None
    larger = torch.maximum(got.abs(), values.abs())
    assert bool(((got + state.residual - values).abs() <= torch.finfo(dtype).eps * larger).all())


@every(ALL)
def test_without_feedback_sending_is_encoding(text: str) -> None:
    codec, values = parse_codec(text), drawn(1000)
    before = values.clone()
    first = feedback.encode(codec, values, alone(codec, values, feedback=False))
    assert torch.equal(first, codec.encode(values, alone(codec, values, feedback=False)))
    feedback.encode(codec, values, alone(codec, values))
    assert torch.equal(values, before)


def in_steps(codec: Codec, values: Tensor, state: CodecState) -> Tensor:
    """Encodes with feedback one operation after the other."""
    if state.residual is None:
        return codec.encode(values, state)
    return feedback.encode_in_three_passes(codec, values, state.residual, state)


@every(ALL)
def test_a_fused_send_is_the_plain_one(text: str) -> None:
    """Adding, coding and taking what was coded away again, one after the other, gives the same bits."""
    codec, values = parse_codec(text), drawn(3001)
    fused, steps = (alone(codec, values, feedback=not getattr(codec, "vote", False)) for _ in range(2))
    for seed in range(3):
        values = drawn(3001, seed=seed)
        assert torch.equal(feedback.encode(codec, values, fused), in_steps(codec, values, steps))
        if fused.residual is not None and steps.residual is not None:
            assert torch.equal(fused.residual, steps.residual)
        fused.sent(), steps.sent()


# --- how far off ------------------------------------------------------------------------------------


@every([text for text in NEAREST if "int" in text])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e37])
@widths
def test_nearest_is_off_by_half_a_unit(text: str, scale: float, dtype: torch.dtype) -> None:
    codec, values = parse_codec(text), drawn(3001, dtype, scale=scale)
    error = (decoded(codec, codec.encode(values, alone(codec, values)), values) - values).abs()
    assert bool((error <= units(codec, values) * (0.5 + 128 * torch.finfo(dtype).eps)).all())


@every(["int8", "int4"])
def test_all_levels_are_used(text: str) -> None:
    """2^b - 1 whole numbers in b bits each: with a unit of 1 all of them arrive as they are."""
    codec, top = parse_codec(text), {"int8": 127, "int4": 7}[text]
    values = torch.arange(-top, top + 1, dtype=torch.float32)
    code = codec.encode(values, alone(codec, values))
    assert torch.equal(decoded(codec, code, values), values)
    assert len(code) == HEADER + 4 + {"int8": 255, "int4": 8}[text]


@widths
def test_fp8_relative_error_is_at_most_one_sixteenth(dtype: torch.dtype) -> None:
    codec, values = parse_codec("fp8"), drawn(3001, dtype) ** 9
    error = (decoded(codec, codec.encode(values, alone(codec, values)), values) - values).abs()
    most = plain.spread(plain.largest(values, 256), 3001, 256)
    least = most / 224 * 2**-10  # half a subnormal, if the largest comes to 224
    assert bool((error <= torch.maximum(values.abs() / 16, least)).all())


@every([*FAIR, "int8", "int4:33", "sign"])
@widths
def test_quantization_error_is_below_one_unit_for_any_vector_length(text: str, dtype: torch.dtype) -> None:
    """Wherever a vector ends, each number is off by less than the unit of its own block."""
    codec = parse_codec(text)
    for count in LENGTHS:
        values = drawn(count, dtype) + 0.5
        got = decoded(codec, codec.encode(values, alone(codec, values)), values)
        unit = units(codec, values)
        if codec.name == "sign":
            torch.testing.assert_close(got, values.sign() * unit)
        else:
            assert bool(((got - values).abs() <= unit * 1.001).all())


@every([text for text in ALL if "vote" not in text])
@widths
def test_zeros_stay_zeros(text: str, dtype: torch.dtype) -> None:
    codec, values = parse_codec(text), torch.zeros(600, dtype=dtype)
    values[300] = -0.0
    for _ in range(2):
        assert not decoded(codec, codec.encode(values, alone(codec, values)), values).any()


@every([text for text in ALL if "vote" not in text])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, torch.float32) for size in (1e-45, 1e-38, 1e-20, 1e20, 1e38, 3.4028234e38)),
        *((size, torch.float64) for size in (1e-308, 1e-45, 1e38, 1e308)),
    ],
)
def test_quantizers_do_not_overflow_at_extreme_magnitudes(text: str, size: float, dtype: torch.dtype) -> None:
    """Nothing overflows, and what is sent is never larger than the norm of what was given."""
    values = torch.tensor([size, -size, size / 2, 0.0, -size / 3] * 60, dtype=torch.float64).to(dtype)
    codec = parse_codec(text)
    state = alone(codec, values, feedback=True)
    for _ in range(2):
        code = feedback.encode(codec, values, state)
        state.sent()
    got = decoded(codec, codec.encode(values, alone(codec, values)), values)
    assert len(code) > 8
    assert bool(got.isfinite().all())
    least = torch.finfo(dtype).tiny
    norm = values.double().div(size or 1).norm() * size
    assert float(got.abs().max()) <= max(float(norm) * 1.001, least)


@every(ALL)
@widths
def test_decoding_adds_times_a_scale(text: str, dtype: torch.dtype) -> None:
    codec, values, into = parse_codec(text), drawn(3001, dtype), drawn(3001, dtype, seed=1)
    code = codec.encode(values, alone(codec, values))
    got, before = decoded(codec, code, values), into.clone()
    codec.decode(code, into, -0.25)
    assert torch.equal(into, before - 0.25 * got)  # a power of two: both roundings are the same


# --- fair lots --------------------------------------------------------------------------------------


def test_stochastic_rounding_is_independent_across_elements_and_streams() -> None:
    codec = parse_codec("terngrad:0")
    values = torch.full((200_000,), 0.5)
    values[0] = 1.0
    first, again, other, later = (
        decoded(codec, codec.encode(values, state), values)[1:] - 0.5
        for state in (
            *(alone(codec, values, seed=7), alone(codec, values, seed=7)),
            *(alone(codec, values, seed=7, worker=1), stepped(alone(codec, values, seed=7))),
        )
    )  # fmt: skip
    assert torch.equal(first, again)
    bound = 4.5 / math.sqrt(len(first))  # each is ±½: products have mean 0 and spread ¼
    for one, two in [(first, other), (first, later), (first[1:], first[:-1]), (first[512:], first[:-512])]:
        assert abs(float((4 * one * two).mean())) < bound


def stepped(state: CodecState) -> CodecState:
    state.sent()
    return state


@every([*FAIR, "terngrad"])
def test_stochastic_rounding_depends_on_seed_worker_and_step_only(text: str) -> None:
    codec, values = parse_codec(text), drawn(500)

    def code(**origin: int) -> Tensor:
        return codec.encode(values, alone(codec, values, **origin))

    assert torch.equal(code(seed=3, worker=1), code(seed=3, worker=1))
    assert not torch.equal(code(seed=3, worker=1), code(seed=3, worker=2))
    assert not torch.equal(code(seed=3, worker=1), code(seed=4, worker=1))
    assert not torch.equal(code(), codec.encode(values, stepped(alone(codec, values))))


@pytest.mark.parametrize("levels", [1, 4, 16, 64])
@pytest.mark.parametrize("block", [8, 64, 512])
def test_the_variance_of_qsgd_is_bounded_as_in_the_paper(levels: int, block: int) -> None:
    codec = parse_codec(f"qsgd:{levels},block={block}")
    values = drawn(block).repeat(2000)
    got = decoded(codec, codec.encode(values, alone(codec, values)), values)
    variance = float((got - values).view(-1, block).square().sum(1).mean())
    bound = min(block / levels**2, math.sqrt(block) / levels) * float(values[:block].square().sum())
    assert variance <= bound


@pytest.mark.parametrize(("levels", "fixed"), [(1, 2), (4, 4), (16, 6), (64, 8), (128, 9)])
def test_rice_codes_come_close_to_the_entropy(levels: int, fixed: int) -> None:
    """In bits a number, units and k of the blocks and all; bits of a fixed width would be these."""
    codec, values = parse_codec(f"qsgd:{levels}"), drawn(1 << 17)
    whole = plain.levels(values, 512, levels, 0, torch.empty(1 << 8))
    share = torch.unique(whole, return_counts=True)[1] / len(values)
    entropy = float(-(share * share.log2()).sum())
    bits = 8 * len(codec.encode(values, alone(codec, values))) / len(values)
    assert entropy < bits < entropy + 0.25 < fixed
    assert levels != 64 or 3.5 < bits < 4


@pytest.mark.parametrize("places", [[], [0], [99_999], [32_766, 32_767, 32_768], [65_535], [3, 50_000]])
def test_qsgd_encodes_few_nonzeros_far_apart_in_few_bytes(places: list[int]) -> None:
    codec, values = parse_codec("qsgd:3,block=64"), torch.zeros(100_000)
    values[places] = torch.tensor([5.0, -4.0, 3.0])[: len(places)]
    code = codec.encode(values, alone(codec, values))
    assert len(code) < 8 + 4 * 1563 + 40
    got = decoded(codec, code, values)
    assert set(got.nonzero().view(-1).tolist()) <= set(places)
    if len(places) == 1:
        torch.testing.assert_close(got, values)


def test_terngrad_sends_three_values_clipped_at_a_multiple_of_sigma() -> None:
    values = drawn(10_000)
    sigma = float(values.square().mean().sqrt())
    for text, most in [("terngrad", 2.5 * sigma), ("terngrad:0", float(values.abs().max()))]:
        codec = parse_codec(text)
        got = decoded(codec, codec.encode(values, alone(codec, values)), values)
        assert torch.allclose(got.unique(), torch.tensor([-most, 0.0, most]))
    equal = torch.full((100,), 3.0)
    codec = parse_codec("terngrad")
    assert torch.equal(decoded(codec, codec.encode(equal, alone(codec, equal)), equal), equal)


# --- signs ------------------------------------------------------------------------------------------


def test_a_sign_has_the_mean_magnitude_and_is_a_contraction() -> None:
    """‖p − C(p)‖² = (1 − ‖p‖₁²/(d‖p‖²))·‖p‖², as in the paper."""
    codec, values = parse_codec("sign"), drawn(3001)
    got = decoded(codec, codec.encode(values, alone(codec, values)), values)
    assert torch.allclose(got, values.sign() * values.abs().mean())
    share = values.abs().sum() ** 2 / (len(values) * values.square().sum())
    assert torch.allclose((values - got).square().sum(), (1 - share) * values.square().sum(), rtol=1e-5)


def decide(codec: Codec, mean: Tensor) -> None:
    """Turns the mean of votes into their outcome."""
    reducer_for(codec).decide([mean], Decompressor(codec, BucketLayout({"votes": mean.shape}, mean)))


@pytest.mark.parametrize("count", LENGTHS)
def test_a_vote_is_one_bit_a_number(count: int) -> None:
    codec, values = parse_codec("sign:vote=yes"), drawn(count)
    code = codec.encode(values, alone(codec, values))
    assert len(code) == 8 + -(-count // 8)
    got = decoded(codec, code, values)
    decide(codec, got)
    assert torch.equal(got, values.sign())  # with one worker it is signSGD


def test_sign_majority_vote_gives_zero_on_a_tie() -> None:
    codec = parse_codec("sign:vote=yes")
    votes = [torch.tensor([3.0, 1.0, -1e-9, -5.0]), torch.tensor([1.0, -9.0, -1.0, 1e-9])]

    def outcome(votes: list[Tensor]) -> list[float]:
        mean = torch.zeros(4)
        for values in votes:
            codec.decode(codec.encode(values, alone(codec, values)), mean)
        mean /= len(votes)
        decide(codec, mean)
        return mean.tolist()

    assert outcome(votes) == [1, 0, -1, 0]
    assert outcome([*votes, torch.tensor([-7.0, 7.0, 7.0, -7.0])]) == [1, 1, -1, -1]


def test_a_zero_votes_up_and_down_in_turn() -> None:
    codec, values = parse_codec("sign:vote=yes"), torch.tensor([0.0, -0.0, 1e-45, -1e-45])
    state = alone(codec, values)
    votes = [sent(codec, values, state).tolist() for _ in range(4)]
    assert votes == [[1, 1, 1, -1], [-1, -1, 1, -1]] * 2


def test_signum_votes_by_its_momentum() -> None:
    codec = parse_codec("sign:vote=yes,momentum=0.9")
    state = alone(codec, torch.zeros(1))
    assert [sent(codec, torch.tensor([g]), state).item() for g in (10.0, -1.0, -1.0, -100.0)] == [
        1,
        1,
        1,
        -1,
    ]


def test_reply_codec_of_sign_vote_sends_magnitudes() -> None:
    reply = parse_codec("sign:vote=yes,momentum=0.9").for_replies()
    values = torch.tensor([2.0, -2.0])
    assert torch.equal(decoded(reply, reply.encode(values, alone(reply, values)), values), values)


def test_without_feedback_signs_go_the_wrong_way() -> None:
    """Karimireddy's example: 4 with probability ¼ and −1 otherwise is ¼ on average, and its sign −½."""
    codec, count, steps = parse_codec("sign"), 2000, 400
    generator = torch.Generator().manual_seed(0)
    went = {}
    for kept in (True, False):
        state = alone(codec, torch.zeros(count), feedback=kept)
        total = torch.zeros(count)
        for _ in range(steps):
            lots = torch.rand(count, generator=generator) < 0.25
            total += sent(codec, torch.where(lots, 4.0, -1.0), state)
        went[kept] = float(total.mean()) / steps
    assert went[False] < -0.5
    assert 0.2 < went[True] < 0.3


def test_decode_adds_to_a_tensor_that_requires_grad() -> None:
    codec, values = parse_codec("int8"), drawn(100)
    with torch.no_grad():
        into = torch.zeros(100, requires_grad=True)
        codec.decode(codec.encode(values, alone(codec, values)), into)
    assert into.any()


# --- bytes nobody can trust -------------------------------------------------------------------------


def refuses(codec: Codec, code: Tensor, count: int, why: str = "") -> None:
    into = torch.ones(count)
    with pytest.raises(WireError, match=why or None):
        codec.decode(code, into)
    assert bool((into == 1).all())


@every(ALL)
def test_a_code_of_another_length_is_refused(text: str) -> None:
    codec, values = parse_codec(text), drawn(70)
    code = codec.encode(values, alone(codec, values))
    for length in range(len(code)):
        refuses(codec, code[:length], 70)
    refuses(codec, torch.cat([code, code[:1]]), 70)
    refuses(codec, code, 69)
    refuses(codec, code, 71)
    refuses(codec, code.view(1, -1), 70, "row of bytes")
    refuses(codec, code.float(), 70, "row of bytes")
    with pytest.raises(WireError):
        codec.decode(code, torch.zeros(70, dtype=torch.float64))


@every(ALL)
def test_a_code_of_another_codec_is_refused(text: str) -> None:
    codec, values = parse_codec(text), drawn(70)
    for other in map(parse_codec, ALL):
        if other.name != codec.name:
            refuses(codec, other.encode(values, alone(other, values)), 70, "not a code for 70 numbers")


@every([text for text in ALL if "vote" not in text and "fp8" not in text])
@pytest.mark.parametrize("unit", [math.inf, -math.inf, math.nan, -1.0])
def test_quantizers_refuse_codes_with_an_invalid_unit(text: str, unit: float) -> None:
    codec, values = parse_codec(text), drawn(70)
    code = codec.encode(values, alone(codec, values))
    code[8:12] = torch.tensor([unit]).view(torch.uint8)
    refuses(codec, code, 70, "a unit that is")


def test_fp8_refuses_nan_bytes_and_invalid_exponents() -> None:
    codec, values = parse_codec("fp8"), drawn(70)
    code = codec.encode(values, alone(codec, values))
    for byte in (0x7F, 0xFF):
        broken = code.clone()
        broken[-1] = byte
        refuses(codec, broken, 70, "NaN")
    code[9] = 0x7F
    code[8:10] = torch.tensor([120], dtype=torch.int16).view(torch.uint8)
    refuses(codec, code, 70, "power of two")


@every(ALL)
@settings(max_examples=40, deadline=None)
@given(data=some.data())
def test_any_bytes_are_decoded_or_refused(text: str, data: some.DataObject) -> None:
    """No crash, no memory by what a message says, and a vector that is left alone or stays finite."""
    codec, count = parse_codec(text), data.draw(some.sampled_from([0, 1, 9, 70]))
    values = drawn(count)
    codec.prepare(torch.float32)
    code = codec.encode(values, alone(codec, values))
    kind = data.draw(some.sampled_from(["flip", "tail", "noise"]))
    if kind == "flip" and len(code):
        at = data.draw(some.integers(0, len(code) - 1))
        code[at] ^= 1 << data.draw(some.integers(0, 7))
    elif kind == "tail":
        tail = data.draw(some.binary(max_size=max(1, len(code) - 8)))
        code[len(code) - min(len(tail), len(code) - 8) :] = torch.tensor(
            list(tail[: len(code) - 8]), dtype=torch.uint8
        )
    else:
        code = torch.tensor(list(data.draw(some.binary(max_size=200))), dtype=torch.uint8)
    into = torch.ones(count)
    tracemalloc.start()
    try:
        codec.decode(code, into)
    except WireError:
        assert bool((into == 1).all())
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert bool(into.isfinite().all())
    assert most < 1 << 20


@every(ALL)
def test_quantizers_do_not_allocate_by_the_length_a_code_claims(text: str) -> None:
    codec, values = parse_codec(text), drawn(70)
    codec.prepare(torch.float32)
    code = codec.encode(values, alone(codec, values))
    code[2:8] = 255
    tracemalloc.start()
    refuses(codec, code, 70, "not a code for 70 numbers")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@every(ALL)
@widths
def test_quantizers_decode_at_any_byte_offset(text: str, dtype: torch.dtype) -> None:
    codec, values = parse_codec(text), drawn(70, dtype)
    code = codec.encode(values, alone(codec, values))
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), code, torch.zeros(5, dtype=torch.uint8)])
    assert torch.equal(decoded(codec, message[3:-5], values), decoded(codec, code, values))


# --- the grammar ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("int8:4", "block must be from 8"),
        ("fp8:0", "block must be from 8"),
        ("int4:rounding=up", "rounding takes nearest or stochastic"),
        ("qsgd:0", "levels must be from 1"),
        ("qsgd:64,block=1", "block must be from 8"),
        ("terngrad:-1", "clip must be 0 or more"),
        ("terngrad:inf", "clip must be 0 or more"),
        ("sign:vote=yes,momentum=1", "momentum must be from 0"),
        ("sign:momentum=0.9", "momentum needs vote=yes"),
    ],
)
def test_quantizers_refuse_invalid_settings(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_codec(text)


@every(ALL)
def test_quantizer_text_parses_back_to_the_same_codec(text: str) -> None:
    assert parse_codec(str(parse_codec(text))) == parse_codec(text)
