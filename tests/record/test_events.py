"""Events: what is recorded can be read back, and recording is cheap, bounded and never raises."""

from __future__ import annotations

import gzip
import json
import math
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import polyrhythm as pr
from polyrhythm.cli.entry import main as command
from polyrhythm.core.event_counts import EventCounts
from polyrhythm.core.events import (
    VERSION,
    AnyEvent,
    Applied,
    Dropped,
    Event,
    Gap,
    Note,
    Record,
    StepDone,
    UpdatesLost,
    field_names,
    kind,
)  # fmt: skip
from polyrhythm.record import background, event_buffer, folder
from polyrhythm.record.event_buffer import EVERY, EventBuffer
from polyrhythm.record.event_file import EventFile, event_files
from polyrhythm.record.folder import RunFolder
from polyrhythm.record.reader import as_row, read_events, read_rows
from tests.scripts.train import EXAMPLES, train
from tests.support.combine import each_value

STEP = StepDone(1, 4, 0.001, 0.002)
KINDS = get_args(AnyEvent)


def example(cls: type[Event]) -> Event:
    """An event of this kind with some value in every field."""
    values = {"int": 7, "float": 0.5, "str": "a text", "dict": {"a": 1, "b": [1, 2]}}
    return cls(*(values[str(each).partition("[")[0].split(" |")[0]] for each in cls.__annotations__.values()
                 if "ClassVar" not in str(each)))  # fmt: skip


def written(path: Path, records: list[tuple[str, float, Event]], **more: Any) -> list[Record]:
    """What can be read after these events were recorded."""
    run = RunFolder(path, "it", **more)
    for record in records:
        run.event(*record)
    run.close()
    return list(read_events(run.path))


# --- the format -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [each for each in KINDS if kind(each) != "metrics"], ids=kind)
def test_every_kind_of_event_is_read_back_as_it_was(cls: type[Event], tmp_path: Path) -> None:
    event = example(cls)
    (record,) = written(tmp_path, [("worker 3", 0.1 + 0.2, event)])
    assert record == Record("worker 3", 0.1 + 0.2, event) and type(record.event) is cls
    row = as_row(record)
    assert (row["t"], row["node"], row["event"]) == (0.1 + 0.2, "worker 3", kind(cls))
    assert set(row) == {"t", "node", "event", *field_names()[kind(cls)]}


def test_kinds_are_all_different_and_all_events_are_in_the_union() -> None:
    assert len(field_names()) == len(KINDS) and set(KINDS) == set(Event.__subclasses__())


