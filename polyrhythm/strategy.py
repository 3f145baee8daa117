"""Strategy and Codec, and the one grammar that names them: `local:8`, `async:weight=1/tau+topk:0.01`.

    text      =  level [ "/" level ]                   one strategy, or one inside sites / one between them
    level     =  choice [ "+" choice ]                 a strategy, and the codec it sends through
    choice    =  name [ ":" item { "," item } ]
    item      =  value | field "=" value               a bare value comes first and sets the `main` field

A strategy is a frozen dataclass, and its fields are its whole configuration: their names, types and
defaults are the grammar, the help text and the errors. Defining a class with a `name` registers it, so
a new strategy is one new file in `polyrhythm/strategies` and nothing else.

`str` is the inverse of `parse`: it writes only what differs from the defaults. In text values
`%2c` stands for a comma, and so on, for the few characters that the grammar itself uses.

Values may have slashes too, as in `weight=1/tau` and `dense=1d/head`. A slash is between two levels if a
space is beside it, if it stands in a name, or if a level could follow: the name of a strategy, and then a
colon, a plus or the end. So `allreduce+int8:dense=1d/head` is one level, `allreduce+int8:dense=1d/diloco:50`
are two, and a layer that is called like a strategy is written `dense=1d%2flocal`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
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

from polyrhythm.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.memory import Memory
    from polyrhythm.node import Node
    from polyrhythm.replica import Replica
    from polyrhythm.shard import Shard

Made = TypeVar("Made", bound="Configured")


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
        if "name" not in cls.__dict__:
            return
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", cls.name):
            raise TypeError(f"{cls.__qualname__}: {cls.name!r} cannot be a name: use a-z, 0-9, _ and -")
        known = cls.registry.get(cls.name)
        # The same class defined again is not a clash: a notebook cell run twice, a dataclass with slots.
        if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.__qualname__}: {cls.kind} {cls.name!r} is already {known.__qualname__}")
        cls.registry[cls.name] = cls

    @classmethod
    def choices(cls) -> list[str]:
        """The names of the fields that can be set."""
        return [option.name for option in _options(cls)]

    def __str__(self) -> str:
        texts = {
            o.name: _write(o.type, getattr(self, o.name))
            for o in _options(type(self))
            if o.required or getattr(self, o.name) != o.default
        }
        # An empty bare value would read as nothing at all, so empty text keeps its field's name.
        bare = [texts.pop(self.main)] if self.main and texts.get(self.main) else []
        items = ",".join(bare + [f"{name}={text}" for name, text in texts.items()])
        return f"{self.name}:{items}" if items else self.name


@dataclass(frozen=True)
class Codec(Configured):
    """How numbers travel: fewer bytes out, nearly the same numbers back.

    It sees one flat stretch of 32 or 64-bit floats at a time, and with it the memory of whoever sends. Every
    codec has these fields:

    - `feedback`: is what was not sent kept, and sent later? Yes, as a rule, where a codec is biased
    - `per`: is a code about a whole vector, or about one layer?
    - `dense`: what travels as it is: tensors of one dimension (1d) and layers by name, as in `1d/head`
    - `pull`: does a server answer in this code too, or in full?
    """

    kind = "codec"
    registry: ClassVar[dict[str, type[Codec]]] = {}
    summable: ClassVar[bool] = False  # codes are floats, and their mean is the code of the mean
    hops: ClassVar[bool] = False  # it bears to be decoded, added to and coded again, hop by hop
    stateless: ClassVar[bool] = False  # each number is coded by itself, and nothing is remembered
    shared: ClassVar[bool] = False  # the mean is taken by all workers together, in `mean`

    feedback: bool = field(default=False, kw_only=True)
    per: Literal["vector", "layer"] = field(default="vector", kw_only=True)
    dense: str = field(default="", kw_only=True)
    pull: Literal["coded", "dense"] = field(default="coded", kw_only=True)

    @abstractmethod
    def encode(self, values: Tensor, memory: Memory) -> Tensor:
        """The flat tensor to send in place of these values, which may not be changed."""

    @abstractmethod
    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Adds what a code stands for, times `scale`. The code may be anybody's: WireError if it is none."""

    def send(self, values: Tensor, memory: Memory) -> Tensor:
        """The code of the values and of what was not sent before: with `feedback` the rest is kept."""
        if memory.residual is None:
            return self.encode(values, memory)
        memory.residual.add_(values)
        code = self.encode(memory.residual, memory)
        self.decode(code, memory.residual, -1.0)  # what the others get, not what was meant
        return code

    @property
    def needs_norm(self) -> bool:
        """Whether it has to know how long all is that is sent at once: `memory.norm`."""
        return False

    @property
    def gradients_only(self) -> bool:
        """Whether what it makes of a vector means nothing unless that is a gradient."""
        return False

    def agree(self, mean: Tensor) -> None:
        """Makes of the mean of what all have sent, in place, what all go on with."""

    def mean(self, node: Node, stretches: Sequence[tuple[Tensor, Memory]]) -> None:
        """Replaces each stretch by its mean over all workers; for those that are `shared`."""
        raise NotImplementedError

    def reply(self) -> Codec:
        """The codec for a server's answers: changes of parameters, of which what was not sent is known."""
        return self

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises UsageError if it cannot work with the optimizer's parameter groups."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Whatever takes long, before the first step: compiling, for numbers of this kind."""


