"""Starting a run: `run` on real processes, `simulate` on virtual time."""

from polyrhythm.launch.api import Summary, run, simulate

__all__ = ["Summary", "run", "simulate"]
