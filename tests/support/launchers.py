"""Launchers for tests of the coordinator alone."""

from __future__ import annotations

from collections.abc import Sequence

import polyrhythm as pr
from polyrhythm.coordination.coordinator import Coordinator
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.requests import JoinRun
from polyrhythm.core.resolve import resolved


class SilentLauncher:
    """Starts nothing, and notes what the coordinator told nodes and which memory it released."""

    def __init__(self, restarts: int = 0) -> None:
        self.restarts = restarts
        self.notices: list[Notice] = []
        self.freed: list[tuple[Peer, int]] = []
        self.lines: list[str] = []
        self.ended: list[Peer] = []

    def start_servers(self, count: int) -> None:
        pass

    def tell(self, notice: Notice) -> None:
        self.notices.append(notice)

    def end(self, peer: Peer) -> None:
        self.ended.append(peer)

    def replace(self, model: Sequence[Peer]) -> bool:
        self.restarts -= 1
        return self.restarts >= 0

    def rescue(self, model: Sequence[Peer]) -> bool:
        return False

    def released(self, peer: Peer, incarnation: int) -> None:
        self.freed.append((peer, incarnation))

    def say(self, line: str) -> None:
        self.lines.append(line)


def coordinator(strategy: str, workers: int, launcher: SilentLauncher) -> Coordinator:
    """The coordinator of a run whose time stands still."""
    plan = Plan(strategy, workers=workers)
    return Coordinator(plan, resolved(pr.parse(strategy)), launcher, lambda: 0.0)


def join(strategy: str) -> JoinRun:
    """A node asks to join a run with this strategy."""
    return JoinRun(resolved(pr.parse(strategy)), "local")
