"""Finds strategies and codecs by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple, NoReturn

from polyrhythm.core import extensions, grammar
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UnknownName, UsageError
from polyrhythm.core.grammar import Configured
from polyrhythm.core.split import ModelSplit
from polyrhythm.core.strategy import Strategy

# Makes one strategy of what is on the two sides of a symbol.
OPERATORS: dict[str, Callable[..., Strategy]] = {}
WITH_SPLIT = "allreduce"  # the strategy of a text that names only how the model is divided

Kind = Literal["strategy", "codec", "split"]
_BASES: dict[str, type[Configured]] = {"strategy": Strategy, "codec": Codec, "split": ModelSplit}


def registered(kind: str) -> Mapping[str, type[Configured]]:
    """The classes of a kind that this process has defined or imported, by name."""
    return _BASES[kind].registry


def is_builtin(cls: type) -> bool:
    """True if every process knows the class without being told."""
    return cls.__module__.startswith("polyrhythm.")


def parse(text: str) -> Strategy:
    """The strategy that `text` names; UsageError says what is wrong with it and what would work."""
    if not isinstance(text, str):
        raise UsageError(f"a strategy is named by a string such as 'local:8', not by {text!r}")
    text = text.strip(" ")
    load_builtins()
    if "@" in text or grammar.name_of(text) in ModelSplit.registry:
        return _divided(text)
    if len(sides := grammar.levels(text)) > 1:
        return _composed(text, sides)
    choice, *codecs = re.split(grammar.PLUS, text)
    cls = _strategy(choice)
    with _naming(text):
        if len(codecs) > 1:
            raise UsageError("takes one codec at most")
        made = [grammar.make(_codec(codec), codec) for codec in codecs]
        return grammar.make(cls, choice, **({"codec": made[0]} if made else {}))


def _composed(text: str, sides: Sequence[str]) -> Strategy:
    with _naming(text, _without_spaces):
        if len(sides) > 2:
            raise UsageError("takes two levels at most, one inside sites and one between them")
        within, across = map(parse, sides)
        return OPERATORS["/"](within, across)


def _divided(text: str) -> Strategy:
    """A strategy on models that are divided: `ssp:3@pipeline:2`."""
    with _naming(text):
        strategy, splits = _sides(text)
        made = [grammar.make(grammar.find("split", ModelSplit.registry, each), each) for each in splits]
        return OPERATORS["@"](parse(strategy), tuple(made))


def _sides(text: str) -> tuple[str, list[str]]:
    """The texts of a strategy, and of the ways in which it divides models."""
    first, *rest = (side.strip(" ") for side in text.split("@"))
    alone = grammar.name_of(first) in ModelSplit.registry
    return (WITH_SPLIT, [first, *rest]) if alone else (first, rest)


def _without_spaces(text: str) -> str:
    """The error if a slash was meant to be part of a value, as in `gossip:0-1 / 1-2`; "" if not."""
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
    load_builtins()
    choice = text.strip(" ")
    with _naming(text):
        return grammar.make(_codec(choice), choice)


def unknown_names(text: str) -> list[tuple[Kind, str]]:
    """The names in a strategy's text that neither are built in nor defined in this process."""
    return [
        (kind, name)
        for kind, choice in _choices(text)
        if (name := grammar.name_of(choice)) and name not in registered(kind)
    ]


def refuse_unknown(text: str, kind: Kind, name: str) -> NoReturn:
    """Raises the error for one unknown name in a strategy's text."""
    several = kind == "codec" or len(grammar.levels(text)) > 1
    with _naming(text, _without_spaces) if several else contextlib.nullcontext():
        grammar.find(kind, registered(kind), name, extensions.plugins(kind))
    raise AssertionError(f"{kind} {name} is known")


def check_known(text: str) -> None:
    """Raises UsageError if the part of a strategy's text whose names are known is wrong."""
    with _naming(text):
        for kind, choice in _choices(text):
            if (cls := registered(kind).get(grammar.name_of(choice))) is not None:
                grammar.make(cls, choice)


def _choices(text: str) -> Iterator[tuple[Kind, str]]:
    """The choices that a text consists of, with their kinds."""
    load_builtins()
    strategy, splits = _sides(text.strip(" "))
    yield from (("split", split) for split in splits)
    for level in grammar.levels(strategy):
        choice, *codecs = re.split(grammar.PLUS, level.strip(" "))
        yield "strategy", choice
        yield from (("codec", codec) for codec in codecs)


def _strategy(choice: str) -> type[Strategy]:
    return grammar.find("strategy", Strategy.registry, choice, _plugins("strategy", choice))


def _codec(choice: str) -> type[Codec]:
    return grammar.find("codec", Codec.registry, choice, _plugins("codec", choice))


def _plugins(kind: Kind, choice: str) -> Sequence[str]:
    """Loads the plug-in that a choice names, if it names one; returns the names of all plug-ins."""
    name = grammar.name_of(choice)
    if name in registered(kind):
        return ()
    extensions.load_plugin(kind, name)
    return tuple(extensions.plugins(kind))


@contextlib.contextmanager
def _naming(text: str, instead: Callable[[str], str] = lambda text: "") -> Iterator[None]:
    """Puts the text that is parsed in front of an error; `instead` may have a better error."""
    try:
        yield
    except UsageError as error:
        printable, better = text if text.isprintable() else repr(text), instead(text)
        kind = UnknownName if isinstance(error, UnknownName) and not better else UsageError
        raise kind(f"{printable}: {better or error}") from None


class Row(NamedTuple):
    """A line of the table of strategies or codecs. `fields` are (name, what it takes, default) as text."""

    name: str
    fields: tuple[tuple[str, str, str], ...]
    summary: str
    paper: str
    origin: str = ""  # the module that defines it, if it is not built in


def describe(kind: Kind = "strategy", own: bool = False) -> list[Row]:
    """Every strategy, or codec, with its fields, the first line of its docstring and its paper.

    Those that are built in; with `own`, also those that the user has defined or imported.
    """
    load_builtins()
    rows = []
    for name, cls in sorted(registered(kind).items()):
        if not own and not is_builtin(cls):
            continue
        options = tuple(
            (o.name, grammar.wanted(o.type), "required" if o.required else grammar.write(o.type, o.default))
            for o in grammar.options(cls)
            if o.name in cls.choices()
        )
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        rows.append(Row(name, options, summary, cls.paper, "" if is_builtin(cls) else cls.__module__))
    return rows


@cache
def load_builtins() -> None:
    """Imports every module of the two packages, which registers the classes that they define."""
    import importlib
    import pkgutil

    importlib.import_module("polyrhythm.parallel.splits")
    for package in ("polyrhythm.strategies", "polyrhythm.compress.codecs"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
