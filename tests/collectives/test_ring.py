"""The ring: the same bits everywhere, in 2(n-1) steps, with exactly the bytes that the rule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyrhythm as pr
from polyrhythm.collectives import ring
from polyrhythm.collectives.ring import Turn, bounds, sent_elements
from polyrhythm.errors import UsageError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


class Member:
    """A script of which every worker takes part in rings and keeps what came out."""

    def __init__(self, inputs: list[list[Tensor]], op: str, rounds: int = 1) -> None:
        self.inputs, self.op, self.rounds = inputs, op, rounds
        self.outputs: dict[int, list[Tensor]] = {}
        self.turns: list[Turn] = []
        self.sent: dict[int, int] = {}

    def __call__(self) -> None:
        session = pr.init()
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        node: Any = session._node
        tensors = [tensor.clone() for tensor in self.inputs[session.rank]]
        before = node.bytes_sent
        for number in range(self.rounds):
            ring.all_reduce(node, node.workers, tensors, self.op, number, self.turns.append)
        self.sent[session.rank] = node.bytes_sent - before
        self.outputs[session.rank] = tensors


def simulated(inputs: list[list[Tensor]], op: str, rounds: int = 1, **more: Any) -> Member:
    member = Member(inputs, op, rounds)
    pr.simulate(member, workers=len(inputs), strategy="local", threads=1, **more)
    return member


def by_hand(column: list[Tensor], op: str) -> Tensor:
    """The rule, chunk by chunk: chunk c begins with worker c and is folded along the ring."""
    n, parts = len(column), []
    for chunk in range(n):
        start, stop = bounds(column[0].numel(), n, chunk)
        value = column[chunk][start:stop].clone()
        for after in range(1, n):
            other = column[(chunk + after) % n][start:stop]
            value = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)(other, value)
        parts.append(value / n if op == "mean" and n > 1 else value)
    return torch.cat(parts)


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(count, dtype=torch.float64, generator=generator).to(dtype)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


def made(lengths: list[int], dtypes: list[torch.dtype], n: int) -> list[list[Tensor]]:
    return [
        [numbers(c, d, 100 * rank + at) for at, (c, d) in enumerate(zip(lengths, dtypes, strict=True))]
        for rank in range(n)
    ]


cases = st.integers(0, 4).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 40), min_size=count, max_size=count),
        st.lists(st.sampled_from([*FLOATS, *INTEGERS]), min_size=count, max_size=count),
    )
)


@settings(max_examples=60, deadline=None)
@given(
    case=cases,
    n=st.integers(1, 7),
    op=st.sampled_from(["sum", "mean", "max", "min"]),
    size=st.integers(8, 64),
)
def test_every_worker_gets_the_bits_of_the_rule(case, n, op, size):
    lengths, dtypes = case
    if op == "mean":
        dtypes = [dtype if dtype.is_floating_point else torch.float32 for dtype in dtypes]
    inputs = made(lengths, dtypes, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SEGMENT", size)  # bytes: a few numbers, so that chunks have many segments
        patch.setattr(ring, "AHEAD", 2)
        member = simulated(inputs, op)
    for rank in range(n):
        for at, result in enumerate(member.outputs[rank]):
            assert torch.equal(result, by_hand([given[at] for given in inputs], op))
    check_bytes_and_steps(member, lengths, dtypes, n)


def check_bytes_and_steps(member: Member, lengths: list[int], dtypes: list[torch.dtype], n: int) -> None:
    for rank in range(n):
        expected = [sent_elements(count, n, rank) for count in lengths]
        nbytes = sum(c * dtype.itemsize for c, dtype in zip(expected, dtypes, strict=True))
        mine = [turn for turn in member.turns if turn.rank == rank]
        assert member.sent[rank] == nbytes == sum(turn.nbytes for turn in mine)
        assert sum(turn.elements for turn in mine) == sum(expected)
        assert len(mine) == 2 * (n - 1)


def test_the_bytes_of_seventeen_numbers_on_four_workers():
    member = simulated(made([17], [torch.float32], 4), "sum")
    assert [member.sent[rank] // 4 for rank in range(4)] == [26, 25, 25, 26]


@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(0, 39))
def test_bytes_are_within_an_element_per_step_of_the_ideal(count, n, rank):
    ideal = 2 * (n - 1) * count / n
    sent = sent_elements(count, n, rank % n)
    assert abs(sent - ideal) <= 2 * (n - 1)
    assert count % n or sent == ideal


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_the_chunks_of_every_step_are_those_of_the_rule(n):
    member = simulated(made([n], [torch.float64], n), "sum")
    for p in range(n):
        turns = [turn for turn in member.turns if turn.rank == p]
        expected = [("share-reduce", k, (p - k) % n, (p - k - 1) % n) for k in range(n - 1)]
        expected += [("share-only", k, (p + 1 - k) % n, (p - k) % n) for k in range(n - 1)]
        assert [(turn.phase, turn.step, turn.sent, turn.received) for turn in turns] == expected
        assert {turn.to for turn in turns} == {(p + 1) % n}


def test_the_bits_of_a_vector_do_not_depend_on_its_company():
    inputs = made([31, 5, 64], [torch.float32] * 3, 5)
    together = simulated(inputs, "mean").outputs[3]
    for at in range(3):
        alone = simulated([[given[at]] for given in inputs], "mean").outputs[3]
        assert torch.equal(alone[0], together[at])


def test_rings_follow_each_other():
    inputs = made([1000], [torch.int64], 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SEGMENT", 16)
        member = simulated(inputs, "sum", rounds=3)
    total = sum(given[0] for given in inputs)
    assert all(torch.equal(member.outputs[rank][0], 16 * total) for rank in range(4))


def test_time_over_a_network_is_that_of_the_ring(tmp_path):
    """2(n-1) turns of a chunk each, over links that carry one thing at a time each way."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[[hosts]]\nbandwidth = "8 Mbit/s"\nlatency = "0 s"\n')
    summary = pr.simulate(
        Member(made([400_000], [torch.float32], 4), "sum"),
        workers=4,
        strategy="local",
        cluster=cluster,
        threads=1,
    )
    assert summary["wall_s"] == pytest.approx(6 * 0.4, rel=0.1)


@pytest.mark.parametrize("op, dtype, message", [
    ("mean", torch.int64, "the mean of torch.int64"),
    ("median", torch.float32, "op is 'median'; it can be sum, mean, max, min"),
])  # fmt: skip
def test_what_cannot_be_reduced_is_said(op, dtype, message):
    with pytest.raises(UsageError, match=message):
        simulated(made([3], [dtype], 2), op)


def test_workers_with_different_sizes_are_told():
    inputs = [[torch.zeros(4)], [torch.zeros(6)]]
    with pytest.raises(pr.PolyrhythmError, match="same sizes and dtypes"):
        simulated(inputs, "sum")
