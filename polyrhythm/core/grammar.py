"""The one grammar that names strategies and codecs: `local:8`, `async:weight=1/tau+topk:0.01`.

    text      =  levels { "@" choice }                 a strategy, and how each model is divided over workers
    levels    =  level [ "/" level ]                   one strategy, or one inside sites / one between them
    level     =  choice [ "+" choice ]                 a strategy, and the codec it sends through
    choice    =  name [ ":" item { "," item } ]
    item      =  value | field "=" value               a bare value comes first and sets the field `main`

Each name belongs to a frozen dataclass whose fields are its whole configuration: their names, types and
defaults give the grammar, the help text and the errors. Defining a class with a `name` registers it.

`str` is the inverse of `parse`: it writes only the fields that differ from their defaults. In text values
`%2c` stands for a comma, and so on for the few characters that the grammar itself uses.

Values may contain slashes, as in `weight=1/tau` and `dense=1d/head`. A slash separates two levels if a
space is beside it, if it follows a name, or if a level could follow: the name of a known strategy, and then a
colon, a plus or the end. So `allreduce+int8:dense=1d/head` is one level, `allreduce+int8:dense=1d/diloco:50`
is two, and a layer with the name of a strategy is written `dense=1d%2flocal`.
"""

from __future__ import annotations

import math
import os
import re
import sys
from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from polyrhythm.core.errors import UnknownName, UsageError

Made = TypeVar("Made", bound="Configured")

_KINDS: dict[str, type[Configured]] = {}  # the base class of each kind


@dataclass(frozen=True)
class Configured(ABC):
    """A strategy or codec. Subclasses are frozen dataclasses; one without a `name` of its own is abstract."""

    kind: ClassVar[str]
    registry: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    main: ClassVar[str | None] = None
    shows_main: ClassVar[bool] = False  # its text always has the main field: local:8, never local
    paper: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            _KINDS[cls.kind] = cls
        if "name" not in cls.__dict__:
            return
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", cls.name):
            raise TypeError(f"{cls.__qualname__}: {cls.name!r} cannot be a name: use a-z, 0-9, _ and -")
        known = cls.registry.get(cls.name)
        if known and not _same_class(known, cls):
            raise TypeError(f"{cls.__qualname__}: {cls.kind} {cls.name!r} is already {known.__qualname__}")
        cls.registry[cls.name] = cls

    def __new__(cls, *values: Any, **named: Any) -> Self:
        # Not in __post_init__: subclasses define that to check ranges, and would replace this check.
        if hasattr(cls, "name"):
            places = [each.name for each in fields(cls) if each.init and not each.kw_only]
            given = {**dict(zip(places, values, strict=False)), **named}
            for option in options(cls):
                if option.name in given and not _fits(option.type, given[option.name]):
                    raise UsageError(
                        f"{cls.name}: {option.name} takes {wanted(option.type)}, not {given[option.name]!r}"
                    )
        return super().__new__(cls)

    @classmethod
    def choices(cls) -> list[str]:
        """The names of the fields that can be set."""
        return [option.name for option in options(cls)]

    def __str__(self) -> str:
        texts = {
            o.name: write(o.type, getattr(self, o.name))
            for o in options(type(self))
            if o.required or getattr(self, o.name) != o.default or (self.shows_main and o.name == self.main)
        }
        # An empty bare value would read as no value, so empty text keeps its field's name.
        bare = [texts.pop(self.main)] if self.main and texts.get(self.main) else []
        items = ",".join(bare + [f"{name}={text}" for name, text in texts.items()])
        return f"{self.name}:{items}" if items else self.name


def _same_class(one: type, other: type) -> bool:
    """True if a class was defined again: a notebook cell run twice, a dataclass with slots, or a file that is
    both the script and an imported module."""
    if one.__qualname__ != other.__qualname__ or one.__module__ == other.__module__:
        return one.__qualname__ == other.__qualname__
    files = [getattr(sys.modules.get(cls.__module__), "__file__", None) for cls in (one, other)]
    return None not in files and len({os.path.realpath(str(file)) for file in files}) == 1


class Option(NamedTuple):
    """One field of a strategy or codec, as the grammar sees it."""

    name: str
    type: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is MISSING


@cache
def options(cls: type[Configured]) -> tuple[Option, ...]:
    """The fields that the grammar can set. The codec is not among them: it follows the plus."""
    if "__dataclass_fields__" not in cls.__dict__:
        raise TypeError(f"{cls.__qualname__} must be decorated with @dataclass(frozen=True)")
    hints = get_type_hints(cls)
    return tuple(
        Option(f.name, hints[f.name], f.default if f.default_factory is MISSING else f.default_factory())
        for f in fields(cls)
        if f.init and f.name != "codec"
    )


# Levels. Their names are those of the kind "strategy".

PLUS = r"(?<![\d.][eE])\+|\+(?!\d)"  # not the plus of 1e+3


def levels(text: str) -> list[str]:
    """Splits a text into its levels; slashes in values stay where they are."""
    sides = [""]
    for part in re.split("(/)", text):
        if part == "/":
            slash = len("/".join(sides))
            named = ":" not in re.split(PLUS, sides[-1])[-1]
            beside = text[max(slash - 1, 0) : slash + 2]
            if named or " " in beside or _called(text[slash + 1 :]):
                sides.append("")
                continue
        sides[-1] += part
    return sides


