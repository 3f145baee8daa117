"""Ending: how a run ends before its scripts do, and keeps its model. Logic without I/O.

An interrupted run ends as if the scripts had ended (see `core.stopping`). In a run that has failed, each
worker offers the parameters that it has or can get from servers, and the first one that does sends them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.ports import NodeLauncher
from polyrhythm.coordination.written_files import WrittenFiles
from polyrhythm.core.errors import Interrupted
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import Farewell, ScriptAt

INTERRUPTED = "interrupted"


@dataclass
class Failure:
    """Why a run ended before its scripts did."""

    message: str
    exit_code: int = 1


class Ending:
    """The early end of a run: none yet, or what has been said about it."""

    def __init__(self, launcher: NodeLauncher, membership: Membership) -> None:
        self._launcher, self._membership = launcher, membership
        self.failure: Failure | None = None
        self.keeps = False  # workers have something that can be saved
        self.stopping = False  # interrupted: the workers stop after a step that they agree on
        self.source = ""  # in a failed run: who had the parameters that were saved
        self.files = WrittenFiles(membership, launcher.say)  # that the script has saved itself
        self._saving = False  # the run has failed, and a worker may still send parameters
        self._saver: tuple[Peer, str] | None = None  # the worker that sends them, and whose they are
        self._steps: dict[Peer, int] = {}  # how many steps each worker has taken
        self._late: set[Peer] = set()  # workers that were waited for, and have not said where they are

    @property
    def over(self) -> bool:
        """True if the run has failed, and nothing more is to be saved or said."""
        saving = self._saving and bool(self._membership.workers)
        return self.failure is not None and not saving and not self._late

    @property
    def sending(self) -> bool:
        """True while a worker of a run that has failed sends its parameters."""
        return self._saving and self._saver is not None

    def stop(self, lockstep: bool) -> bool:
        """The run is interrupted: asks the workers to stop. False if they have nothing to save."""
        if not self.keeps or self.failure is not None:
            return False
        self.stopping = True
        self._membership.expected.clear()
        self._launcher.tell(Notice("stop", step=-1 if lockstep else 0))
        return True

    def report(self, peer: Peer, steps: int) -> None:
        """A worker that was asked to stop has taken so many steps."""
        self._steps[peer] = steps
        self.advance()

    def advance(self) -> None:
        """Tells the workers where to stop, if all have reported."""
        if self._steps and not {*self._membership.workers} - self._steps.keys():
            self._launcher.tell(Notice("stop", step=max(self._steps.values()) + 1))
            self._steps = {}

    def fail(self, message: str, exit_code: int, waiting: Peer | None = None) -> bool:
        """The run has failed. False if it had failed before.

        `waiting`: the worker that has waited too long for others, which are named in the message.
        """
        if self.failure is not None:
            return False
        self.failure = Failure(message, exit_code)
        if self.stopping:
            self.failure = Failure(INTERRUPTED, Interrupted.exit_code)
        self._saving = self.keeps
        if self.keeps:
            others = {*self._membership.workers} - {waiting} if waiting is not None else set()
            self._late = {each for each in others if re.search(rf"\b{each}\b", message)}
            self._launcher.tell(Notice("abandon"))
        return True

    def add_place(self, peer: Peer, script: ScriptAt, respond: Callable[[None], None]) -> None:
        """A worker of a run that has failed says where its script was."""
        respond(None)
        if peer in self._late and self.failure is not None:
            self._late.discard(peer)
            if script.place:
                self.failure.message += f"; {peer} is at {script.place}"

    def give_up(self) -> None:
        """Saves nothing more: a second Ctrl-C, or the time for it is over."""
        self._saving = False
        self._late.clear()

    def offer(self, peer: Peer, source: str, respond: Callable[[Farewell], None]) -> None:
        """A worker has the parameters of `source`; it sends them unless another one does."""
        wanted = self._saving and self._saver is None
        if wanted:
            self._saver = peer, source
        respond(Farewell(last=wanted))

    def saved(self) -> None:
        """The parameters have arrived."""
        if self._saver is not None:
            self.source = self._saver[1]
        self._saving = self.keeps = False

    @property
    def outcome(self) -> Failure | None:
        """Why the run ended before its scripts did, also if its workers have stopped in order."""
        return self.failure or (Failure(INTERRUPTED, Interrupted.exit_code) if self.stopping else None)

    def summary(self) -> dict[str, Any]:
        """How the run ended: for its summary."""
        outcome, file = self.outcome, self.files.last
        if outcome is None:
            return {"ended": "finished"}
        source: dict[str, Any] = {"source": self.source} if self.source else {}
        if file is not None:
            source["last_saved"] = {"path": file.path, "step": file.step, "inode": file.inode}
        if outcome.exit_code == Interrupted.exit_code:
            return {"ended": INTERRUPTED, **source}
        return {"ended": "failed", "error": outcome.message, **source}

    def lose(self, peer: Peer) -> None:
        """A worker has left a run that has failed: another one may send its parameters."""
        self._late.discard(peer)
        if self._saver is not None and self._saver[0] == peer:
            self._saver = None
