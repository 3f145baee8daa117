"""The grammar: what `str` writes, `parse` reads back, and what a person mistypes is answered in one line."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as some

from polyrhythm.core import grammar, registry
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError
from polyrhythm.core.plan import Plan
from polyrhythm.core.registry import describe, parse
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.strategies.two_level import TwoLevel
from tests.support.strategies import Stepping

if TYPE_CHECKING:
    from torch import Tensor


class Toy(Stepping):
    """Abstract, for it has no name."""


def toys() -> None:
    """Defines the strategies and the codec that these tests speak of."""

    @dataclass(frozen=True)
    class Plain(Toy):
        """No fields and no codec."""

        name = "plain"

    @dataclass(frozen=True)
    class Every(Toy):
        """One field of every type.

        And more to say.
        """

        name = "every"
        main = "period"
        paper = "A. Author 1999"
        codecs = True
        fixed = Traits(inside_sites=True, between_sites=True)

        period: int = 8
        rate: float = 0.5
        nesterov: bool = False
        label: str = ""
        rule: Literal["mean", "1/tau", "none"] = "mean"
        limit: int | None = None
        alias: str | None = None
        bound: Literal["auto"] | float = "auto"

        def __post_init__(self) -> None:
            if self.period < 1:
                raise UsageError("period must be 1 or more")

    @dataclass(frozen=True)
    class Needy(Toy):
        """Its main field is text and has no default."""

        name = "needy"
        main = "label"

        label: str

    @dataclass(frozen=True)
    class Half(Codec):
        """Every second number."""

        name = "half"
        main = "keep"
        keep: float = 0.5

        def encode(self, tensor: Tensor) -> Tensor:
            return tensor

        def decode(self, encoded: Tensor, count: int, dtype: Any) -> Tensor:
            return encoded


@pytest.fixture(autouse=True, scope="module")
def own_registry() -> Iterator[None]:
    """Only the toys are known here, and only here."""
    registry.load_builtins()  # before the swap: modules register once, when they are first imported
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strategy, "registry", {})
        patch.setattr(Codec, "registry", {})
        toys()
        yield


def make(name: str, **values: Any) -> Strategy:
    return Strategy.registry[name](**values)


def half(keep: float) -> Codec:
    return Codec.registry["half"](keep=keep)  # type: ignore[call-arg]


numbers = some.floats(allow_nan=False)
values = some.fixed_dictionaries(
    {},
    optional={
        "period": some.integers(min_value=1),
        "rate": numbers,
        "nesterov": some.booleans(),
        "label": some.text() | some.text("%,+=: none1e"),
        "rule": some.sampled_from(["mean", "1/tau", "none"]),
        "limit": some.none() | some.integers(),
        "alias": some.none() | some.text() | some.sampled_from(["none", "None", "", "%6eone"]),
        "bound": some.just("auto") | numbers,
        "codec": some.none() | numbers,
    },
)


@given(values)
def test_parse_inverts_str(values: dict[str, Any]) -> None:
    keep = values.pop("codec", None)
    chosen = make("every", **values, codec=None if keep is None else half(keep))
    text = str(chosen)
    assert parse(text) == chosen
    assert str(parse(text)) == text


@given(values, values)
def test_parse_inverts_str_of_two_levels(one: dict[str, Any], other: dict[str, Any]) -> None:
    sides = []
    for each in (one, other):
        keep = each.pop("codec", None)
        sides.append(make("every", **each, codec=None if keep is None else half(keep)))
    chosen = TwoLevel(*sides)
    assert parse(str(chosen)) == chosen
    assert parse(str(chosen)).parts == tuple(sides)
    assert str(parse(str(chosen))) == str(chosen)


SLASHES = some.text("/ :+,=%ab1") | some.from_regex(r"(/?(every|plain|needy|half|a)[/:+ ,]?){1,4}")


@given(some.text() | some.text("%,+=: none1e") | SLASHES)
def test_parse_inverts_str_of_required_text(label: str) -> None:
    chosen = make("needy", label=label)
    assert parse(str(chosen)) == chosen
    two = TwoLevel(make("every", label=label), make("every", label=label, codec=half(0.25)))
    assert parse(str(two)) == two


@given(some.text() | some.from_regex(r"(every|plain|needy|half)([:,+=/ ](\w*|period|rate|half|every)){0,6}"))
def test_any_text_parses_or_is_answered_in_one_line(text: str) -> None:
    try:
        chosen = parse(text)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert parse(str(chosen)) == chosen


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("plain", "plain"),
        (" plain ", "plain"),
        ("every", "every"),
        ("every:8", "every"),
        ("every:3", "every:3"),
        ("every:period=3", "every:3"),
        ("every:3,rate=1e-3", "every:3,rate=0.001"),
        ("every: 3, rate = 2.0", "every:3,rate=2"),
        ("every:rate=inf", "every:rate=inf"),
        ("every:rate=-inf,limit=4", "every:rate=-inf,limit=4"),
        ("every:rate=1e+30", "every:rate=1e30"),
        ("every:rate=1e+30+half", "every:rate=1e30+half"),
        ("every:label=1e+half", "every:label=1e+half"),
        ("every:nesterov=YES", "every:nesterov=true"),
        ("every:nesterov=off", "every"),
        ("every:label=host:80", "every:label=host:80"),
        ("every:label=a%2cb", "every:label=a%2cb"),
        ("every:label=none", "every:label=none"),
        ("every:alias=none", "every"),
        ("every:alias=%6eone", "every:alias=%6eone"),
        ("every:rule=1/tau,limit=3", "every:rule=1/tau,limit=3"),
        ("every:limit=3,rate=2", "every:rate=2,limit=3"),
        ("every:bound=2", "every:bound=2"),
        ("every+half", "every+half"),
        ("every:3+half:0.1", "every:3+half:0.1"),
        ("every + half:keep=0.5", "every+half"),
        ("needy:label=", "needy:label="),
        ("needy:a/b", "needy:a/b"),
        ("needy:a%2fplain", "needy:a%2fplain"),
        ("needy:plain/a", "needy:plain/a"),
        ("every:label=a/plain.b", "every:label=a/plain.b"),
        ("every:label=a/plain,rate=2", "every:rate=2,label=a%2fplain"),
        ("every/every", "every / every"),
        ("every:3/every:4", "every:3 / every:4"),
        ("every:3 /every:4", "every:3 / every:4"),
        ("every:3/ every:4", "every:3 / every:4"),
        ("every+half/every+half:0.1", "every+half / every+half:0.1"),
        ("every:rule=1/tau/every", "every:rule=1/tau / every"),
        ("every:label=a/b/every:label=c/d", "every:label=a/b / every:label=c/d"),
        ("every:rate=1e+30/every:2", "every:rate=1e30 / every:2"),
    ],
)
def test_strategy_text_has_a_canonical_form(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical
    assert str(parse(canonical)) == canonical


def test_values_have_the_types_of_their_fields() -> None:
    chosen: Any = parse("every:3,rate=2,nesterov=on,limit=none,bound=inf+half:1")
    assert (chosen.period, chosen.nesterov, chosen.limit, chosen.bound) == (3, True, None, math.inf)
    assert type(chosen.rate) is float
    assert chosen.codec == half(1.0)


EVERY = "period, rate, nesterov, label, rule, limit, alias, bound"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no strategy is named. Known: every, needy, plain"),
        (":3", "no strategy is named. Known: every, needy, plain"),
        ("plane", "unknown strategy 'plane'; did you mean 'plain'? Known: every, needy, plain"),
        ("Plain", "unknown strategy 'Plain'; did you mean 'plain'? Known: every, needy, plain"),
        ("zzz", "unknown strategy 'zzz'. Known: every, needy, plain"),
        ("plain:3", "plain:3: takes no bare value, and has no fields"),
        ("plain:x=3", "plain:x=3: no field 'x'; plain has: no fields"),
        ("plain:", "plain:: nothing after the colon; leave it out"),
        ("every:x", "every:x: period takes a whole number, not 'x'"),
        ("every:1.5", "every:1.5: period takes a whole number, not '1.5'"),
        ("every:0", "every:0: period must be 1 or more"),
        ("every:8,perod=3", f"every:8,perod=3: no field 'perod'; every has: {EVERY}"),
        ("every:8,,rate=1", f"every:8,,rate=1: a field is missing at ''; every has: {EVERY}"),
        ("every:=8", f"every:=8: a field is missing at '=8'; every has: {EVERY}"),
        ("every:8,9", "every:8,9: '9' after a comma is not field=value, and only the first may be bare"),
        ("every:8,period=9", "every:8,period=9: period is given twice"),
        ("every:rate=1,rate=1", "every:rate=1,rate=1: rate is given twice"),
        ("every:rate=fast", "every:rate=fast: rate takes a number, not 'fast'"),
        ("every:rate=nan", "every:rate=nan: rate takes a number, not 'nan'"),
        ("every:nesterov=2", "every:nesterov=2: nesterov takes true or false, not '2'"),
        ("every:rule=sum", "every:rule=sum: rule takes mean or 1/tau or none, not 'sum'"),
        ("every:limit=x", "every:limit=x: limit takes a whole number or none, not 'x'"),
        ("every:codec=half", f"every:codec=half: no field 'codec'; every has: {EVERY}"),
        ("every+", "every+: no codec is named. Known: half"),
        ("every+hal", "every+hal: unknown codec 'hal'; did you mean 'half'? Known: half"),
        ("every+half:x", "every+half:x: keep takes a number, not 'x'"),
        ("every+half+half", "every+half+half: takes one codec at most"),
        ("every:0+half", "every:0+half: period must be 1 or more"),
        ("plain+half", "plain+half: plain takes no codec"),
        ("needy", "needy: needy needs label"),
        ("every/", "every/: no strategy is named. Known: every, needy, plain"),
        ("/every", "/every: no strategy is named. Known: every, needy, plain"),
        (
            "every/evry",
            "every/evry: unknown strategy 'evry'; did you mean 'every'? Known: every, needy, plain",
        ),
        (
            "every:3 / evry:4",
            "every:3 / evry:4: unknown strategy 'evry'; did you mean 'every'? Known: every, needy, plain",
        ),
        ("every / every:0", "every / every:0: every:0: period must be 1 or more"),
        (
            "every / every / every",
            "every / every / every: takes two levels at most, one inside sites and one between them",
        ),
        ("plain / every", "plain / every: inside a site use every, not plain"),
        ("every/plain", "every/plain: between sites use every, not plain"),
    ],
)
def test_invalid_strategy_text_raises_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_a_strategy_without_codecs_refuses_one_given_in_python() -> None:
    with pytest.raises(UsageError, match="plain takes no codec"):
        make("plain", codec=half(0.1))


def test_two_classes_cannot_share_a_name() -> None:
    with pytest.raises(TypeError, match=r"Other: strategy 'plain' is already toys.*Plain"):

        class Other(Toy):
            name = "plain"


def test_a_strategy_and_a_codec_can_share_a_name() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Codec, "registry", {})

        class Same(Codec):
            name = "plain"

        assert Codec.registry == {"plain": Same}


def test_a_class_defined_again_replaces_itself() -> None:
    before = Strategy.registry["plain"]
    toys()
    assert Strategy.registry["plain"] is not before


def test_a_name_must_fit_the_grammar() -> None:
    with pytest.raises(TypeError, match="cannot be a name"):

        class Other(Toy):
            name = "a+b"


def test_a_class_without_its_own_name_is_not_known() -> None:
    heir = type("Heir", (Strategy.registry["plain"],), {})
    assert heir not in Strategy.registry.values()
    assert Toy not in Strategy.registry.values()


def test_a_strategy_without_the_dataclass_decorator_raises_an_error() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strategy, "registry", {})

        class Bare(Toy):
            name = "bare"
            period: int = 3

        with pytest.raises(TypeError, match="Bare must be decorated"):
            parse("bare:4")


def test_a_field_type_without_text_form_raises_an_error() -> None:
    with pytest.raises(TypeError, match="no text for a field of type"):
        grammar.wanted(dict[str, int])


def test_describe_lists_names_fields_summaries_and_papers() -> None:
    assert describe() == []  # none of them is built in
    rows = {row.name: row for row in describe(own=True)}
    assert list(rows) == ["every", "needy", "plain"]
    assert rows["plain"] == ("plain", (), "No fields and no codec.", "", __name__)
    assert rows["needy"].fields == (("label", "text", "required"),)
    assert rows["every"].summary == "One field of every type."
    assert rows["every"].paper == "A. Author 1999"
    assert rows["every"].fields[0] == ("period", "a whole number", "8")
    assert rows["every"].fields[5:] == (
        ("limit", "a whole number or none", "none"),
        ("alias", "text or none", "none"),
        ("bound", "a number or auto", "auto"),
    )
    assert [row.name for row in describe("codec", own=True)] == ["half"]


class Recorder:
    """Stands for a node, a replica and a group."""

    parameters = ("a", "b")

    def broadcast(self, *tensors: object) -> None:
        self.sent = tensors


def test_strategy_base_class_broadcasts_at_start_and_has_no_servers() -> None:
    node: Any = Recorder()
    chosen = make("plain")
    chosen.check(Plan("plain", workers=1))
    worker = chosen.worker(node, node, node)
    worker.start()
    assert node.sent == ("a", "b")
    assert tuple(worker.consensus()) == node.parameters
    assert chosen.traits.lockstep and not chosen.traits.survives
    assert not chosen.traits.uses_servers
    with pytest.raises(UsageError, match="plain has no servers"):
        chosen.server(node, node)


BUILTINS = """
from polyrhythm.core.codec import Codec
from polyrhythm.core.registry import describe, parse
from polyrhythm.core.plan import Plan
from polyrhythm.core.strategy import Strategy, Traits
for kind in ("strategy", "codec"):
    for row in describe(kind):
        cls = (Strategy if kind == "strategy" else Codec).registry[row.name]
        assert row.summary and row.paper, f"{row.name} needs a docstring and a paper"
        assert cls.main in (None, *(name for name, _, _ in row.fields)), f"{row.name} has no field {cls.main}"
        assert kind == "codec" or str(parse(row.name)).partition(":")[0] == row.name
print(*Strategy.registry)
"""


def test_every_builtin_is_found_and_says_what_it_is() -> None:
    known = subprocess.check_output([sys.executable, "-c", BUILTINS], text=True)
    assert {"allreduce", "sync", "async", "local"} <= set(known.split())


def test_the_grammar_does_not_need_torch() -> None:
    code = "import sys, polyrhythm.core.registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
