"""python -m benchmarks.key [NAME ...] [--quick] [--json FILE]

Measures the key figures of this revision, in a few seconds each. `python -m benchmarks compare` calls this in
the trees of two revisions and compares what they write.

Old revisions cannot be changed, so the command line above and the format below must stay as they are, however
the package and the other benchmarks change. Each line of FILE (- is standard output) is one JSON object:

    {"package": ".../polyrhythm/__init__.py"}                        first: the code that is measured
    {"name": "ddp", "what": "samples/s against DDP", "value": 1.18, "unit": "×", "better": "higher"}
    {"name": "server", "error": "ImportError: ..."}                  what could not be measured, and why

Figures of two revisions are compared if `name` and `what` are equal. So a figure whose size or method changes
gets another `what`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.report import Row


@dataclass(frozen=True)
class Figure:
    what: str
    value: float
    unit: str
    better: Literal["higher", "lower"]


def _ratio(what: str, row: Row, better: Literal["higher", "lower"] = "higher") -> Figure:
    assert row.ratio is not None
    return Figure(what, row.ratio, "×", better)


# Each imports its benchmark itself: one that cannot be imported must not cost the others.


def _allreduce(quick: bool) -> list[Figure]:
    from benchmarks import collectives

    rows = collectives.one_host(2, (1 << 16, 16 << 20), 5 if quick else 11)
    return [_ratio(f"all-reduce against Gloo: {row.what}", row) for row in rows]


def _ddp(quick: bool) -> list[Figure]:
    from benchmarks import allreduce

    rows, _ = allreduce.against_ddp(allreduce.NETWORK, 3 if quick else 9, 4)
    return [_ratio(row.what, row) for row in rows]


def _server(quick: bool) -> list[Figure]:
    from benchmarks import server

    sizes, rounds, work = ((1,), 3, 20) if quick else ((1, 16), 3, 50)
    return [
        _ratio(" ".join(f"round trip, {row.what}".split()), row)
        for row in server.round_trips(1, sizes, rounds, work)
        if "shared memory / Gloo" not in row.what
    ]


def _simulator(quick: bool) -> list[Figure]:
    from benchmarks import simulator

    pings, repeats = (3_000, 3) if quick else (10_000, 5)
    rates = simulator.event_rates(pings, repeats)
    return [
        Figure(f"simulator, events per CPU second: {what}", value, "/s", "higher")
        for what, value in rates.items()
    ]


def _simulated_step(quick: bool) -> list[Figure]:
    from benchmarks import simulator

    cost = simulator.step_cost(30, 4 if quick else 8)
    return [_ratio("simulator, CPU time that an async step adds / plain PyTorch step", cost, "lower")]


def _startup(quick: bool) -> list[Figure]:
    from benchmarks import startup

    text = startup.help_text(3 if quick else 7)
    strategies = ("allreduce",) if quick else ("allreduce", "async")
    return [
        Figure(f"start-up: {text.what}", text.ours, text.unit, "lower"),
        *(
            _ratio(f"start-up / import torch: first step of 4 workers, {strategy}", row, "lower")
            for strategy, row in zip(strategies, startup.first_steps(strategies, 1), strict=True)
        ),
    ]


def _memory(quick: bool) -> list[Figure]:
    from benchmarks import memory

    width = 3072
    peaks = memory.peaks(memory.QUICK if quick else memory.STRATEGIES, width)
    size = memory.megabytes(width)
    return [
        Figure(f"peak memory per worker / model of {size}: {strategy} {phase}", value, "×", "lower")
        for strategy, peak in peaks.items()
        for phase, value in (("while training", peak.training), ("with consensus and end", peak.most))
    ]


MEASURES: dict[str, Callable[[bool], list[Figure]]] = {
    "allreduce": _allreduce, "ddp": _ddp, "server": _server, "simulator": _simulator,
    "simulated-step": _simulated_step, "startup": _startup, "memory": _memory,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.key",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="smaller and less exact")
    parser.add_argument("--json", default="-", metavar="FILE", help="where to write; standard output if -")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in MEASURES]:
        parser.error(f"there is no key figure {unknown[0]}; there are {', '.join(MEASURES)}")
    with _output(args.json) as file:
        return int(_measure(args.names or list(MEASURES), args.quick, file))


def _output(path: str) -> IO[str]:
    if path != "-":
        return open(path, "w", encoding="utf-8")
    file = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what benchmarks print must not come between the lines
    return file


def _measure(names: Iterable[str], quick: bool, file: IO[str]) -> bool:
    """Whether something failed. This process does not import torch, so that it can be forked."""
    import polyrhythm

    def line(**entries: object) -> None:
        file.write(json.dumps(entries, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()

    line(package=polyrhythm.__file__)
    failed = False
    for name in names:
        try:
            for figure in MEASURES[name](quick):
                line(name=name, **asdict(figure))
        except Exception as error:
            traceback.print_exc()
            line(name=name, error=_reason(error))
            failed = True
    return failed


def _reason(error: Exception) -> str:
    """One line; an error from a forked process has a whole traceback as its text, which ends with it."""
    text = str(error).strip().splitlines()
    if len(text) > 1:
        return text[-1]
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