def test_the_log_is_json_lines_whose_header_names_the_fields(tmp_path: Path) -> None:
    """It can be read with zcat and a JSON parser."""
    written(tmp_path, [("worker 0", 1.5, STEP), ("server 0", 2.5, Applied(1, 0, 23, 9, 2, 100))])
    with gzip.open(tmp_path / "it" / "events.jsonl.gz", "rt") as file:
        header, *lines = map(json.loads, file)
    assert (header["version"], header["events"]) == (VERSION, "all")
    assert lines == [
        ["worker 0", 1.5, ["step", 1, 4, 0.001, 0.002]],
        ["server 0", 2.5, ["apply", 1, 0, 23, 9, 2, 100]],
    ]
    assert dict(zip(header["fields"]["apply"], lines[1][2][1:], strict=True))["staleness"] == 2


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "events.jsonl.gz", "wb") as file:
        file.write(b'{"format":"polyrhythm events","version":99,"events":"all","fields":{}}\n')
    with pytest.raises(pr.PolyrhythmError, match=f"version 99 of the event format, .* reads {VERSION}"):
        list(read_events(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello\n", "is not an event log"),
        (b"", "is not an event log"),
        (None, "there is no event log in"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "events.jsonl.gz").write_bytes(gzip.compress(content))
    with pytest.raises(pr.PolyrhythmError, match=message):
        list(read_events(tmp_path))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    written(tmp_path, [("worker 0", 1.5, STEP)])
    path = tmp_path / "it" / "events.jsonl.gz"
    path.write_bytes(path.read_bytes() + gzip.compress(b'["worker 0",1,["jump",3]]\n'))
    with pytest.raises(pr.PolyrhythmError, match=r"events.jsonl.gz, line 3 is not an event: .*jump"):
        list(read_events(tmp_path / "it"))


def test_all_that_was_flushed_can_be_read_while_the_run_goes_on_and_after_a_crash(tmp_path: Path) -> None:
    """The writer may be killed at any time: what it has flushed before is there."""
    file = EventFile(tmp_path)
    lines = [msgspec.json.encode(("worker 0", float(number), STEP)) + b"\n" for number in range(2000)]
    file.write(b"".join(lines[:1000]))
    assert [record.t for record in read_events(tmp_path)] == [float(number) for number in range(1000)]
    size = event_files(tmp_path)[0].stat().st_size
    file.write(b"".join(lines[1000:]))
    file.close()
    content = event_files(tmp_path)[0].read_bytes()
    for end in (size, size + 1, size + 100, len(content) - 9, len(content) - 1):
        event_files(tmp_path)[0].write_bytes(content[:end])
        times = [record.t for record in read_events(tmp_path)]
        assert times == [float(number) for number in range(len(times))] and len(times) >= 1000


# --- rotation and limits ----------------------------------------------------------------------------


def test_a_log_that_grows_is_split_and_only_its_last_parts_are_kept(tmp_path: Path) -> None:
    limited: list[str] = []
    file = EventFile(tmp_path, part=3000, parts=3, on_limit=lambda: limited.append("now"))
    for number in range(20_000):
        file.write(msgspec.json.encode(("worker 0", number * 1.000001, STEP)) + b"\n")
    file.close()
    files = event_files(tmp_path)
    numbers = [path.name.removeprefix("events.").removesuffix(".jsonl.gz") for path in files]
    assert len(files) == 3 and numbers == [str(int(numbers[0]) + more) for more in range(3)]
    assert all(path.stat().st_size < 3200 for path in files)
    times = [record.t for record in read_events(tmp_path)]
    assert times == [number * 1.000001 for number in range(20_000 - len(times), 20_000)]
    assert len(limited) == int(numbers[-1]) - 3


def test_the_user_is_told_once_that_old_events_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "EventFile", partial(EventFile, part=100, parts=2))
    said: list[str] = []
    run = RunFolder(tmp_path, "it", say=said.append)
    for number in range(10):
        run.lines(msgspec.json.encode(("worker 0", float(number), Note("x" * number * 50))) + b"\n")
    run.close()
    assert len(said) == 1 and "has reached its limit" in said[0] and "--events sample" in said[0]


def test_a_full_buffer_drops_events_and_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_buffer, "MAX_EVENTS", 5)
    buffer = EventBuffer()
    for number in range(8):
        buffer.add("worker 0", float(number), STEP)
    lines = [msgspec.json.decode(line, type=Record) for line in buffer.take().splitlines()]
    assert [record.t for record in lines[:5]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert lines[5:] == [Record("worker 0", 4.0, Gap(3))] and buffer.take() == b""


def test_a_disk_that_is_too_slow_drops_events_and_the_user_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MAX_WAITING", 1000)
    said: list[str] = []
    run = RunFolder(tmp_path, "it", say=said.append)
    gate = threading.Event()
    monkeypatch.setattr(run._events, "write", lambda lines: gate.wait(60))
    for _ in range(10):
        run.lines(b"x" * 400)
    gate.set()
    run.close()
    assert len(said) == 1 and said[0].startswith("some events are not recorded")


def test_an_event_that_cannot_be_encoded_leaves_a_gap_and_the_others_are_there(tmp_path: Path) -> None:
    bad = Note("bad", {"value": object()})
    events = written(tmp_path, [("worker 0", 1.0, STEP), ("worker 0", 2.0, bad), ("worker 0", 3.0, STEP)])
    assert [record.event for record in events] == [STEP, Gap(1), STEP]


def test_the_lines_of_a_report_have_a_limit() -> None:
    buffer = EventBuffer()
    for number in range(40):
        buffer.add("worker 0", float(number), Note("x" * 100))
    buffer.add("worker 0", 40.0, Note("x" * 1000))
    taken = []
    while lines := buffer.take(600):
        assert len(lines) <= 600
        taken += [msgspec.json.decode(line, type=Record) for line in lines.splitlines()]
    assert [record.t for record in taken] == [float(number) for number in range(41)]
    assert taken[-1].event == Gap(1)


# --- which events are recorded ----------------------------------------------------------------------


@each_value(
    ("start", [pytest.param(pr.run, id="run"), pytest.param(pr.simulate, id="simulate")]),
    ("events", ["all", "sample", "off"]),
)
def test_the_summary_does_not_depend_on_which_events_are_recorded(
    tmp_path: Path, start: Any, events: str
) -> None:
    """Staleness, totals and the rest are counted in any case."""
    summary = start(partial(train, epochs=6), workers=3, strategy="async", events=events, runs=tmp_path)
    assert (summary["steps"], summary["samples"]) == (6 * EXAMPLES // 4, 6 * EXAMPLES)
    assert summary["staleness"]["max"] >= 1 and summary["bytes_sent"] > 0
    assert json.loads(Path(summary["folder"], "config.json").read_text())["events"] == events
    if events == "off":
        assert event_files(Path(summary["folder"])) == []
        return
    counts = Counter((row["node"], row["event"]) for row in read_rows(summary["folder"]))
    steps = [counts[f"worker {rank}", "step"] for rank in range(3)]
    assert counts["server 0", "apply"] == math.ceil(summary["steps"] / (1 if events == "all" else EVERY))
    if events == "all":
        assert sum(steps) == summary["steps"]
    else:  # how many steps each worker took depends on its speed
        rounded_up = sum(steps) - summary["steps"] / EVERY
        assert 0 <= rounded_up < len(steps)
    assert counts["coordinator", "join"] == counts["coordinator", "leave"] == 4  # rare ones are all there


def test_sampling_takes_some_of_every_kind_and_node() -> None:
    """Nodes that take turns are not mixed up: each has its own count."""
    buffer = EventBuffer("sample")
    for number in range(3 * EVERY):
        for node in ("worker 0", "worker 1"):
            buffer.add(node, float(number), STEP)
            buffer.add(node, float(number), Applied(staleness=1))
        buffer.add("worker 0", float(number), Note("rare"))
    rows = []
    while lines := buffer.take():
        rows += [msgspec.json.decode(line, type=Record) for line in lines.splitlines()]
    counts = Counter((row.node, kind(row.event)) for row in rows)
    often = {(node, what): 3 for node in ("worker 0", "worker 1") for what in ("step", "apply")}
    assert counts == {**often, ("worker 0", "note"): 3 * EVERY}


def test_events_option_is_checked_before_anything_starts(tmp_path: Path) -> None:
    for start in (pr.run, pr.simulate):
        with pytest.raises(pr.UsageError, match="events is 'some'; it must be all, sample or off"):
            start(train, runs=tmp_path / "runs", events="some")  # type: ignore[arg-type]
    assert not (tmp_path / "runs").exists()


def test_counts_are_those_of_the_events() -> None:
    counts = EventCounts()
    for event in (Applied(staleness=2), Applied(staleness=2), Dropped(1, 0, 1, 1, 9, 4), STEP):
        counts.add(event)
    counts.add(UpdatesLost(4, 1, 0.25))
    assert counts.staleness == {2: 2} and counts.dropped == 1
    assert counts.updates_lost == UpdatesLost(4, 1, 0.25)


def test_simulated_runs_log_the_same_events_at_the_same_times(tmp_path: Path) -> None:
    folders = [pr.simulate(train, workers=2, strategy="async", runs=tmp_path)["folder"] for _ in range(2)]
    one, other = map(list, map(read_events, folders))
    assert one == other and len(one) > 100


# --- the command ------------------------------------------------------------------------------------


def test_events_command_prints_json_objects_of_the_kinds_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, [("worker 0", 1.5, STEP), ("server 0", 2.5, Applied(staleness=3))])
    assert command(["events", str(tmp_path / "it")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == list(read_rows(tmp_path / "it")) and lines[0]["compute_s"] == 0.001
    assert command(["events", str(tmp_path / "it"), "apply"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "t": 2.5, "node": "server 0", "event": "apply", "staleness": 3,
    }  # fmt: skip
    assert command(["events", str(tmp_path / "it"), "jump"]) == 2
    assert "there is no event 'jump'; the kinds are apply, " in capsys.readouterr().err
    assert command(["events", str(tmp_path)]) == 2
    assert "there is no event log in" in capsys.readouterr().err
