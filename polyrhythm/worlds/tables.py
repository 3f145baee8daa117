"""Reads TOML tables key by key, with errors that name the place, and quantities such as "20 ms"."""

from __future__ import annotations

import re
from difflib import get_close_matches
from math import isfinite
from typing import Any

from polyrhythm.core.errors import UsageError

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
BYTES_PER_SECOND = {
    **{"bit/s": 0.125, "kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6},
    **{"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9},
}
QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*", re.ASCII | re.DOTALL)


class Table:
    """A TOML table that is read key by key; `where` is its place in the file, for errors."""

    def __init__(self, where: str, content: Any) -> None:
        if not isinstance(content, dict):
            raise UsageError(f"{where}: must be a table, not {content!r}")
        self.where, self.content, self.known = where, content, list[str]()

    def take(self, key: str, default: Any = None) -> Any:
        self.known.append(key)
        return self.content.get(key, default)

    def error(self, key: str, problem: str) -> UsageError:
        value = f" = {self.content[key]!r}" if key in self.content else ""
        return UsageError(f"{self.where}: {key}{value}: {problem}")

    def reject_unknown_keys(self) -> None:
        """Raises UsageError if a key was not read."""
        for key in self.content:
            if key not in self.known:
                raise UsageError(f"{self.where}: unknown key {key!r}; {hint(key, self.known, 'keys')}")

    def tables(self, key: str) -> list[Table]:
        value = self.take(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise UsageError(f"{self.where}: {key} must be a list of tables; write [[{key}]]")
        return [Table(f"{self.where}: {key}[{index}]", item) for index, item in enumerate(value)]

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, 'must be a text in quotes, such as "workstation"')
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0."""
        value = self.take(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value <= 1e100:
            raise self.error(key, "must be a number above 0")
        return float(value)

    def quantity(self, key: str, units: dict[str, float], default: float, above_zero: bool = False) -> float:
        value = self.take(key)
        return default if value is None else self.parse(key, value, units, above_zero)

    def parse(self, key: str, value: Any, units: dict[str, float], above_zero: bool = False) -> float:
        try:
            result = quantity(value, units)
        except ValueError as error:
            raise self.error(key, str(error)) from None
        if result < 0 or (above_zero and result == 0):
            raise self.error(key, "must be above 0" if above_zero else "must be 0 or more")
        return result


def quantity(value: object, units: dict[str, float]) -> float:
    """The value of a text such as "20 ms", in the unit whose factor is 1."""
    match = QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"must be a text with a number and a unit; use {_words(list(units), 'or')}")
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(f"{'unknown' if unit else 'no'} unit; use {_words(list(units), 'or')}")
    result = float(number) * units[unit]
    if not isfinite(result):
        raise ValueError("too large")
    return result


def _words(items: list[str], last: str) -> str:
    return f"{', '.join(items[:-1])} {last} {items[-1]}" if len(items) > 1 else items[0]


def hint(word: str, known: list[str], what: str) -> str:
    """A hint for an error about an unknown word."""
    if close := get_close_matches(word, known, n=1):
        return f"did you mean {close[0]}?"
    return f"the {what} here are {_words(known, 'and')}" if known else f"there are no {what} here"
