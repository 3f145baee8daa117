"""The one grammar that names strategies and codecs: `local:8`, `async:weight=1/tau+topk:0.01`.

    text      =  level [ "/" level ]                   one strategy, or one inside sites / one between them
    level     =  choice [ "+" choice ]                 a strategy, and the codec it sends through
    choice    =  name [ ":" item { "," item } ]
    item      =  value | field "=" value               a bare value comes first and sets the `main` field

Whatever it names is a frozen dataclass, and its fields are its whole configuration: their names, types and
defaults are the grammar, the help text and the errors. Defining a class with a `name` registers it.

`str` is the inverse of `parse`: it writes only what differs from the defaults. In text values
`%2c` stands for a comma, and so on, for the few characters that the grammar itself uses.

Values may have slashes too, as in `weight=1/tau` and `dense=1d/head`. A slash is between two levels if a
space is beside it, if it stands in a name, or if a level could follow: the name of a strategy, and then a
colon, a plus or the end. So `allreduce+int8:dense=1d/head` is one level, `allreduce+int8:dense=1d/diloco:50`
are two, and a layer that is called like a strategy is written `dense=1d%2flocal`.
"""

from __future__ import annotations

import math
import re
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

from polyrhythm.core.errors import UsageError

Made = TypeVar("Made", bound="Configured")

_KINDS: dict[str, type[Configured]] = {}  # the base class of each


@dataclass(frozen=True)
class Configured(ABC):
    """Something the grammar can name. Subclasses are frozen dataclasses; one without a `name` is abstract."""

    kind: ClassVar[str]
    registry: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    main: ClassVar[str | None] = None
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
        # The same class defined again is not a clash: a notebook cell run twice, a dataclass with slots.
        if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.__qualname__}: {cls.kind} {cls.name!r} is already {known.__qualname__}")
        cls.registry[cls.name] = cls

    def __new__(cls, *values: Any, **named: Any) -> Self:
        # Not in __post_init__: subclasses check their ranges there, and would silently replace this.
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
            if o.required or getattr(self, o.name) != o.default
        }
        # An empty bare value would read as nothing at all, so empty text keeps its field's name.
        bare = [texts.pop(self.main)] if self.main and texts.get(self.main) else []
        items = ",".join(bare + [f"{name}={text}" for name, text in texts.items()])
        return f"{self.name}:{items}" if items else self.name


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
    """The fields the grammar can set. A codec has its own place in the grammar, after the plus."""
    if "__dataclass_fields__" not in cls.__dict__:
        raise TypeError(f"{cls.__qualname__} must be decorated with @dataclass(frozen=True)")
    hints = get_type_hints(cls)
    return tuple(
        Option(f.name, hints[f.name], f.default if f.default_factory is MISSING else f.default_factory())
        for f in fields(cls)
        if f.init and f.name != "codec"
    )


# Levels. Their names are those of the kind "strategy".

PLUS = r"(?<![\d.][eE])\+|\+(?!\d)"  # that of 1e+3 belongs to the number


def levels(text: str) -> list[str]:
    """What is inside and what is between, if there are two levels; the slashes of values stay in them."""
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
    """Whether a level could begin here: the name of a strategy, and then its fields, its codec or the end."""
    found = re.match(r"([a-z0-9_-]+)(?=$|[:+/ ])", text)
    return found is not None and found[1] in _KINDS["strategy"].registry


def _slash(rest: str) -> str:
    """A slash in a value, before the rest of it: written so that it is not taken for one between levels."""
    return "%2f" if not rest or _called(rest) else "/"


def find(kind: str, known: Mapping[str, type[Made]], choice: str) -> type[Made]:
    """The class that a choice names."""
    name = choice.partition(":")[0].strip(" ")
    if name in known:
        return known[name]
    import difflib

    near = difflib.get_close_matches(name.lower(), known, n=1)
    wrong = f"unknown {kind} {name!r}" if name else f"no {kind} is named"
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise UsageError(f"{wrong}{hint} Known: {', '.join(sorted(known)) or 'none'}")


def make(cls: type[Made], choice: str, **values: Any) -> Made:
    """An instance of `cls` with the fields that a choice sets."""
    types = {option.name: option.type for option in options(cls)}
    _, colon, rest = choice.partition(":")
    if colon and not rest.strip(" "):
        raise UsageError("nothing after the colon")
    for place, item in enumerate(rest.split(",") if rest else ()):
        name, equals, value = (part.strip(" ") for part in item.partition("="))
        if not name:
            raise UsageError(f"a field is missing at {item.strip(' ')!r}; {cls.name} has: {_names(types)}")
        if not equals and place > 0:
            raise UsageError(f"{name!r} after a comma is not field=value, and only the first may be bare")
        if not equals:
            if cls.main is None:
                raise UsageError("takes no bare value")
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


# Types and text. What `write` writes, `_read` reads back; both know the same few types.

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "none"}
_BOOLEANS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a field allows. None comes first, for text would take the word."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(sorted(union, key=lambda member: member is not NoneType))


def wanted(hint: Any) -> str:
    """What to tell a person that a field takes."""
    words = []
    for member in reversed(_members(hint)):
        literal = get_origin(member) is Literal
        if not literal and member not in _WORDS:
            raise TypeError(f"the grammar has no text for a field of type {member}")
        words += [write(hint, value) for value in get_args(member)] if literal else [_WORDS[member]]
    return " or ".join(words)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value that Python code gives is one that a text could have spelt."""
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
    """The value that `text` spells for a field of this type; ValueError if it spells none."""
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
        raise ValueError(text)  # unequal to itself, and no field means anything by it
    if member is str:
        return re.sub(r"%([0-9a-fA-F]{2})", lambda match: chr(int(match[1], 16)), text)
    return member(text)


def write(hint: Any, value: Any) -> str:
    """The text of a field's value: free of the characters that the grammar uses."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = re.sub(r"[%,+= ]", lambda match: f"%{ord(match[0]):02x}", value)
        text = re.sub("/", lambda match: _slash(text[match.end() :]), text)
        taken = NoneType in _members(hint) and text.lower() == "none"
        return f"%{ord(text[0]):02x}{text[1:]}" if taken else text
    if isinstance(value, float):
        return repr(value).removesuffix(".0").replace("e+", "e")
    return str(value)
