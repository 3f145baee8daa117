"""What must be true of every asynchronous run's event log, also if workers died and were replaced."""

from __future__ import annotations

from typing import Any

from polyrhythm.core.peer import INCARNATION_SHIFT
from tests.support.programs import events


def check_laws(summary: dict[str, Any], at_once: bool = True) -> None:
    """The laws of each server of a run whose groups are single pushes.

    `at_once`: every push is answered when it is applied, so that the log tells what its worker computes on.
    """
    lines = events(summary, "apply", "pull", "deliver", "drop", "late")
    for server in range(summary["servers"]):
        mine = [line for line in lines if line["node"] == f"server {server}"]
        applied = [line for line in mine if line["event"] == "apply"]
        assert [line["version"] for line in applied] == list(range(1, len(applied) + 1))
        keys = [(line["worker"], line["sequence"]) for line in applied]
        assert len(set(keys)) == len(keys)
        dropped = {(line["worker"], line["sequence"]) for line in mine if line["event"] == "drop"}
        pushes = [line for line in mine if line.get("kind") == "push" and line["event"] == "deliver"]
        assert {(int(line["sender"].split()[1]), line["sequence"]) for line in pushes} == {*keys, *dropped}
        # A late message is of a life that was over: nothing of it comes after.
        for at, line in enumerate(mine):
            if line["event"] == "late":
                later = [each for each in mine[at:] if each.get("sender") == line["sender"]]
                assert all(
                    each["event"] == "late"
                    or each["sequence"] >> INCARNATION_SHIFT > line["sequence"] >> INCARNATION_SHIFT
                    for each in later
                )
        _check_staleness(mine, at_once)


def _check_staleness(lines: list[dict[str, Any]], at_once: bool) -> None:
    """Staleness is the number of updates since its worker pulled: by itself, or with its last push."""
    pulled: dict[int, int] = {}
    incarnations: dict[int, int] = {}
    for line in lines:
        if line["event"] == "pull":
            pulled[line["worker"]] = line["version"]
            incarnations[line["worker"]] = -1
        elif line["event"] == "apply":
            worker, incarnation = line["worker"], line["sequence"] >> INCARNATION_SHIFT
            assert incarnations[worker] in (-1, incarnation), "a new life begins with a pull"
            most = line["version"] - 1 - pulled[worker]
            assert line["staleness"] == most if at_once else 0 <= line["staleness"] <= most
            pulled[worker], incarnations[worker] = line["version"], incarnation