@dataclass(frozen=True)
class Strategy(Configured):
    """How the workers keep time: when they exchange what, and who waits for whom."""

    kind = "strategy"
    registry: ClassVar[dict[str, type[Strategy]]] = {}
    servers: ClassVar[bool] = False
    codecs: ClassVar[bool] = False
    optimizers: ClassVar[str] = "any"  # or the name of the class in torch.optim that it needs
    sends: ClassVar[Literal["gradients", "ways"]] = "gradients"  # or how far a worker has come since
    remembers: ClassVar[tuple[str, ...]] = ()  # the replica's buffers that are saved, besides a codec's
    stays: ClassVar[bool] = False  # the workers hold the parameters among themselves: none leaves before all
    sparse: ClassVar[bool] = False  # sparse gradients stay as they are, and are not in the flat gradient
    lease: ClassVar[int] = 8  # batches that a worker takes at a time, at most, where each has its own pace
    one_host: ClassVar[bool] = False  # it works on memory that all workers share
    inside: ClassVar[bool] = False  # it can keep the workers of one site equal, step by step,
    between: ClassVar[bool] = False  # and it can have whole sites for its workers

    codec: Codec | None = field(default=None, kw_only=True)

    def __new__(cls, *_: Any, codec: Codec | None = None, **__: Any) -> Self:
        # Not in __post_init__: subclasses check their ranges there, and would silently replace this.
        if codec is not None and not cls.codecs:
            raise UsageError(f"{cls.name} takes no codec")
        if codec is not None and codec.gradients_only and cls.sends != "gradients":
            raise UsageError(f"{codec} is for gradients, and {cls.name} sends how far each worker has come")
        return super().__new__(cls)

    def __str__(self) -> str:
        return super().__str__() + (f"+{self.codec}" if self.codec else "")

    @property
    def lockstep(self) -> bool:
        """Whether all workers take the same number of steps, together."""
        return True

    @property
    def survives(self) -> bool:
        """Whether the others can go on when a worker dies."""
        return not self.lockstep

    @property
    def overlaps(self) -> bool:
        """Whether it wants the gradient in parts while `backward()` goes on."""
        return False

    @property
    def watches_forward(self) -> bool:
        """Whether it wants to know when the script is about to read the parameters for a step."""
        return False

    @property
    def weighs(self) -> bool:
        """Whether it weighs workers by their examples: then gradients count by them among `peers` only."""
        return False

    @property
    def levels(self) -> tuple[Strategy, ...]:
        """The strategies that it is made of: itself, or one inside sites and one between them."""
        return (self,)

    def prepare(self, dtype: torch.dtype) -> None:
        """Whatever takes long, before the first step: compiling, for numbers of this kind. It is done once on
        each host, before the workers are started, if it is known by then which strategy it will be."""
        for level in self.levels:
            if level.codec is not None:
                level.codec.prepare(dtype)

    def check(self, workers: int, servers: int) -> None:
        """Raises UsageError, before any process starts, if it cannot work with so many nodes."""

    def check_sites(self, sites: Mapping[str, Sequence[int]]) -> None:
        """Raises UsageError, before any process starts, if it cannot work with these sites: who is where."""

    def peers(self, node: Node) -> Node:
        """With whom a worker has its gradient in common: all, as a rule."""
        return node

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises UsageError if it cannot work with the optimizer's parameter groups."""

    def start(self, node: Node, replica: Replica) -> None:
        """Runs on every worker before its first step: all start equal to worker 0."""
        node.broadcast(*replica.parameters)

    def before_forward(self, node: Node, replica: Replica) -> None:
        """A forward pass that gradients may be wanted of is about to begin; for those that watch it."""

    def part(self, node: Node, replica: Replica, gradient: Sequence[Tensor], last: bool) -> None:
        """A part of the gradient is complete, and backward goes on: it must not wait.

        For those with `overlaps`: called before `ready`, for the same parts in the same order on all workers.
        """

    def ready(self, node: Node, replica: Replica) -> None:
        """Backward has completed a gradient; for those that agree on it before the user's own clipping."""

    @abstractmethod
    def step(self, node: Node, replica: Replica) -> None:
        """Runs on every worker in place of `optimizer.step()`."""

    def regroup(self, node: Node, replica: Replica, ranks: Sequence[int], number: int) -> None:
        """Other workers than before share the epoch that begins: this is their `number`-th group.

        For those in lockstep that survive; called by all in the group before the first step of the epoch.
        """

    def finish(self, node: Node, replica: Replica) -> None:
        """Runs on every worker after its last step."""

    def serve(self, node: Node, shard: Shard) -> None:
        """A server's whole life: returns when the run is over."""
        raise UsageError(f"{self.name} has no servers")

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """The parameters the run has agreed on so far, as flat vectors; called by all workers."""
        return replica.parameters

    def restore(self, node: Node, replica: Replica) -> None:
        """Brings the optimizer's state to this worker, where it is kept elsewhere; before `state_dict()`."""

    def keep(self, node: Node, replica: Replica) -> dict[str, Any]:
        """What else is saved of a worker, besides `remembers`: plain values and tensors of its own."""
        return {}

    def resume(self, node: Node, replica: Replica, kept: dict[str, Any]) -> None:
        """Goes on with what was saved: `remembers` is in its place, and this is what `keep` gave."""

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """The final parameters, as flat vectors; called by the last worker, after all have finished."""
        return replica.parameters


