"""The laws of PowerSGD: what all agree on, what each keeps, and where nothing is lost."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import polyrhythm as pr
from polyrhythm.compress import feedback
from polyrhythm.compress.codecs.powersgd import HEADER, PowerSGD
from polyrhythm.compress.kernels.algebra import add_product, orthonormal
from polyrhythm.compress.kernels.low_rank import WarmStart
from polyrhythm.compress.state import CodecState
from polyrhythm.core.errors import UsageError, WireError
from polyrhythm.core.registry import parse_codec
from tests.support.programs import MOMENTUM, Script, same, trained

Shapes = Sequence[tuple[int, ...]]
SHAPES: Shapes = [(12, 9), (7,), (6, 4, 5), (3, 2), (50,)]  # a matrix, a small one, a kernel, tiny, a cut one


def size(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def gradient(rank: int, step: int, shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(size(shapes), dtype=dtype, generator=generator)


@dataclass
class Rounds:
    """A script whose workers take means of given gradients, in a simulation: nothing else happens."""

    codec: PowerSGD
    gradients: Sequence[Sequence[Tensor]]  # of each worker, step by step
    shapes: Shapes = field(default_factory=lambda: SHAPES)
    means: dict[int, list[Tensor]] = field(default_factory=dict)
    residuals: dict[int, list[Tensor]] = field(default_factory=dict)
    states: dict[int, list[CodecState]] = field(default_factory=dict)

    def __call__(self) -> None:
        here = pr.init()
        model = nn.Linear(1, 1)
        here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        mine = self.gradients[here.rank]
        groups = [[shape] for shape in self.shapes] if self.codec.per == "layer" else [list(self.shapes)]
        about = {"feedback": self.codec.feedback, "dtype": mine[0].dtype, "worker": here.rank}
        states = [CodecState.alone(size(group), shapes=group, **about) for group in groups]
        self.states[here.rank] = states
        for name in ("means", "residuals"):
            getattr(self, name)[here.rank] = []
        for one in mine:
            parts = [part.clone() for part in one.split([size(group) for group in groups])]
            self.codec.reducer().mean(here._node.everyone, parts, states)
            for state in states:
                state.sent()
            self.means[here.rank].append(torch.cat(parts))
            if self.codec.feedback:
                self.residuals[here.rank].append(torch.cat([state.residual.clone() for state in states]))


def played(
    simulate: Any, codec: str, gradients: Sequence[Sequence[Tensor]], shapes: Shapes = SHAPES
) -> Rounds:
    made = parse_codec(codec)
    assert isinstance(made, PowerSGD)
    rounds = Rounds(made, gradients, shapes)
    simulate(rounds, "allreduce", len(gradients))
    return rounds


@pytest.mark.parametrize("codec", ["powersgd:1", "powersgd:2", "powersgd:1,warm=no", "powersgd:2,per=vector"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_powersgd_workers_agree_and_mean_residual_is_the_missing_part(
    simulate: Any, codec: str, dtype: torch.dtype
) -> None:
    """The same bits on all, and mean(E_i) = mean(M_i) - P Q^T: by the own Q as it would be by that of all."""
    steps, workers = 5, 3
    given = [[gradient(rank, step, dtype=dtype) for step in range(steps)] for rank in range(workers)]
    rounds = played(simulate, codec, given)
    kept = [torch.zeros_like(given[0][0]) for _ in range(workers)]
    near = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
    for step in range(steps):
        update = rounds.means[0][step]
        for rank in range(workers):
            assert torch.equal(rounds.means[rank][step], update)
        residual = sum(kept[rank] + given[rank][step] for rank in range(workers)) / workers
        kept = [rounds.residuals[rank][step] for rank in range(workers)]
        torch.testing.assert_close(sum(kept) / workers, residual - update, **near)
    if not rounds.codec.warm:
        return
    qs = [
        torch.cat([q for state in rounds.states[rank] if (q := state.own(WarmStart).q) is not None])
        for rank in range(workers)
    ]
    assert all(torch.equal(q, qs[0]) for q in qs)


def test_powersgd_step_matches_the_update_rule_of_the_paper(simulate: Any) -> None:
    """P = mean M_i Q, orthonormal; Q = mean M_i^T P, kept for the next; E_i = M_i - P (M_i^T P)^T."""
    shape, workers, steps, rank = (11, 8), 3, 4, 2
    given = [[gradient(w, s, [shape]) for s in range(steps)] for w in range(workers)]
    rounds = played(simulate, f"powersgd:{rank}", given, [shape])
    first = torch.Generator().manual_seed(CodecState.alone(88).shared_stream())
    q = torch.empty(rank, 8, dtype=torch.float64).normal_(generator=first).T
    e = [torch.zeros(shape, dtype=torch.float64) for _ in range(workers)]
    for step in range(steps):
        m = [e[w] + given[w][step].view(shape) for w in range(workers)]
        p = torch.linalg.qr(sum(each @ q for each in m) / workers).Q
        q = sum(each.T @ p for each in m) / workers
        e = [each - p @ (each.T @ p).T for each in m]
        torch.testing.assert_close(rounds.means[0][step].view(shape), p @ q.T, rtol=0, atol=1e-12)
        for w in range(workers):
            torch.testing.assert_close(rounds.residuals[w][step].view(shape), e[w], rtol=0, atol=1e-12)


def test_powersgd_residual_norm_never_exceeds_its_input(simulate: Any) -> None:
    """By the own Q, E_i is a projection of M_i: workers that always differ pile nothing up by that."""
    shape, steps = (20, 20), 60
    fixed = [gradient(rank, 0, [shape]) for rank in range(2)]
    rounds = played(simulate, "powersgd:2", [[one] * steps for one in fixed], [shape])
    for rank in range(2):
        before = torch.zeros_like(fixed[0])
        for after in rounds.residuals[rank]:
            assert after.norm() <= (before + fixed[rank]).norm() * (1 + 1e-12)
            before = after


@pytest.mark.parametrize("rank", [4, 5, 6, 99])
def test_a_rank_as_large_as_a_side_is_exact(simulate: Any, rank: int) -> None:
    """Bit for bit the plain mean, in rank order, and nothing is left."""
    shapes = [(4, 6), (5, 4, 3)]
    given = [[gradient(w, s, shapes) for s in range(3)] for w in range(3)]
    rounds = played(simulate, f"powersgd:{rank}", given, shapes)
    for step in range(3):
        low, high = rounds.means[0][step].split([24, 60])
        plain = (given[0][step] + given[1][step] + given[2][step]) / 3
        assert torch.equal(low, plain[:24])
        if rank >= 5:
            assert torch.equal(high, plain[24:])
        assert torch.equal(rounds.residuals[1][step][:24], torch.zeros(24, dtype=torch.float64))


def test_a_mean_of_low_rank_is_found_at_once(simulate: Any) -> None:
    """If the mean has no more than the rank, the first step finds all of it, though gradients have more."""
    shape = (15, 10)
    low = torch.outer(gradient(7, 0, [(15,)]), gradient(7, 1, [(10,)])).flatten()
    noise = gradient(8, 0, [shape])
    rounds = played(simulate, "powersgd:2", [[low + noise], [low - noise]], [shape])
    torch.testing.assert_close(rounds.means[0][0], low, rtol=0, atol=1e-12)
    assert rounds.residuals[0][0].norm() > 1


def test_warm_starts_find_the_leading_directions(simulate: Any) -> None:
    """Without feedback, the same gradient again and again: in the end its best approximation of that rank."""
    shape, rank = (20, 16), 2
    one = gradient(3, 0, [shape])
    u, s, v = torch.linalg.svd(one.view(shape), full_matrices=False)
    best = u[:, :rank] * s[:rank] @ v[:rank]
    rounds = played(simulate, f"powersgd:{rank},feedback=no", [[one] * 300], [shape])
    away = [(mean.view(shape) - best).norm().item() for mean in rounds.means[0]]
    assert away[0] > 1 and away[-1] < 1e-6
    cold = played(simulate, f"powersgd:{rank},feedback=no,warm=no", [[one] * 5], [shape])
    assert len({round(mean.norm().item(), 9) for mean in cold.means[0]}) == 5


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("codec", ["powersgd:2", "powersgd:2,feedback=no"])
def test_powersgd_stays_finite_for_zero_rank_deficient_and_extreme_input(
    simulate: Any, codec: str, scale: float
) -> None:
    """Nothing, one direction only, repeated columns, tiny and huge: finite, and right again afterwards."""
    shape = (12, 10)
    one = torch.outer(gradient(1, 0, [(12,)]), gradient(1, 1, [(10,)])).float()
    one[:3] = 0.0  # as the rows of an embedding that no example has
    steps = [one * 0, one * scale, one * 0, one.sign() * scale, one * scale]
    rounds = played(simulate, codec, [[each.flatten() for each in steps]] * 2, [shape])
    for mean, residual in zip(rounds.means[0], rounds.residuals[0] or rounds.means[0], strict=True):
        assert torch.isfinite(mean).all() and torch.isfinite(residual).all()
    if codec.endswith("no"):
        torch.testing.assert_close(rounds.means[0][-1], one.flatten() * scale, rtol=1e-4, atol=1e-5 * scale)


def test_powersgd_redraws_directions_lost_to_a_zero_gradient(simulate: Any) -> None:
    """After a gradient of zeros both directions are drawn anew: a later one of rank 2 is found in full."""
    shape = (12, 10)
    two = sum(torch.outer(gradient(1, k, [(12,)]), gradient(2, k, [(10,)])) for k in range(2))
    two[:6] = 0.0
    steps = [torch.zeros(120, dtype=torch.float64), two.flatten(), two.flatten()]
    rounds = played(simulate, "powersgd:2,feedback=no", [steps], [shape])
    torch.testing.assert_close(rounds.means[0][1], two.flatten(), rtol=0, atol=1e-10)


@given(rank=st.integers(1, 6), seed=st.integers(0, 99), shift=st.integers(1, 15), double=st.booleans())
@settings(max_examples=60, deadline=None)
def test_low_rank_product_has_the_same_bits_at_any_memory_alignment(
    rank: int, seed: int, shift: int, double: bool
) -> None:
    """Or replicas would part: a product of matrices may round by how memory is aligned."""
    dtype = torch.float64 if double else torch.float32
    p = gradient(1, seed, [(rank, 37)], dtype).view(rank, 37)
    q = gradient(2, seed, [(rank, 23)], dtype).view(rank, 23)
    one, other = torch.zeros(37 * 23, dtype=dtype), torch.zeros(37 * 23 + shift, dtype=dtype)[shift:]
    moved = torch.cat([torch.zeros(shift, dtype=dtype), p.flatten()])[shift:].view(rank, 37)
    add_product(orthonormal(p), q, one.view(37, 23))
    add_product(orthonormal(moved), q, other.view(37, 23))
    assert torch.equal(one, other)
    near = 1e-13 if double else 1e-5
    torch.testing.assert_close(one.view(37, 23), orthonormal(p).T @ q, rtol=0, atol=near)


@given(rank=st.integers(1, 6), size=st.integers(6, 50), seed=st.integers(0, 99), alike=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_bases_are_orthonormal_and_span_what_they_should(
    rank: int, size: int, seed: int, alike: float
) -> None:
    """However long and nearly parallel the vectors are: at right angles, of length 1 or 0."""
    rows = gradient(1, seed, [(rank, size)]).view(rank, size)
    lengths = 10.0 ** torch.arange(-150.0, 150.0, 50.0).double()[:rank, None]
    rows = (rows * (1 - alike) ** 4 + rows[:1]) * lengths
    basis = orthonormal(rows)
    gram = basis @ basis.T
    assert (gram - gram.diag().diag()).abs().max() < 1e-12
    assert all(abs(length - 1) < 1e-12 or length == 0 for length in gram.diag().tolist())
    scaled = rows / rows.abs().amax(1, keepdim=True)
    assert (scaled - (scaled @ basis.T) @ basis).abs().max() < 2e-7 * size


# --- training ------------------------------------------------------------------------------------------


@dataclass
class Fit:
    """Workers that pull a matrix to points of their own: all they can agree on is the mean of these."""

    steps: int
    seen: dict[int, list[Tensor]] = field(default_factory=dict)

    def __call__(self) -> None:
        here = pr.init()
        layer = nn.Linear(10, 12, bias=False).double()
        layer, optimizer = here.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        aim, self.seen[here.rank] = point(here.rank), []
        for _ in range(self.steps):
            layer.weight.grad = layer.weight.detach() - aim
            optimizer.step()
            self.seen[here.rank].append(layer.weight.detach().clone())


def point(rank: int) -> Tensor:
    return gradient(rank, 9, [(12, 10)]).view(12, 10)


@pytest.mark.parametrize("codec", ["powersgd:1", "powersgd:2", "powersgd:2,warm=no"])
def test_powersgd_error_feedback_converges_to_the_mean_optimum(simulate: Any, codec: str) -> None:
    """With feedback one direction a step leads to where all of them would; replicas are the same bits."""
    fit = Fit(200)
    simulate(fit, f"allreduce+{codec}", 3)
    assert all(torch.equal(one, other) for one, other in zip(fit.seen[0], fit.seen[2], strict=True))
    best = (point(0) + point(1) + point(2)) / 3
    assert (fit.seen[0][0] - best).norm() > 1
    assert (fit.seen[0][-1] - best).norm() < 1e-6


def test_a_run_of_full_rank_is_one_without_a_codec(simulate: Any) -> None:
    """Bit for bit."""
    script = Script(optimizer=MOMENTUM, size=50)
    plain = trained(simulate(script, "allreduce", 3))
    assert same(trained(simulate(script, "allreduce+powersgd:9", 3)), plain)


# --- by itself, for servers ----------------------------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=4),
    rank=st.integers(1, 3),
    warm=st.booleans(),
    double=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_powersgd_sent_values_plus_residual_equal_the_input(
    shapes: list[tuple[int, ...]], rank: int, warm: bool, double: bool
) -> None:
    """What the code stands for, with what is kept, is all that was given: near enough for floats."""
    dtype = torch.float64 if double else torch.float32
    codec, state = PowerSGD(rank, warm), CodecState.alone(size(shapes), shapes=shapes, dtype=dtype)
    given = torch.zeros(size(shapes), dtype=dtype)
    received = torch.zeros(size(shapes), dtype=dtype)
    for step in range(3):
        one = gradient(5, step, shapes, dtype)
        before = one.clone()
        code = feedback.encode(codec, one, state)
        state.sent()
        assert torch.equal(one, before)
        codec.decode(code, received)
        given += one
    torch.testing.assert_close(received + state.residual, given, rtol=0, atol=1e-4 if not double else 1e-11)


def test_a_code_is_as_long_as_its_factors() -> None:
    """rank (rows + columns) numbers, and a header; a flat stretch is laid out nearly square."""
    codec = PowerSGD(2)
    for shapes, numbers in [
        ([(64, 32)], 2 * 96),
        ([(64 * 32,)], 2 * (45 + 45) + 2048 - 45 * 45),
        ([(3, 3)], 9),
    ]:
        code = codec.encode(torch.ones(size(shapes)), CodecState.alone(size(shapes), shapes=shapes))
        assert code.dtype == torch.uint8
        assert code.numel() == HEADER.size + 24 * (numbers != 9) + 4 * numbers


def test_powersgd_decodes_at_any_byte_offset() -> None:
    """Also where no float could begin."""
    codec, values = PowerSGD(1), gradient(0, 0, [(9, 7)], torch.float32)
    code = codec.encode(values, CodecState.alone(63, shapes=[(9, 7)]))
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), code])[3:]
    one, other = torch.zeros(63), torch.zeros(63)
    codec.decode(code, one)
    codec.decode(shifted, other)
    assert torch.equal(one, other) and one.abs().sum() > 0


def code(*numbers: int, more: bytes = b"") -> Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(numbers)}Q", *numbers) + more), dtype=torch.uint8)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(31, dtype=torch.uint8),
        torch.zeros(9),
        code(4, 1, 60, 0, more=bytes(240)),  # another length
        code(2, 1, 63, 0, more=bytes(126)),  # numbers of two bytes
        code(4, 0, 63, 1, 0, 9, 7),  # rank 0
        code(4, 1, 63, 2**60),  # more matrices than bytes
        code(4, 1, 63, 1, 0, 9, 8, more=bytes(4 * 17)),  # beyond the end
        code(4, 1, 63, 2, 0, 3, 3, 8, 3, 3, more=bytes(4 * (12 + 45))),  # over one another
        code(4, 2**40, 63, 1, 0, 9, 7),  # a rank above both sides
        code(4, 1, 63, 1, 0, 2**40, 0),  # no columns
        code(4, 1, 63, 1, 0, 9, 7, more=bytes(4 * 15)),  # too short
        code(4, 1, 63, 1, 0, 9, 7, more=bytes(4 * 17)),  # too long
        code(4, 1, 63, 1, 0, 9, 7, more=struct.pack("<f", float("nan")) * 16),
    ],
)
def test_powersgd_refuses_malformed_codes(bad: Tensor) -> None:
    """With nothing added, nor more memory taken than came."""
    into = torch.ones(63)
    with pytest.raises(WireError, match="powersgd"):
        PowerSGD(1).decode(bad, into)
    assert torch.equal(into, torch.ones(63))


@given(flip=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_any_one_bit_flipped_is_a_code_or_refused(flip: int, bit: int) -> None:
    codec = PowerSGD(1)
    bytes_ = codec.encode(
        gradient(0, 0, [(9, 7)], torch.float32), CodecState.alone(63, shapes=[(9, 7)])
    ).clone()
    bytes_[flip % bytes_.numel()] ^= 1 << bit
    into = torch.zeros(63)
    try:
        codec.decode(bytes_, into)
    except WireError as error:
        assert str(error) and not into.any()
    else:
        assert into.any()


def test_powersgd_refuses_rank_0_and_prints_canonical_text() -> None:
    with pytest.raises(UsageError, match="rank must be 1 or more"):
        parse_codec("powersgd:0")
    assert str(parse_codec("powersgd:2")) == "powersgd"
    assert str(parse_codec("powersgd:4,warm=no,dense=")) == "powersgd:4,dense=,warm=false"
