"""The order in which one place of a pipeline runs the passes of a batch, by schedule: 1F1B and its relatives.

The model is cut into K * C segments, and segment i is at place i mod K: each place has C chunks of the model.
A place runs some forward passes first (warm-up), then forward and backward passes by turns, and then the
backward passes that are left.

- 1F1B has one chunk, and K - s - 1 passes of warm-up at place s (Narayanan et al. 2019).
- Interleaved 1F1B has several chunks. Micro-batches pass through them in groups of about K, so that the first
  of a group is back when the last of it has left. The bubble is C times smaller (Narayanan et al. 2021).
- Zero bubble (ZB-H1) divides a backward pass: the place before waits for the gradient of the input, and
  nobody for the weight gradients. Place s is s micro-batches late with those, and computes them at the end,
  when it would wait. So no place keeps more than K micro-batches, as under 1F1B (Qi et al. 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "input", "weights"]  # backward is input and weights in one


class Action(NamedTuple):
    """What a place does with one micro-batch."""

    kind: Kind
    micro_batch: int
    chunk: int = 0  # of this place


def order(place: int, places: int, chunks: int, pieces: int, apart: bool) -> list[Action]:
    """What one place does for a batch of so many micro-batches. `apart`: weight gradients come later."""
    groups = _groups(places, pieces)
    forward = [(piece, chunk) for group in groups for chunk in range(chunks) for piece in group]
    backward = [(piece, chunk) for group in groups for chunk in reversed(range(chunks)) for piece in group]
    # With several chunks a place would wait between its first backward passes for those of the next place.
    steps = 2 if chunks > 1 and not apart else 1
    ahead = (chunks - 1) * len(groups[0]) + steps * (places - 1 - place)
    found = [Action("forward", *each) for each in forward[:ahead]]
    for number, each in enumerate(backward):
        found += [Action("forward", *due) for due in forward[ahead + number : ahead + number + 1]]
        found.append(Action("input" if apart else "backward", *each))
        if apart and number >= place:
            found.append(Action("weights", *backward[number - place]))
    return found + [Action("weights", *each) for each in backward[max(0, len(backward) - place) :] if apart]


def _groups(places: int, pieces: int) -> list[Sequence[int]]:
    """Micro-batches that pass through a chunk together: as many as there are places, or a few more."""
    count = max(1, pieces // places)
    edges = [-(-number * pieces // count) for number in range(count + 1)]  # the first group is the largest
    return [range(begin, end) for begin, end in itertools.pairwise(edges)]
