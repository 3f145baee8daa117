"""`polyrhythm explain`: draws an algorithm step by step, by running its real code on simulated workers.

Worker r contributes 2**r, so the bits of a sum are the ranks that have contributed to it: the drawing shows
the actual content of the tensors.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyrhythm.core.errors import UsageError

MAX_WORKERS, MAX_LENGTH = 16, 1 << 20
_LISTED = 5  # with up to this many workers a sum is written out: 0+1+2
_MARGIN = 11
_PHASES = {
    "share-reduce": "a worker adds the chunk it receives to its own; in the end each has one complete chunk",
    "share-only": "the chunk that a worker receives replaces its own",
}
_CHANGED, _PLAIN = "\x1b[1;32m", "\x1b[0m"

# By worker and chunk: the ranks whose values are in the sum; empty for a chunk without elements.
Contributions = list[list[list[int]]]


@dataclass(frozen=True)
class Move:
    """The chunk that one worker sends in a step, its size, and the chunk `got` that it receives."""

    rank: int
    to: int
    chunk: int
    elements: int
    nbytes: int
    got: int


@dataclass(frozen=True)
class Step:
    phase: str
    step: int  # from 0 in each phase
    moves: list[Move]  # by rank
    holds: Contributions  # after it


@dataclass(frozen=True)
class Explanation:
    """The steps and the cost of a ring all-reduce."""

    workers: int
    length: int
    chunks: list[int]  # elements in each
    start: Contributions
    steps: list[Step]
    elements: list[int]  # sent by each worker, from the trace
    formula: list[int]  # the same, from the formula
    nbytes: list[int]  # sent by each worker, counted by its node

    def plain(self) -> dict[str, Any]:
        return {"kind": "ring", **asdict(self)}


def ring(workers: int, length: int | None = None) -> Explanation:
    """Runs the ring on simulated workers, with one vector of int64 each, and records every step."""
    if not 2 <= workers <= MAX_WORKERS:
        raise UsageError(f"--workers {workers}: the drawing has room for 2 to {MAX_WORKERS}")
    length = workers if length is None else length
    if not 0 <= length <= MAX_LENGTH:
        raise UsageError(f"--length {length}: it must be 0 to {MAX_LENGTH:,}; one per worker shows it best")
    import torch

    from polyrhythm.collectives.ring import Turn, all_reduce, bounds, sent_elements
    from polyrhythm.launch import simulate
    from polyrhythm.session.api import init

    cuts = [bounds(length, workers, chunk) for chunk in range(workers)]
    vectors = [torch.full((length,), 1 << rank, dtype=torch.int64) for rank in range(workers)]
    turns: dict[tuple[str, int], dict[int, tuple[Move, list[list[int]]]]] = {}
    nbytes = [0] * workers

    def holds(rank: int) -> list[list[int]]:
        return [_contributors(vectors[rank][start:stop].tolist(), workers) for start, stop in cuts]

    def trace(turn: Turn) -> None:
        move = Move(turn.rank, turn.to, turn.sent, turn.elements, turn.nbytes, turn.received)
        turns.setdefault((turn.phase, turn.step), {})[turn.rank] = move, holds(turn.rank)

    def program() -> None:
        session: Any = init()
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        node = session._node
        before = node.bytes_sent
        all_reduce(node, node.members.workers, [vectors[node.rank]], "sum", 0, trace)
        nbytes[node.rank] = node.bytes_sent - before

    start = [holds(rank) for rank in range(workers)]
    simulate(program, workers=workers, strategy="local")
    steps = []
    for (phase, step), found in turns.items():
        inorder = [found[rank] for rank in range(workers)]
        steps.append(Step(phase, step, [move for move, _ in inorder], [held for _, held in inorder]))
    elements = [sum(step.moves[rank].elements for step in steps) for rank in range(workers)]
    formula = [sent_elements(length, workers, rank) for rank in range(workers)]
    sizes = [stop - start for start, stop in cuts]
    return Explanation(workers, length, sizes, start, steps, elements, formula, nbytes)


def _contributors(values: Sequence[int], workers: int) -> list[int]:
    """The ranks that have contributed to these sums, which must be equal."""
    assert len(set(values)) <= 1, f"elements of one chunk differ: {sorted(set(values))}"
    return [rank for rank in range(workers) if values and values[0] >> rank & 1]


def draw(what: Explanation, colour: bool = False) -> str:
    """The explanation as text. Changes of a step are in brackets."""
    n = what.workers
    how = "" if n <= _LISTED else " (6..1: from 6 around the ring to 1); 3 to 4 is chunk 3 sent to worker 4"
    lines = [
        *_wrapped(
            f"Ring all-reduce: {n} workers, {_count(what.length, 'element')} each, in {n} chunks. Each "
            "worker sends to the next one only, the last to the first. A cell shows whose contributions a "
            f"chunk holds{how}. Brackets mark the changes of a step."
        ),
        "",
        "start",
        *_table(what, what.start),
    ]
    before = what.start
    for phase, steps in itertools.groupby(what.steps, lambda step: step.phase):
        lines += ["", *_wrapped(f"{phase}: {_PHASES[phase]}")]
        for step in steps:
            lines += ["", f"{phase}, step {step.step + 1} of {n - 1}"]
            lines += _table(what, step.holds, before, step.moves, colour)
            before = step.holds
    same = "as" if what.elements == what.formula else "NOT as"
    near = "" if what.length % n == 0 else ", within one per step"
    ideal = f"2(n-1)/n x length = {2 * (n - 1) / n * what.length:g}{near}"
    totals = [
        f"steps: {len(what.steps)} = 2(n-1)",
        f"elements sent by each worker: {_each(what.elements)}; {same} in theory: {ideal}",
        f"bytes sent, counted at the nodes: {_each(what.nbytes)} (8 per element)",
    ]
    return "\n".join([*lines, "", *(line for total in totals for line in _wrapped(total))])


def _table(
    what: Explanation,
    holds: Contributions,
    before: Contributions | None = None,
    moves: Sequence[Move] = (),
    colour: bool = False,
) -> list[str]:
    n = what.workers
    short = n > _LISTED
    width = max(len(_cell(who, n, 1)) for who in _widest(n)) + 3
    width = width if short else max(width, len(" chunk 0 "))
    says = [
        f"{move.chunk} to {move.to}" if short else f"sends chunk {move.chunk} to {move.to}" for move in moves
    ]
    side = max(map(len, says)) + 2 if says else 0
    head = " " * _MARGIN + ("sends" if short and says else "").ljust(side)
    names = [f" {chunk}" if short else f" chunk {chunk}" for chunk in range(n)]
    lines = [(head + "".join(name.ljust(width) for name in names)).rstrip()]
    for rank, row in enumerate(holds):
        line = f"worker {rank}".ljust(_MARGIN) + (says[rank] if says else "").ljust(side)
        for chunk, (who, size) in enumerate(zip(row, what.chunks, strict=True)):
            changed = before is not None and who != before[rank][chunk]
            cell = f"[{_cell(who, n, size)}]" if changed else f" {_cell(who, n, size)}"
            room = " " * (width - len(cell))
            line += (f"{_CHANGED}{cell}{_PLAIN}" if changed and colour else cell) + room
        lines.append(line.rstrip())
    return lines


def _cell(who: Sequence[int], workers: int, elements: int) -> str:
    if not elements:
        return "-"
    if workers <= _LISTED:
        return "+".join(map(str, who))
    if len(who) == workers:
        return "all"
    first = next(rank for rank in who if (rank - 1) % workers not in who)
    last = next(rank for rank in who if (rank + 1) % workers not in who)
    if len(who) != (last - first) % workers + 1:
        return "+".join(map(str, who))
    return str(first) if len(who) == 1 else f"{first}..{last}"


def _widest(workers: int) -> list[list[int]]:
    """Contributions with the widest possible cells."""
    return [list(range(workers)), [workers - 2, workers - 1], [0]]


def _each(numbers: Sequence[int]) -> str:
    return f"{numbers[0]:,}" if len(set(numbers)) == 1 else ", ".join(map(str, numbers))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 80)
