"""python -m benchmarks compare REV [--only NAME ...] [--rounds N] [--quick] [--json FILE]

Measures the key figures of revision REV (before) and of the work tree as it is, uncommitted changes included
(after), and prints both columns. Each revision runs its own package and its own benchmarks, in processes of
its own, in turn: a busy minute of the machine hits both. Do not edit files while it runs.

Most figures are ratios to a baseline in the same processes (Gloo, DDP, torch RPC, a bare `import torch`); the
simulator's are events per second, and memory is in multiples of the model's size. Each value is the median of
its rounds. Noise is the larger spread of the two columns, (highest - lowest) / median.

A figure is worse (or better) if every round after the change is worse (better) than every round before it and
the medians differ by more than the noise and by more than 2 %. Chance alone does the first to 1 figure in 20
with 3 rounds and to 1 in 252 with 5; so measure again (--only, --rounds) what is marked.

Beside each figure stands the CPU time that went elsewhere while it was measured: steal to other machines,
others to other processes on this one. Above 15 % the command says that the machine was busy.

REV is checked out into a temporary git work tree, which is removed again, also after Ctrl-C; what has been
measured until then is printed. A revision that has no benchmarks/key.py yet is measured with the present
benchmarks. The command fails (status 1) if something could not be measured, never because of a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import revisions
from benchmarks.key import MEASURES
from benchmarks.report import ratio
from polyrhythm.launch.console import table

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("before", "after")
LEAST = 0.02  # a smaller change of the median is called the same, however little noise there is
BUSY = 0.15  # a machine of which others have more measures them too
WITHIN = "within noise"
HEAD = ("what", *SIDES, "after/before", "wanted", "noise", "verdict", "steal", "others")
ROUNDS, QUICK_ROUNDS = 5, 3
NAMES = tuple(MEASURES)


@dataclass
class Figure:
    """One key figure in both revisions: its values by round."""

    name: str
    what: str
    unit: str
    better: str  # higher or lower
    before: dict[int, float] = field(default_factory=dict)
    after: dict[int, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """After / before, the median over the rounds that have both."""
        pairs = [(self.after[n], self.before[n]) for n in self.after if self.before.get(n)]
        return ratio(*zip(*pairs, strict=True)) if pairs else None

    @property
    def noise(self) -> float | None:
        sides = [list(side.values()) for side in (self.before, self.after)]
        if min(map(len, sides)) < 2 or not all(map(statistics.median, sides)):
            return None
        return max((max(side) - min(side)) / abs(statistics.median(side)) for side in sides)

    @property
    def verdict(self) -> str | None:
        """None if there are too few rounds to know the noise."""
        if self.noise is None:
            return None
        sign = 1 if self.better == "higher" else -1  # now higher is better
        before, after = ([sign * value for value in side.values()] for side in (self.before, self.after))
        old, new = statistics.median(before), statistics.median(after)
        if max(new / old, old / new) - 1 <= max(self.noise, LEAST):
            return WITHIN
        if max(after) < min(before):
            return "worse"
        return "better" if min(after) > max(before) else WITHIN

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name, "what": self.what, "unit": self.unit, "better": self.better,
            "before": list(self.before.values()), "after": list(self.after.values()),
            "ratio": self.ratio, "noise": self.noise, "verdict": self.verdict,
        }  # fmt: skip


class Comparison:
    """All that has been measured so far, and why the rest has not."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.figures: dict[tuple[str, str], Figure] = {}
        self.errors: dict[tuple[str, str], str] = {}  # by name and side
        self.measured: set[tuple[str, str]] = set()
        # Shares of the CPU time that others took, by name and round.
        self.steal: dict[str, list[float]] = {name: [] for name in names}
        self.others: dict[str, list[float]] = {name: [] for name in names}

    def add(self, name: str, side: str, number: int, measured: revisions.Measured) -> None:
        self.measured.add((name, side))
        if measured.error is not None:
            self.errors[name, side] = measured.error
        for shares, share in ((self.steal, measured.steal), (self.others, measured.others)):
            if share is not None:
                shares[name].append(share)
        for entry in measured.figures:
            what = entry["what"]
            figure = self.figures.setdefault((name, what), Figure(name, what, entry["unit"], entry["better"]))
            getattr(figure, side)[number] = float(entry["value"])

    def hopeless(self, name: str, side: str) -> bool:
        """True if this failed and has never given a value."""
        values = any(getattr(figure, side) for figure in self.of(name))
        return (name, side) in self.errors and not values

    def of(self, name: str) -> list[Figure]:
        return [figure for figure in self.figures.values() if figure.name == name]

    def show(self) -> str:
        rows = []
        for name in self.names:
            shares = [
                f"{_mean(share[name]):.1%}" if share[name] else "–" for share in (self.steal, self.others)
            ]
            if not self.of(name):
                rows.append([name, *["–"] * (len(HEAD) - 3), *shares])
            for figure in self.of(name):
                change, noise = figure.ratio, figure.noise
                rows.append([
                    figure.what, *(_value(getattr(figure, side), figure.unit) for side in SIDES),
                    "–" if change is None else f"{change:.3f}", figure.better,
                    "–" if noise is None else f"{noise:.0%}", figure.verdict or "–", *shares,
                ])  # fmt: skip
        return table(HEAD, rows)

    def notes(self) -> list[str]:
        """The verdict, and why figures are missing."""
        verdicts = {figure.what: figure.verdict for figure in self.figures.values()}
        if not any(verdicts.values()):
            notes = ["no verdict: the noise is known after two rounds of both"]
        else:
            notes = [
                f"{verdict} by more than the noise: "
                + ("; ".join(what for what in verdicts if verdicts[what] == verdict) or "nothing")
                for verdict in ("worse", "better")
            ]
        lost = [share for shares in (self.steal, self.others) for share in map(_mean, shares.values())]
        if max(lost, default=0.0) > BUSY:
            notes.append(
                f"the machine was busy: others took up to {max(lost):.0%} of its CPU time; measure again "
                "before you believe a verdict"
            )
        notes += [f"– {side}, {name}: {why}" for (name, side), why in self.errors.items()]
        for name, side in sorted(self.measured - set(self.errors)):
            if lacking := [figure.what for figure in self.of(name) if not getattr(figure, side)]:
                notes.append(f"– {side}, {name}: this revision does not measure {'; '.join(lacking)}")
        return notes


