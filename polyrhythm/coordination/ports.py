"""The interfaces that the coordinator needs: a launcher of nodes, and a recorder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from polyrhythm.core.events import Event, Metrics
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.record.result_file import ResultFile


class NodeLauncher(Protocol):
    """Starts nodes, and notifies them of others."""

    def start_servers(self, count: int) -> None:
        """Starts so many servers. Called once."""

    def tell(self, notice: Notice) -> None:
        """Sends a notice to all members of the run, except the one that it is about."""

    def end(self, peer: Peer) -> None:
        """Ends a worker, because another one that held the same model has died."""

    def replace(self, model: Sequence[Peer]) -> bool:
        """The workers of a model have died. True if other processes will replace them."""

    def rescue(self, model: Sequence[Peer]) -> bool:
        """The last workers have died, and servers hold the parameters. True if others will be started."""

    def released(self, peer: Peer, incarnation: int) -> None:
        """The memory of a dead worker is no longer in use."""

    def say(self, line: str) -> None:
        """Shows a line to the user."""


class Recorder(Protocol):
    """Records a run. Only `consensus` and `consensus_file` may raise."""

    lasting: bool  # what it has recorded is there also after a run that has failed

    def event(self, node: str, t: float, event: Event) -> None:
        """Records an event."""

    def lines(self, lines: bytes) -> None:
        """Records events that a node has encoded."""

    def metrics(self, node: str, t: float, metrics: Metrics) -> None:
        """Records metrics that the script has logged."""

    def output(self, node: str, line: str) -> None:
        """Records a line that the script has printed on a node."""

    def consensus(self, file: Sequence[memoryview]) -> Path | None:
        """Saves the final parameters, given as the parts of a file; returns its path.

        Raises PolyrhythmError if it cannot.
        """

    def consensus_file(self, size: int) -> ResultFile:
        """A file of this size for the final parameters, which several workers write.

        Raises PolyrhythmError if there is no room for it.
        """

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Records the summary, and returns it with the paths of the files."""


class NullRecorder:
    """A recorder that records nothing."""

    lasting = False

    def event(self, node: str, t: float, event: Event) -> None:
        pass

    def lines(self, lines: bytes) -> None:
        pass

    def metrics(self, node: str, t: float, metrics: Metrics) -> None:
        pass

    def output(self, node: str, line: str) -> None:
        pass

    def consensus(self, file: Sequence[memoryview]) -> None:
        return None

    def consensus_file(self, size: int) -> ResultFile:
        return ResultFile(io.BytesIO(), size, lambda file: None)

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        return summary