def parse(text: str) -> Strategy:
    """The strategy that `text` names; UsageError says what is wrong with it and what would work."""
    text = text.strip(" ")
    _load_builtins()
    if len(sides := _sides(text)) > 1:
        return _two_levels(text, sides)
    choice, *codecs = re.split(_PLUS, text)
    cls = _find("strategy", Strategy.registry, choice)
    try:
        if len(codecs) > 1:
            raise UsageError("takes one codec at most")
        made = [_make(_find("codec", Codec.registry, codec), codec) for codec in codecs]
        return _make(cls, choice, **({"codec": made[0]} if made else {}))
    except UsageError as error:
        asked = text if text.isprintable() else repr(text)
        raise UsageError(f"{asked}: {error}") from None


_PLUS = r"(?<![\d.][eE])\+|\+(?!\d)"  # that of 1e+3 belongs to the number


def _sides(text: str) -> list[str]:
    """What is inside and what is between, if there are two levels; the slashes of values stay in them."""
    sides = [""]
    for part in re.split("(/)", text):
        if part == "/":
            slash = len("/".join(sides))
            named = ":" not in re.split(_PLUS, sides[-1])[-1]
            beside = text[max(slash - 1, 0) : slash + 2]
            if named or " " in beside or _called(text[slash + 1 :]):
                sides.append("")
                continue
        sides[-1] += part
    return sides


def _called(text: str) -> bool:
    """Whether a level could begin here: the name of a strategy, and then its fields, its codec or the end."""
    found = re.match(r"([a-z0-9_-]+)(?=$|[:+/ ])", text)
    return found is not None and found[1] in Strategy.registry


def _slash(rest: str) -> str:
    """A slash in a value, before the rest of it: written so that it is not taken for one between levels."""
    return "%2f" if not rest or _called(rest) else "/"


def _two_levels(text: str, sides: Sequence[str]) -> Strategy:
    from polyrhythm.strategies.sites import TwoLevel

    try:
        if len(sides) > 2:
            raise UsageError("takes two levels at most, one inside sites and one between them")
        within, across = map(parse, sides)
        return TwoLevel(within, across)
    except UsageError as error:
        raise UsageError(f"{text if text.isprintable() else repr(text)}: {error}") from None


