"""Starting a run: `run` and `join` on real processes, `simulate` on virtual time."""

from polyrhythm.launch.api import join, run, simulate
from polyrhythm.record.result import RunResult

__all__ = ["RunResult", "join", "run", "simulate"]
