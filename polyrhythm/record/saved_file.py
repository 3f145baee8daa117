"""The file that the script of a run that ended early has saved last, by its present name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def with_saved_file(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary with the file as a script has left it: many write `model.pt.new` and rename it.

    A file that is gone is left out. One in a folder that does not exist here is on another host.
    """
    saved = summary.get("last_saved")
    if saved is None:
        return summary
    rest = {name: value for name, value in summary.items() if name != "last_saved"}
    path = _present(Path(saved["path"]), saved["inode"])
    return rest if path is None else rest | {"last_saved": {"path": path, "step": saved["step"]}}


def _present(path: Path, inode: int) -> str | None:
    try:
        entries = {entry.inode(): entry.path for entry in os.scandir(path.parent)}
    except OSError:
        return str(path)
    return entries.get(inode, str(path) if path.exists() else None)
