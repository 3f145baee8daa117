"""CoordinatorService: connects the coordinator to the transport."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from polyrhythm.coordination.coordinator import Coordinator
from polyrhythm.core.errors import PolyrhythmError, WaitError, WireError
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import INCARNATION_SHIFT
from polyrhythm.core.requests import JoinRun, pack_reply, unpack
from polyrhythm.core.result_part import ResultPart
from polyrhythm.launch.hosts import HOST
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.transport import Transport


class CoordinatorService:
    """Passes messages of nodes to the coordinator, in its own thread, and sends notices to nodes.

    Every use of the coordinator holds `lock`. `from_host` gets the messages of other launchers; `ended` is
    called when the run is over.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        transport: Transport,
        lock: threading.RLock,
        from_host: Callable[[Incoming], None],
        ended: Callable[[], None],
    ) -> None:
        self._coordinator, self._transport, self._lock = coordinator, transport, lock
        self._from_host, self._ended = from_host, ended
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="polyrhythm coordinator")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Tells the thread to end; `join` waits for it."""
        self._closed = True

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def tell(self, notice: Notice) -> None:
        """Notifies every member except the one that the notice is about."""
        peer, fields = notice.peer, msgspec.structs.asdict(notice)
        for other in list(self._coordinator.membership.members):
            if other != peer:
                with contextlib.suppress(PolyrhythmError):
                    # No retry: a member that cannot be reached is dead too, and its exit will be reported.
                    self._transport.send(other, notice.kind, fields=fields, retry=False)
        if peer is not None and notice.kind == "left":
            self._transport.lost(peer, notice.reason)

    def _serve(self) -> None:
        while not self._closed:
            try:
                incoming = self._transport.receive(timeout=0.2)
                if incoming is None:
                    continue
                with self._lock:
                    self._handle(incoming)
                    ended = self._coordinator.failure is not None or self._coordinator.finished
            except PolyrhythmError:
                continue
            except Exception as error:  # without this thread all nodes would wait
                with self._lock:
                    self._coordinator.fail(f"the coordinator failed: {type(error).__name__}: {error}")
                ended = True
            if ended:
                self._ended()

    def _handle(self, incoming: Incoming) -> None:
        coordinator, sender = self._coordinator, incoming.sender
        if sender.role == HOST:
            return self._from_host(incoming)
        incarnation = incoming.sequence >> INCARNATION_SHIFT
        if incoming.kind in ("result", "result part"):
            membership = coordinator.membership
            if sender not in membership.members or incarnation != membership.incarnations[sender]:
                self._transport.reply(incoming)  # it died: a replacement will send the result again
                return None
            file = [buffer.view for buffer in incoming.buffers]
            if incoming.kind == "result part":
                coordinator.received.add(msgspec.convert(incoming.fields, ResultPart), file)
                self._transport.reply(incoming)
                return None
            digest = incoming.fields["digest"]
            return coordinator.result(sender, digest, file, lambda: self._transport.reply(incoming))

        def respond(reply: Any) -> None:
            if incoming.wants_reply:
                try:
                    self._transport.reply(incoming, fields=pack_reply(reply))
                except WaitError:
                    pass  # the node is gone, and its exit will be reported
                except PolyrhythmError as error:
                    coordinator.fail(str(error), error.exit_code)

        try:
            request = unpack(incoming.kind, incoming.fields)
        except WireError as error:
            if incoming.wants_reply:
                self._transport.reply(incoming, fields={"error": str(error)})
            return
        if isinstance(request, JoinRun) and incarnation == coordinator.membership.incarnations[sender]:
            self._transport.introduce(sender, request.location[0])
        coordinator.handle(sender, request, respond, incarnation)
