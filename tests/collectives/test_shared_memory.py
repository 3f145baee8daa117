"""Shared memory: the bits of a sum in rank order, in any order of arrival, and no endless wait."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyrhythm.collectives.arithmetic import reduce
from polyrhythm.collectives.shared_memory import BOARD, SharedMemory
from polyrhythm.core.errors import PeerLost, PolyrhythmError
from polyrhythm.wire.arena import Arenas

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8,
    torch.bool,
]  # fmt: skip


TEAMS: list[Team] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while TEAMS:
        TEAMS.pop().arenas.close()


class Team:
    """Members that are threads: to the memory they are what processes are."""

    def __init__(self, count: int, look: Callable[[Sequence[int], float], None] | None = None) -> None:
        self.arenas = Arenas(count, 1 << 26)
        TEAMS.append(self)
        self.errors: list[BaseException] = []
        boards = [self.arenas.allocate(index, BOARD) for index in range(count)]
        self.members = [
            SharedMemory(
                self.arenas,
                {f"member {each}": each for each in range(count)},
                mine,
                boards,
                look or self._too_long,
            )
            for mine in range(count)
        ]

    @staticmethod
    def _too_long(missing: Sequence[int], waited: float) -> None:
        assert waited < 20, f"waited for {missing}"

    def lend(self, owner: int, values: Tensor) -> Tensor:
        """A copy that lies in the owner's arena."""
        if not values.numel():
            return values.clone()
        offset = self.arenas.allocate(owner, values.nbytes)
        place = torch.frombuffer(self.arenas.view(owner)[offset : offset + values.nbytes], dtype=values.dtype)
        return place.copy_(values)

    def all(self, work: Callable[[int, SharedMemory], Any]) -> list[BaseException]:
        """Every member does this at the same time; the errors of those that failed."""

        def body(rank: int) -> None:
            try:
                work(rank, self.members[rank])
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(self.members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.errors


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (10 * torch.randn(count, dtype=torch.float64, generator=generator)).abs().to(dtype)


def expected(column: list[Tensor], op: str) -> Tensor:
    result = torch.empty_like(column[0])
    reduce([each.clone() for each in column], op, [result])
    return result


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(0, 50), st.sampled_from(DTYPES)), max_size=45),
    n=st.integers(2, 5),
    op=st.sampled_from(["sum", "mean", "max", "min"]),
    private=st.booleans(),
)
def test_shared_memory_reduction_has_the_bits_of_rank_order(
    shape: list[tuple[int, torch.dtype]], n: int, op: str, private: bool
) -> None:
    """Whatever is reduced, and wherever it lies, all get the bits of one reduction in rank order."""
    if op == "mean":
        shape = [(count, dtype) for count, dtype in shape if dtype.is_floating_point]
    team = Team(n)
    inputs = [
        [numbers(count, dtype, 50 * rank + at) for at, (count, dtype) in enumerate(shape)]
        for rank in range(n)
    ]
    places = [
        [each.clone() if private else team.lend(rank, each) for each in given]
        for rank, given in enumerate(inputs)
    ]
    assert team.all(lambda rank, member: member.begin(places[rank], op).join()) == []
    for at in range(len(shape)):
        result = expected([given[at] for given in inputs], op)
        assert all(torch.equal(places[rank][at], result) for rank in range(n))


def test_many_shared_memory_reductions_may_be_in_flight_at_once() -> None:
    """More than a board has room for, in bursts, joined in any order, by members at different paces."""
    team, rounds, n = Team(3), 100, 3
    places = [
        [team.lend(rank, torch.full((7,), float(rank + k))) for k in range(rounds)] for rank in range(n)
    ]

    def work(rank: int, member: SharedMemory) -> None:
        draw = random.Random(rank)
        begun = []
        for k in range(rounds):
            begun.append(member.begin([places[rank][k]], "sum"))
            if draw.random() < 0.1:
                time.sleep(0.002)
            if draw.random() < 0.05:
                draw.shuffle(begun)
                begun.pop().join()
        draw.shuffle(begun)
        for task in begun:
            task.join()

    assert team.all(work) == []
    for rank in range(n):
        assert all((places[rank][k] == 3 * k + 3).all() for k in range(rounds))


def test_shared_memory_reduces_to_the_first_member_and_copies_back() -> None:
    """Reduced into the buffers of the first only, then copied from there."""
    team = Team(3)
    places = [team.lend(rank, torch.arange(10.0) * (rank + 1)) for rank in range(3)]
    assert team.all(lambda rank, member: member.begin([places[rank]], "sum to first").join()) == []
    assert torch.equal(places[0], torch.arange(10.0) * 6)
    assert torch.equal(places[2], torch.arange(10.0) * 3)
    assert team.all(lambda rank, member: member.begin([places[rank]], "copy of first").join()) == []
    assert all(torch.equal(place, torch.arange(10.0) * 6) for place in places)