def _called(text: str) -> bool:
    """True if a level could begin here: the name of a strategy, then its fields, its codec or the end."""
    found = re.match(r"([a-z0-9_-]+)(?=$|[:+/ ])", text)
    known = _KINDS["strategy"].registry if "strategy" in _KINDS else {}
    return found is not None and found[1] in known


def _slash(rest: str) -> str:
    """Writes a slash of a value so that it does not separate levels; `rest` is the value after it."""
    return "%2f" if not rest or _called(rest) else "/"


def name_of(choice: str) -> str:
    """The name that a choice begins with."""
    return choice.partition(":")[0].strip(" ")


def find(kind: str, known: Mapping[str, type[Made]], choice: str, others: Iterable[str] = ()) -> type[Made]:
    """The class that a choice names; raises UnknownName, which lists the known names and these others."""
    name = name_of(choice)
    if name in known:
        return known[name]
    import difflib

    from polyrhythm.core.other_names import instead

    names = sorted({*known, *others})
    near = difflib.get_close_matches(name.lower(), names, n=1)
    wrong = f"unknown {kind} {name!r}" if name else f"no {kind} is named"
    hint = (kind == "strategy" and instead(name, names)) or (f"did you mean {near[0]!r}?" if near else "")
    hint = f"; {hint}" if hint else ""
    hint += "" if hint.endswith("?") else "."
    raise (UnknownName if name else UsageError)(f"{wrong}{hint} Known: {', '.join(names) or 'none'}")


def make(cls: type[Made], choice: str, **values: Any) -> Made:
    """An instance of `cls` with the fields that a choice sets, and these values."""
    types = {option.name: option.type for option in options(cls)}
    _, colon, rest = choice.partition(":")
    if colon and not rest.strip(" "):
        fields = f", or set a field: {_names(types)}" if types else ""
        raise UsageError(f"nothing after the colon; leave it out{fields}")
    for place, item in enumerate(rest.split(",") if rest else ()):
        name, equals, value = (part.strip(" ") for part in item.partition("="))
        if not name:
            raise UsageError(f"a field is missing at {item.strip(' ')!r}; {cls.name} has: {_names(types)}")
        if not equals and place > 0:
            raise UsageError(f"{name!r} after a comma is not field=value, and only the first may be bare")
        if not equals:
            if cls.main is None:
                fields = f"; set a field by name: {_names(types)}" if types else ", and has no fields"
                raise UsageError(f"takes no bare value{fields}")
            name, value = cls.main, name
        if name not in types:
            raise UsageError(f"no field {name!r}; {cls.name} has: {_names(types)}")
        if name in values:
            raise UsageError(f"{name} is given twice")
        try:
            values[name] = _read(types[name], value)
        except ValueError:
            raise UsageError(f"{name} takes {wanted(types[name])}, not {value!r}") from None
    if missing := [o.name for o in options(cls) if o.required and o.name not in values]:
        raise UsageError(f"{cls.name} needs {_names(missing)}")
    return cls(**values)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "no fields"


# Types and text. `_read` is the inverse of `write`; both know the same few types.

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "none"}
_BOOLEANS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a field allows. None comes first, because text would accept the word "none"."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(sorted(union, key=lambda member: member is not NoneType))


def wanted(hint: Any) -> str:
    """The values that a field takes, in words."""
    words = []
    for member in reversed(_members(hint)):
        literal = get_origin(member) is Literal
        if not literal and member not in _WORDS:
            raise TypeError(f"the grammar has no text for a field of type {member}")
        words += [write(hint, value) for value in get_args(member)] if literal else [_WORDS[member]]
    return " or ".join(words)


def _fits(hint: Any, value: Any) -> bool:
    """True if a text could have given this value to the field."""
    for member in _members(hint):
        if get_origin(member) is Literal:
            fits = any(type(each) is type(value) and each == value for each in get_args(member))
        elif isinstance(value, bool):
            fits = member is bool
        else:
            fits = isinstance(value, {int: Integral, float: Real}.get(member, member))
        if fits:
            return not (isinstance(value, float) and math.isnan(value))
    return False


def _read(hint: Any, text: str) -> Any:
    """The value that `text` gives to a field of this type; raises ValueError if it gives none."""
    for member in _members(hint):
        try:
            return _read_one(member, text)
        except (KeyError, ValueError):
            continue
    raise ValueError(text)


def _read_one(member: Any, text: str) -> Any:
    if get_origin(member) is Literal:
        return {write(member, value): value for value in get_args(member)}[text]
    if member is NoneType:
        return {"none": None}[text.lower()]
    if member is bool:
        return _BOOLEANS[text.lower()]
    if member is float and text.lower().lstrip("+-") == "nan":
        raise ValueError(text)  # NaN is not equal to itself, and no field has a use for it
    if member is str:
        return re.sub(r"%([0-9a-fA-F]{2})", lambda match: chr(int(match[1], 16)), text)
    return member(text)


def write(hint: Any, value: Any) -> str:
    """The text of a field's value, without the characters that the grammar uses."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = re.sub(r"[%,+=@ ]", lambda match: f"%{ord(match[0]):02x}", value)
        text = re.sub("/", lambda match: _slash(text[match.end() :]), text)
        taken = NoneType in _members(hint) and text.lower() == "none"
        return f"%{ord(text[0]):02x}{text[1:]}" if taken else text
    if isinstance(value, float):
        return repr(value).removesuffix(".0").replace("e+", "e")
    return str(value)