def _mean(shares: Sequence[float]) -> float:
    return statistics.mean(shares) if shares else 0.0


def _value(values: dict[int, float], unit: str) -> str:
    if not values:
        return "–"
    middle = statistics.median(values.values())
    number = f"{middle:,.0f}" if abs(middle) >= 1000 else f"{middle:.3g}"
    return f"{number}{unit}" if unit in ("×", "/s") else f"{number} {unit}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    args = _parse(arguments)
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    comparison = Comparison(args.only or NAMES)
    interrupted = False
    began = time.monotonic()
    try:
        commit = revisions.resolve(root, args.revision)
        where = _where(root, args, commit, rounds)
        try:
            with revisions.interruptible(), revisions.checkout(root, commit) as tree:
                _measure(comparison, {"before": tree, "after": root}, rounds, args.quick)
        except KeyboardInterrupt:
            interrupted = True
    except revisions.RevisionError as error:
        print(f"python -m benchmarks compare: {error}", file=sys.stderr)
        return 2
    head, dirty = where["after"]["commit"], where["after"]["uncommitted"]
    changed = " and uncommitted changes" if dirty else ""
    print(f"before: {args.revision} ({commit[:12]}); after: {head[:12]}{changed}")
    print(comparison.show(), *comparison.notes(), sep="\n")
    if interrupted:
        print("interrupted: these are the figures until then")
    print(f"{time.monotonic() - began:.0f} s, {rounds} rounds, {os.cpu_count()} cores")
    where["interrupted"] = interrupted
    _write(args.json, {**where, **_plain(comparison)})
    return 130 if interrupted else int(bool(comparison.errors))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("revision", metavar="REV", help="the commit to compare with: a hash, a tag, HEAD~1")
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="NAME", help=f"only these of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"times each is measured; {ROUNDS}, {QUICK_ROUNDS} with --quick",
    )
    parser.add_argument("--quick", action="store_true", help="smaller and less exact: 2 to 3 minutes, not 9")
    parser.add_argument(
        "--json", type=Path, default=Path("runs/compare.json"), metavar="FILE", help="%(default)s"
    )
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.only or () if name not in NAMES]:
        parser.error(f"there is no key figure {unknown[0]}; there are {', '.join(NAMES)}")
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be 1 or more")
    return args


def _measure(comparison: Comparison, trees: dict[str, Path], rounds: int, quick: bool) -> None:
    """All figures once in each round, so that an early end leaves something of each."""
    if revisions.lend_benchmarks(trees["after"], trees["before"]):
        _say("before has no benchmarks/key.py: the present benchmarks measure it")
    for tree in trees.values():
        revisions.compile_sources(tree)
    total, done, began = rounds * len(comparison.names) * len(SIDES), 0, time.monotonic()
    for number in range(rounds):
        for name in comparison.names:
            # The second of a pair may find the machine warmer: both sides are second equally often.
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                done += 1
                if comparison.hopeless(name, side):
                    continue
                measured = revisions.measure(trees[side], name, quick)
                comparison.add(name, side, number, measured)
                left = (time.monotonic() - began) / done * (total - done)
                what = measured.error or f"{measured.seconds:.0f} s"
                _say(
                    f"{done}/{total}  round {number + 1} of {rounds}  {side:6}  {name:9}  {what}  "
                    f"({left:.0f} s left)"
                )


def _where(root: Path, args: argparse.Namespace, commit: str, rounds: int) -> dict[str, Any]:
    head, dirty = revisions.describe(root)
    return {
        "when": f"{datetime.now():%Y-%m-%d %H:%M}", "cores": os.cpu_count(), "machine": platform.platform(),
        "python": platform.python_version(), "quick": args.quick, "rounds": rounds,
        "before": {"revision": args.revision, "commit": commit},
        "after": {"commit": head, "uncommitted": dirty},
    }  # fmt: skip


def _plain(comparison: Comparison) -> dict[str, Any]:
    return {
        "figures": [figure.plain() for figure in comparison.figures.values()],
        "steal": comparison.steal,
        "others": comparison.others,
        "errors": [
            {"name": name, "side": side, "error": why} for (name, side), why in comparison.errors.items()
        ],
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {file}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