def parse_codec(text: str) -> Codec:
    """The codec that `text` names, such as "topk:0.01"; UsageError says what is wrong with it."""
    _load_builtins()
    try:
        return _make(_find("codec", Codec.registry, text.strip(" ")), text.strip(" "))
    except UsageError as error:
        raise UsageError(f"{text if text.isprintable() else repr(text)}: {error}") from None


class Option(NamedTuple):
    """One field of a strategy or codec, as the grammar sees it."""

    name: str
    type: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is MISSING


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
            (o.name, _wanted(o.type), "required" if o.required else _write(o.type, o.default))
            for o in _options(cls)
            if o.name in cls.choices()
        )
        rows.append(Row(name, options, (cls.__doc__ or "").strip().partition("\n")[0], cls.paper))
    return rows


@cache
def _load_builtins() -> None:
    """Imports every module of the two packages, which registers what they define."""
    import importlib
    import pkgutil

    for package in ("polyrhythm.strategies", "polyrhythm.codecs"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)


@cache
def _options(cls: type[Configured]) -> tuple[Option, ...]:
    """The fields the grammar can set. A codec has its own place in the grammar, after the plus."""
    if "__dataclass_fields__" not in cls.__dict__:
        raise TypeError(f"{cls.__qualname__} must be decorated with @dataclass(frozen=True)")
    hints = get_type_hints(cls)
    return tuple(
        Option(f.name, hints[f.name], f.default if f.default_factory is MISSING else f.default_factory())
        for f in fields(cls)
        if f.init and f.name != "codec"
    )


def _find(kind: str, known: Mapping[str, type[Made]], choice: str) -> type[Made]:
    """The class that a choice names."""
    name = choice.partition(":")[0].strip(" ")
    if name in known:
        return known[name]
    import difflib

    near = difflib.get_close_matches(name.lower(), known, n=1)
    wrong = f"unknown {kind} {name!r}" if name else f"no {kind} is named"
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise UsageError(f"{wrong}{hint} Known: {', '.join(sorted(known)) or 'none'}")


def _make(cls: type[Made], choice: str, **values: Any) -> Made:
    """An instance of `cls` with the fields that a choice sets."""
    types = {option.name: option.type for option in _options(cls)}
    _, colon, rest = choice.partition(":")
    if colon and not rest.strip(" "):
        raise UsageError("nothing after the colon")
    for place, item in enumerate(rest.split(",") if rest else ()):
        name, equals, value = (part.strip(" ") for part in item.partition("="))
        if not name:
            raise UsageError(f"a field is missing at {item.strip(' ')!r}; {cls.name} has: {_names(types)}")
        if not equals and place > 0:
            raise UsageError(f"{name!r} is not field=value, and only the first may be bare")
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
            raise UsageError(f"{name} takes {_wanted(types[name])}, not {value!r}") from None
    if missing := [o.name for o in _options(cls) if o.required and o.name not in values]:
        raise UsageError(f"{cls.name} needs {_names(missing)}")
    return cls(**values)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "no fields"


# Types and text. What `_write` writes, `_read` reads back; both know the same few types.

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "none"}
_BOOLEANS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a field allows. None comes first, for text would take the word."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(sorted(union, key=lambda member: member is not NoneType))


def _wanted(hint: Any) -> str:
    """What to tell a person that a field takes."""
    words = []
    for member in reversed(_members(hint)):
        literal = get_origin(member) is Literal
        if not literal and member not in _WORDS:
            raise TypeError(f"the grammar has no text for a field of type {member}")
        words += [_write(hint, value) for value in get_args(member)] if literal else [_WORDS[member]]
    return " or ".join(words)


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
        return {_write(member, value): value for value in get_args(member)}[text]
    if member is NoneType:
        return {"none": None}[text.lower()]
    if member is bool:
        return _BOOLEANS[text.lower()]
    if member is float and text.lower().lstrip("+-") == "nan":
        raise ValueError(text)  # unequal to itself, and no field means anything by it
    if member is str:
        return re.sub(r"%([0-9a-fA-F]{2})", lambda match: chr(int(match[1], 16)), text)
    return member(text)


def _write(hint: Any, value: Any) -> str:
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
