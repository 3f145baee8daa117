"""Starting a run: `run` and `join` on real processes, `simulate` on virtual time."""

from polyrhythm.launch.api import Summary, join, run, simulate

__all__ = ["Summary", "join", "run", "simulate"]
