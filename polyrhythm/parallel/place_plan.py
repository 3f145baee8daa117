"""PlacePlan: what one place runs, receives and sends in a pass of a divided model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.parallel.partition import Mode, Partition


@dataclass(frozen=True)
class SegmentPlan:
    """One segment, and what its place receives before it and sends after it."""

    number: int  # among all segments of the model
    run: Callable[..., Sequence[Any]]
    inputs: tuple[str, ...]  # names of the values that it takes
    outputs: tuple[str, ...]  # names of the values that it computes and others need
    # By earlier segment that this one is the first of its place to need: its place, and all values from it.
    sources: Mapping[int, tuple[int, tuple[str, ...]]]
    sinks: Mapping[int, tuple[str, ...]]  # by other place: the values that go there


@dataclass(frozen=True)
class PlacePlan:
    """What one place has to know of one mode (training or evaluation) of the divided model."""

    segments: tuple[SegmentPlan, ...]  # of this place, in the order in which they run
    results: Mapping[int, tuple[str, ...]]  # by place: the values of the model's output that it computes
    build: Callable[[Mapping[str, Any]], Any]  # makes the model's output from values


def place_plan(parts: Partition, mode: Mode, place: int, column: Sequence[int] | None = None) -> PlacePlan:
    """The plan of one place. A value is sent once to each place that needs it, when its segment has run.

    `column`: the places to which those of the partition are mapped, where tensors are divided besides.
    """
    segments = list(parts.segments(mode))
    if column is not None:
        segments = [replace(each, place=column[each.place]) for each in segments]
    home = {name: number for number, each in enumerate(segments) for name in each.outputs}
    places = [each.place for each in segments]

    def sent(source: int, to: int) -> tuple[str, ...]:
        taken = (name for each in segments if each.place == to for name in each.inputs)
        return tuple(dict.fromkeys(name for name in taken if home.get(name) == source))

    plans, known = [], set[int]()
    for number, segment in enumerate(segments):
        if segment.place != place:
            continue
        needed = {home[name] for name in segment.inputs if name in home and places[home[name]] != place}
        plans.append(
            SegmentPlan(
                number=number,
                run=segment.module,
                inputs=segment.inputs,
                outputs=segment.outputs,
                sources={each: (places[each], sent(each, place)) for each in sorted(needed - known)},
                sinks={to: sent(number, to) for to in sorted({*places} - {place}) if sent(number, to)},
            )
        )
        known |= needed
    results: dict[int, tuple[str, ...]] = {}
    for name in dict.fromkeys(parts.results[mode].leaves):
        if name is not None and name in home:  # or it is an input
            there = places[home[name]]
            results[there] = (*results.get(there, ()), name)
    return PlacePlan(tuple(plans), dict(sorted(results.items())), parts.results[mode].build)
