"""The orders of synchronous schedules: those of torch, without deadlocks, as short and small as promised."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from polyrhythm.parallel.orders import Action, order

KINDS = {"forward": "F", "backward": "B", "input": "I", "weights": "W"}  # as torch writes them


def ours(place: int, places: int, chunks: int, pieces: int, apart: bool) -> list[tuple[int, str, int]]:
    return [
        (each.chunk * places + place, KINDS[each.kind], each.micro_batch)
        for each in order(place, places, chunks, pieces, apart)
    ]


def theirs(name: str, place: int, places: int, chunks: int, pieces: int) -> list[tuple[int, str, int]]:
    """The order of a schedule of torch, which is made without a process group."""
    from torch.distributed.pipelining import schedules

    made: Any = object.__new__(getattr(schedules, name))
    made.pp_group_size, made.n_local_stages, made._n_microbatches = places, chunks, pieces
    made.microbatches_per_round = pieces // max(1, pieces // places)
    actions = made._calculate_single_rank_operations(place)
    return [
        (each.stage_index, each.computation_type.value, each.microbatch_index) for each in actions if each
    ]


@pytest.mark.parametrize("places, chunks, pieces", [(2, 2, 4), (4, 2, 8), (4, 3, 8), (4, 2, 10), (4, 2, 3)])
def test_interleaved_orders_are_those_of_torch(places: int, chunks: int, pieces: int) -> None:
    for place in range(places):
        for name, apart in (("ScheduleInterleaved1F1B", False), ("ScheduleInterleavedZeroBubble", True)):
            wanted = theirs(name, place, places, chunks, pieces)
            assert ours(place, places, chunks, pieces, apart) == wanted


@pytest.mark.parametrize("places, pieces", [(2, 3), (4, 8), (4, 4), (4, 3)])
def test_orders_of_one_chunk_are_those_of_torch(places: int, pieces: int) -> None:
    from torch.distributed.pipelining.schedules import FORWARD, Schedule1F1B

    single = object.__new__(Schedule1F1B)
    single.pp_group_size = single._num_stages = places
    single._n_microbatches = pieces
    wanted = single._get_pipeline_order()
    assert wanted is not None
    for place in range(places):
        found = ours(place, places, 1, pieces, apart=False)
        # Theirs counts the forward passes of the last stage from 1; all are in order.
        kinds = [
            each.computation_type for each in wanted[place] if each and each.microbatch_index is not None
        ]
        assert [kind for _, kind, _ in found] == ["F" if kind is FORWARD else "B" for kind in kinds]
        for each in "FB":
            assert [number for _, kind, number in found if kind == each] == list(range(pieces))
        zero = theirs("ScheduleInterleavedZeroBubble", place, places, 1, pieces)
        assert ours(place, places, 1, pieces, apart=True) == zero


class Simulation:
    """Runs the orders of all places; a forward pass, a gradient of an input and of weights take 1/C each."""

    def __init__(self, places: int, chunks: int, pieces: int, apart: bool) -> None:
        self.places, self.last, self.unit = places, places * chunks - 1, Fraction(1, chunks)
        self.left = [order(place, places, chunks, pieces, apart) for place in range(places)]
        self.done: dict[tuple[str, int, int], Fraction] = {}  # by what, segment and micro-batch: when
        self.times = [Fraction(0)] * places
        self.kept, self.most = Counter[int](), Counter[int]()
        while any(self.left):
            before = sum(map(len, self.left))
            for place in range(places):
                while self.left[place] and self.run(place, self.left[place][0]):
                    self.left[place].pop(0)
            assert sum(map(len, self.left)) < before, "places wait for each other"

    def run(self, place: int, action: Action) -> bool:
        kind, number, chunk = action
        segment = chunk * self.places + place
        needed = {
            "forward": [("out", segment - 1, number)] if segment else [],
            "weights": [("in", segment, number)],
        }.get(kind, [("out", segment, number), *([("in", segment + 1, number)] * (segment < self.last))])
        if any(each not in self.done for each in needed):
            return False
        begin = max([self.times[place], *(self.done[each] for each in needed)])
        self.times[place] = begin + self.unit * (2 if kind == "backward" else 1)
        what = {"forward": "out", "weights": "weights"}.get(kind, "in")
        assert (what, segment, number) not in self.done
        self.done[what, segment, number] = self.times[place]
        self.kept[place] += {"forward": 1, "backward": -1, "input": 0, "weights": -1}[kind]
        self.most[place] = max(self.most[place], self.kept[place])
        return True


@pytest.mark.parametrize("apart", [False, True])
def test_no_order_waits_for_itself_and_each_is_as_short_and_as_small_as_promised(apart: bool) -> None:
    """For any number of micro-batches, also one that the number of places does not divide."""
    for places, chunks, pieces in ((k, c, m) for k in range(1, 6) for c in range(1, 4) for m in range(1, 14)):
        if chunks > 1 and places == 1:
            continue
        found = Simulation(places, chunks, pieces, apart)
        assert len(found.done) == (3 if apart else 2) * places * chunks * pieces
        if pieces >= places:  # (K - 1)(F + B + W) / C, or (K - 1)(F + B - W) / C
            bubble = Fraction((1 if apart else 3) * (places - 1), chunks)
            assert max(found.times) == 3 * pieces + bubble
        group = math.ceil(pieces / max(1, pieces // places))
        for place in range(places):
            ahead = (chunks - 1) * group + (2 if chunks > 1 and not apart else 1) * (places - 1 - place)
            bound = ahead + 1 + (place if apart else 0)
            assert found.most[place] == min(bound, chunks * pieces)
