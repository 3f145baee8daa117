"""The plan survives its way into config.json and back, and so does a strategy into a message and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

import polyrhythm as pr
from polyrhythm.core import extensions
from polyrhythm.core.errors import UnknownName, UsageError
from polyrhythm.core.plan import Plan
from polyrhythm.core.resolve import ResolvedStrategy, load, resolved
from tests.scripts.train import train
from tests.support.rows import OWN, ROWS, Row
from tests.support.runs import run_in
from tests.support.strategies import Stepping

NAMES = some.text("abc-: /", min_size=1)
PLANS = some.builds(
    Plan,
    strategy=some.none() | some.text(),
    workers=some.integers(1, 1000),
    servers=some.integers(0, 9),
    sites=some.dictionaries(NAMES, some.lists(some.integers(0, 9))),
    classes=some.dictionaries(NAMES, NAMES),
    imports=some.lists(NAMES).map(tuple),
    servers_at=some.none() | NAMES,
    seed=some.integers(0, (1 << 63) - 1),
    timeout=some.floats(0.1, 1e9),
    here=some.none() | some.integers(0, 9),
    arguments=some.lists(some.text()).map(tuple),
)


@given(PLANS)
def test_a_plan_is_read_back_from_json(plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(PLANS)
def test_a_plan_is_read_back_from_a_message(plan: Plan) -> None:
    assert Plan.from_json(msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_json()))) == plan


def test_fields_of_later_versions_are_ignored() -> None:
    plan = Plan("local:4", workers=3)
    assert Plan.from_json({**plan.to_json(), "of tomorrow": 1}) == plan
    short = {"strategy": "local:4", "workers": 3}  # of an earlier version
    assert Plan.from_json(short) == plan


def test_a_file_that_holds_no_plan_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"cannot read .*config.json: No such file.*; give the folder of a run"
    ):
        Plan.read(tmp_path)
    for wrong in ("{", '{"workers": "many"}', "[]"):
        (tmp_path / "config.json").write_text(wrong)
        with pytest.raises(UsageError, match="not the plan of a run") as caught:
            Plan.read(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("world", ["simulated", "real"])
def test_config_json_holds_the_whole_plan(world: str, tmp_path: Path) -> None:
    """It is read back whole, with what was left to the strategy and to the script."""
    summary = run_in(world, train, strategy="async", workers=2, seed=5, runs=tmp_path)
    expected = Plan(
        "async", workers=2, servers=1, batch_norm="rank0", seed=5, threads=1, program="train",
        world="run" if world == "real" else "simulate",
    )  # fmt: skip
    assert Plan.read(Path(summary["folder"])) == expected
    config = json.loads((Path(summary["folder"]) / "config.json").read_text())
    assert config.keys() == {"polyrhythm", *(field.name for field in fields(Plan))}


# --- a strategy on its way ------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_strategy_arrives_as_it_was_sent(row: Row) -> None:
    """Its fields, its codec and its traits; the class path of what is not built in, and of nothing else."""
    strategy = pr.parse(row.strategy)
    sent = json.loads(json.dumps(resolved(strategy).to_json()))
    arrived = ResolvedStrategy.from_json(sent)
    assert load(arrived.text, arrived.classes) == strategy
    assert (str(arrived), arrived.traits) == (str(strategy), strategy.traits)
    assert bool(arrived.classes) == (row in OWN)


def test_the_class_path_of_a_users_strategy_and_codec_travels() -> None:
    assert resolved(pr.parse("bmuf:4+turns:2")).classes == {
        "strategy bmuf": "own_strategy:BlockMomentum",
        "codec turns": "own_strategy:Turns",
    }


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies that a test defines are gone after it."""
    monkeypatch.setattr(pr.Strategy, "registry", dict(pr.Strategy.registry))
    monkeypatch.setattr(pr.Codec, "registry", dict(pr.Codec.registry))


MODULE = """
from dataclasses import dataclass
from tests.support.strategies import Stepping

@dataclass(frozen=True)
class Far(Stepping):
    name = "far"
    main = "period"
    period: int = 3
"""


@pytest.mark.usefixtures("own_registry")
def test_a_module_that_this_process_did_not_import_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far_away.py").write_text(MODULE)
    classes = {"strategy far": "far_away:Far"}
    with pytest.raises(UnknownName, match=r"unknown strategy 'far'.*name its module with --import"):
        load("far:5", classes)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load("far:5", classes)
    assert (str(found), resolved(found).classes) == ("far:5", classes)


@pytest.mark.usefixtures("own_registry")
def test_another_class_of_the_same_name_is_refused() -> None:
    """It would train by another rule under the same name."""
    with pytest.raises(
        UsageError, match=r"the strategy bmuf is own_strategy:BlockMomentum here and mine:Other"
    ):
        load("bmuf:4", {"strategy bmuf": "mine:Other"})
    with pytest.raises(UsageError, match="the strategy local is built in here and mine:Local where"):
        load("local:4", {"strategy local": "mine:Local"})


def test_a_script_and_a_module_may_hold_the_same_class() -> None:
    """What is the script on one host may be imported on another."""
    assert load("bmuf:4", {"strategy bmuf": "__main__:BlockMomentum"}) == pr.parse("bmuf:4")


def test_a_strategy_without_a_name_of_its_own_is_refused() -> None:
    """Other processes would take it for the class that it inherits the name from."""

    @dataclass(frozen=True)
    class Heir(type(pr.parse("local"))):
        pass

    with pytest.raises(UsageError, match="Heir has no name of its own, so other processes cannot find it"):
        pr.simulate(train, strategy=Heir(), runs=None)


@pytest.mark.usefixtures("own_registry")
def test_a_strategy_given_as_an_instance_need_not_be_parsed_by_name() -> None:
    @dataclass(frozen=True)
    class Given(Stepping):
        name = "given"
        period: int = 3

    for run in (pr.run, pr.simulate):
        summary = run(train, strategy=Given(4), workers=2, threads=1, runs=None)
        assert summary["strategy"] == "given:period=4"


# --- modules --------------------------------------------------------------------------------------------


def test_modules_that_cannot_be_imported_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the module is missing, or fails, or a module that it needs is missing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing_mine.py").write_text("raise RuntimeError('two\\nlines')")
    (tmp_path / "needy_mine.py").write_text("import missing_theirs")
    for name, message in {
        "missing_mine": "there is no module missing_mine to import; it must be beside the script",
        "json.missing_mine": "there is no module json.missing_mine",
        "failing_mine": "--import failing_mine failed: RuntimeError: two lines",
        "needy_mine": "--import needy_mine failed: ModuleNotFoundError: No module named 'missing_theirs'",
    }.items():
        with pytest.raises(UsageError, match=message):
            extensions.import_modules([name])
    with pytest.raises(UsageError, match="there is no module missing_mine"):
        extensions.check_modules(["json", "missing_mine.strategies"])
    with pytest.raises(UsageError, match=r"takes the name of a module, .*, not 'mine.py/x'"):
        extensions.check_modules(["mine.py/x"])
