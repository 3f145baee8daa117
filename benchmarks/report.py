"""What a benchmark hands back, and how it is shown: rows with a bar, and the CPU time that others took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, Literal

from polyrhythm.launch.console import table

DRAWN = {  # how plots look, the same everywhere
    "svg.fonttype": "none", "svg.hashsalt": "polyrhythm", "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"], "font.size": 11, "axes.spines.top": False,
    "axes.spines.right": False, "figure.facecolor": "white", "axes.facecolor": "white",
}  # fmt: skip
HEAD = ("what", "ours", "theirs", "ratio", "bar", "met")


@dataclass(frozen=True)
class Row:
    """One figure. The bar is for the ratio, or for `ours` where there is nothing to compare it with."""

    what: str
    ours: float
    unit: str
    theirs: float | None = None
    ratio: float | None = None
    bar: float | None = None
    wanted: Literal["at least", "below"] = "at least"
    more: dict[str, str] = field(default_factory=dict)  # columns of its own, by their head

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        value = self.ours if self.ratio is None else self.ratio
        return value >= self.bar if self.wanted == "at least" else value < self.bar

    def cells(self) -> list[str]:
        sign = "≥" if self.wanted == "at least" else "<"
        of_ratio = self.ratio is not None
        return [
            self.what,
            f"{_number(self.ours)} {self.unit}",
            "–" if self.theirs is None else f"{_number(self.theirs)} {self.unit}",
            "–" if self.ratio is None else f"{self.ratio:.3f}×",
            "–" if self.bar is None else f"{sign} {_number(self.bar)}{'×' if of_ratio else ' ' + self.unit}",
            {None: "–", True: "yes", False: "no"}[self.met],
        ]

    def plain(self) -> dict[str, Any]:
        """For JSON, which knows no NaN."""
        known = {
            name: None if isinstance(value, float) and isnan(value) else value
            for name, value in asdict(self).items()
        }
        return {**known, "met": self.met}


def show(rows: Sequence[Row]) -> str:
    more = list(dict.fromkeys(name for row in rows for name in row.more))
    cells = [[*row.cells(), *(row.more.get(name, "–") for name in more)] for row in rows]
    return table([*HEAD, *more], cells)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of what was measured side by side: a busy minute hits both of a pair."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


class Steal:
    """The share of this machine's CPU time that went to other machines, while it is open (None: unknown)."""

    def __enter__(self) -> Steal:
        self._before = ticks()
        self.share: float | None = None
        return self

    def __exit__(self, *_: object) -> None:
        now = ticks()
        if now and self._before and (total := sum(now) - sum(self._before)):
            self.share = (now[7] - self._before[7]) / total

    def __str__(self) -> str:
        return "CPU steal unknown" if self.share is None else f"CPU steal {self.share:.1%}"


def ticks() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal of all cores."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return []


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