@pytest.mark.parametrize(
    "theirs", [("max", 4, torch.float32), ("sum", 5, torch.float32), ("sum", 4, torch.float64)]
)
def test_shared_memory_raises_if_members_run_different_collectives(
    theirs: tuple[str, int, torch.dtype],
) -> None:
    """Another operation, length or dtype: an error for both, and nothing is overwritten."""
    team = Team(2)
    places = [team.lend(0, torch.ones(4)), team.lend(1, torch.ones(theirs[1], dtype=theirs[2]))]
    ops = ["sum", theirs[0]]
    errors = team.all(lambda rank, member: member.begin([places[rank]], ops[rank]).join())
    assert len(errors) == 2 and all(isinstance(error, PolyrhythmError) for error in errors)
    assert all("same collectives in the same order" in str(error) for error in errors)
    assert all((place == 1).all() for place in places)


def test_shared_memory_wait_ends_with_an_error_if_a_member_is_lost() -> None:
    """While a member is missing the others ask whether it makes sense to wait; the answer ends the wait."""
    asked: list[Sequence[int]] = []

    def look(missing: Sequence[int], waited: float) -> None:
        asked.append(missing)
        if waited > 0.05:
            raise PeerLost("member 2 is gone")

    team = Team(3, look)
    places = [team.lend(rank, torch.ones(4)) for rank in range(3)]
    errors = team.all(lambda rank, member: rank == 2 or member.begin([places[rank]], "sum").join())
    assert [str(error) for error in errors] == ["member 2 is gone"] * 2
    assert all(2 in missing for missing in asked) and list(asked[-1]) == [2]


def test_staging_memory_is_used_again() -> None:
    """Tensors elsewhere, as on a GPU, are copied in and out; the memory for it is a few times the largest."""
    team = Team(2)
    for count in range(1, 400):
        values = [torch.full((count,), 1.0 + rank) for rank in range(2)]
        assert team.all(lambda rank, member, values=values: member.begin([values[rank]], "sum").join()) == []
        assert all((each == 3).all() for each in values)
    assert team.arenas.allocate(0, 64) < BOARD + 4 * 4 * 400


def test_a_dtype_that_is_refused_stays_refused() -> None:
    """Also when it comes again, and others' slots are as they were."""
    team = Team(1)
    values = torch.zeros(3, dtype=torch.complex64)
    for _ in range(2):
        with pytest.raises(PolyrhythmError, match="cannot reduce"):
            team.members[0].begin([team.lend(0, values)], "sum")


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 4), tensors=st.integers(0, 9), data=st.data())
def test_each_member_of_an_exchange_gets_what_the_others_gave_it(n: int, tensors: int, data: Any) -> None:
    """Any number of tensors of any length, in lists that fit in a slot and in longer ones, several times."""
    team = Team(n)
    counts = [[[data.draw(st.integers(0, 40)) for _ in range(tensors)] for _ in range(n)] for _ in range(n)]

    def given_to(sender: int, to: int, step: int) -> list[Tensor]:
        return [
            numbers(count, DTYPES[(at + sender) % len(DTYPES)], 100 * sender + 10 * to + step)
            for at, count in enumerate(counts[sender][to])
        ]

    def work(rank: int, member: SharedMemory) -> None:
        for step in range(3):
            got: list[list[Tensor]] = []

            def use(lent: Sequence[Sequence[Tensor]], got: list[list[Tensor]] = got) -> None:
                got.extend([each.clone() for each in row] for row in lent)

            member.exchange("all-to-all", [given_to(rank, to, step) for to in range(n)], use)
            for sender in range(n):
                expected = given_to(sender, rank, step)
                assert [each.dtype for each in got[sender]] == [each.dtype for each in expected]
                assert all(torch.equal(*pair) for pair in zip(got[sender], expected, strict=True))

    assert team.all(work) == []


@pytest.mark.parametrize("theirs", ["sum", "broadcast"])
def test_an_exchange_and_another_collective_are_told_apart(theirs: str) -> None:
    team = Team(2)

    def work(rank: int, member: SharedMemory) -> None:
        if rank and theirs == "sum":
            member.begin([torch.ones(3)], theirs).join()
        else:
            member.exchange(theirs if rank else "barrier", [[torch.ones(3)]] * 2, lambda lent: None)

    errors = team.all(work)
    assert len(errors) == 2
    for error in errors:
        assert re.search(f"is in (barrier but .* is in {theirs}|{theirs} but .* is in barrier)", str(error))
