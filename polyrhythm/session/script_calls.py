"""ScriptCalls: the calls of this worker's script that all workers make together, such as `session.barrier()`.

Each is announced to the coordinator, which compares the calls of all workers in their order (see
`coordination.call_order`). Where workers step together, the others are told of it: one that begins its next
exchange without this call has left it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polyrhythm.core.errors import PeerLost, UsageError, WaitError
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import EnterCall, ScriptAt
from polyrhythm.session.context import WorldContext
from polyrhythm.session.places import Call, located, place_of_frame


class ScriptCalls:
    """The calls of this worker, and those in which other workers wait."""

    def __init__(self, context: WorldContext) -> None:
        self._context = context
        self._made = 0
        self._waiting: dict[Peer, Notice] = {}  # the last call of each other worker
        self.exchanges: Callable[[], int] = lambda: 0  # that this worker has begun
        context.node.on_notice["waits"] = self._on_waits

    @contextmanager
    def entered(self, call: Call) -> Iterator[None]:
        """Surrounds a call of the script, in which this worker may wait for others."""
        self._made += 1
        self._context.request(EnterCall(call.point, call.text, self.exchanges()))
        try:
            yield
        except PeerLost:
            raise
        except WaitError as error:
            raise WaitError(f"{self._context.me} waits in {call.text}: {error}") from None

    def check(self) -> None:
        """Called when an exchange begins. Raises if another worker waits in a call that this one left out."""
        for notice in list(self._waiting.values()):
            if self._made <= notice.calls and (wrong := self._left_out(notice)):
                raise UsageError(wrong)

    def say_where(self) -> None:
        """Called in another thread when the run has failed: others may have waited for this worker."""
        self._context.request(ScriptAt(place_of_frame(self._context.script_frame())))

    def _on_waits(self, notice: Notice) -> str:
        assert notice.peer is not None
        self._waiting[notice.peer] = notice
        return self._left_out(notice)  # this worker may be in an exchange that waits for the other

    def _left_out(self, notice: Notice) -> str:
        node, begun = self._context.node, self.exchanges()
        # In this order: the calls before an exchange are among those made.
        if node.incarnation or begun <= notice.steps or self._made > notice.calls:
            return ""
        step = f"{node.me} is in step {node.stopping.steps + 1}"
        return (
            f"{notice.peer} waits in {notice.reason}, but "
            f"{located(step, place_of_frame(self._context.script_frame()))}: all workers must make this call"
        )
