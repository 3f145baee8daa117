"""The model that a run has left, for programs that go on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrhythm.core.errors import UsageError
from polyrhythm.core.plan import Plan
from polyrhythm.record.result import PARAMETERS


class SavedModel(NamedTuple):
    """The file with the final parameters of a run, and the plan of the run."""

    file: Path
    plan: Plan
    note: str  # what a person should know about it; "": nothing


def saved_model(folder: Path) -> SavedModel:
    """What a run has left. UsageError if it has left no model."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; give the folder of a run, such as runs/NAME")
    plan, summary = Plan.read(folder), _summary(folder)
    file = Path(summary.get("parameters", folder / PARAMETERS))
    if not file.is_file():
        why = "it is still running, or was killed"
        if summary:
            why = f"it ended with: {summary['error']}" if "error" in summary else f"it is {summary['ended']}"
        raise UsageError(f"{folder} has no {PARAMETERS}: {why}; give the folder of a run that has finished")
    note = ""
    if (ended := summary.get("ended", "not over")) != "finished":
        note = f"{folder} is {ended}: this is the model as far as it was trained"
    return SavedModel(file.resolve(), plan, note)


def _summary(folder: Path) -> dict[str, Any]:
    """The summary of a run; empty if it has none yet."""
    path = folder / "summary.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}; give the folder of a run") from None
