"""Finds strategies and codecs by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from polyrhythm.core import grammar
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError
from polyrhythm.core.grammar import Configured
from polyrhythm.core.strategy import Strategy

# What makes one strategy of two: the symbol between them, and the strategy that it makes.
OPERATORS: dict[str, Callable[[Strategy, Strategy], Strategy]] = {}


def parse(text: str) -> Strategy:
    """The strategy that `text` names; UsageError says what is wrong with it and what would work."""
    if not isinstance(text, str):
        raise UsageError(f"a strategy is named by a text, such as 'local:8', and not by {text!r}")
    text = text.strip(" ")
    _load_builtins()
    if len(sides := grammar.levels(text)) > 1:
        return _composed(text, sides)
    choice, *codecs = re.split(grammar.PLUS, text)
    cls = grammar.find("strategy", Strategy.registry, choice)
    try:
        if len(codecs) > 1:
            raise UsageError("takes one codec at most")
        made = [grammar.make(grammar.find("codec", Codec.registry, codec), codec) for codec in codecs]
        return grammar.make(cls, choice, **({"codec": made[0]} if made else {}))
    except UsageError as error:
        asked = text if text.isprintable() else repr(text)
        raise UsageError(f"{asked}: {error}") from None


def _composed(text: str, sides: Sequence[str]) -> Strategy:
    try:
        if len(sides) > 2:
            raise UsageError("takes two levels at most, one inside sites and one between them")
        within, across = map(parse, sides)
        return OPERATORS["/"](within, across)
    except UsageError as error:
        asked = text if text.isprintable() else repr(text)
        raise UsageError(f"{asked}: {_without_spaces(text) or error}") from None


def _without_spaces(text: str) -> str:
    """What to say if a slash was meant to be inside a value, as in `gossip:0-1 / 1-2`; "" if not."""
    tight = re.sub(" */ *", "/", text)
    if len(grammar.levels(tight)) > 1:
        return ""
    try:
        parse(tight)
    except UsageError:
        return ""
    return f"a slash with a space beside it is between two levels; did you mean {tight}?"


def parse_codec(text: str) -> Codec:
    """The codec that `text` names, such as "topk:0.01"; UsageError says what is wrong with it."""
    _load_builtins()
    try:
        return grammar.make(grammar.find("codec", Codec.registry, text.strip(" ")), text.strip(" "))
    except UsageError as error:
        raise UsageError(f"{text if text.isprintable() else repr(text)}: {error}") from None


class Row(NamedTuple):
    """A line of the table of strategies. `fields` are (name, what it takes, default) as text."""

    name: str
    fields: tuple[tuple[str, str, str], ...]
    summary: str
    paper: str


def describe(kind: Literal["strategy", "codec"] = "strategy") -> list[Row]:
    """Every strategy, or codec, with its fields, the first line of its docstring and its paper."""
    _load_builtins()
    known: Mapping[str, type[Configured]] = Codec.registry if kind == "codec" else Strategy.registry
    rows = []
    for name, cls in sorted(known.items()):
        options = tuple(
            (o.name, grammar.wanted(o.type), "required" if o.required else grammar.write(o.type, o.default))
            for o in grammar.options(cls)
            if o.name in cls.choices()
        )
        rows.append(Row(name, options, (cls.__doc__ or "").strip().partition("\n")[0], cls.paper))
    return rows


@cache
def _load_builtins() -> None:
    """Imports every module of the two packages, which registers the classes that they define."""
    import importlib
    import pkgutil

    for package in ("polyrhythm.strategies", "polyrhythm.compress.codecs"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
