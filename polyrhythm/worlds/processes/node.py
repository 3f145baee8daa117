"""ProcessNode: a node that is a process. Blocking means waiting on a socket.

Tensors in shared memory (`Memory.empty`) are sent by reference to nodes of the same host. Other tensors, and
all tensors for other hosts, are sent as bytes. Tensors on a GPU are copied through host memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polyrhythm.collectives.shared_memory import BOARD
from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError, WaitError
from polyrhythm.core.events import Delivered, DeliveredLate, Event, EventPolicy, PeerJoined, PeerLeft, Totals
from polyrhythm.core.group import Task
from polyrhythm.core.message import Field, Message, Reply
from polyrhythm.core.node import Members, Node
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import COORDINATOR, Peer
from polyrhythm.core.requests import Location, NodeFailed, ReleaseMemory, Request, StepsTaken, pack
from polyrhythm.core.stopping import Stopping
from polyrhythm.wire.buffers import Buffer
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.transport import Transport
from polyrhythm.worlds.processes.memory import ProcessMemory
from polyrhythm.worlds.processes.messages import NAMES, FailedReply, ProcessReply, ReceivedMessage, message_of
from polyrhythm.worlds.processes.process_group import NodeLocation, ProcessGroup
from polyrhythm.worlds.processes.reporter import Reporter
from polyrhythm.worlds.processes.thread_task import ThreadTask

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.wire.arena import Arenas


_FINISHED = "it has finished, but all workers must take the same steps"


@dataclass
class _PendingNotice:
    """A notice about another node that the strategy has not seen, and the number of messages before it."""

    notice: Notice
    arrived: int


class ProcessNode(Node):
    """This process as a node."""

    def __init__(
        self,
        me: Peer,
        transport: Transport,
        seed: int,
        began: float,
        arenas: Arenas | None = None,
        arena: int = -1,
        collective: str = "auto",
    ) -> None:
        self.me, self.seed, self.transport = me, seed, transport
        self.arenas, self.arena = arenas, arena
        # Allocated first in every arena, so that all nodes know the offset of every board.
        self.board = arenas.allocate(arena, BOARD) if arenas else 0
        self._began = began
        self._collective = collective
        self.view = arenas.view(arena) if arenas else memoryview(b"")
        self._memory = torch.frombuffer(self.view, dtype=torch.uint8) if arenas else torch.empty(0)
        self._base = self._memory.data_ptr()
        self.members = Members()
        self.memory = ProcessMemory(self)
        self._group: ProcessGroup | None = None
        self.one_host = True  # all workers are on this host
        self._notices: deque[_PendingNotice] = deque()  # not yet seen by the strategy, in order
        self._changes = 0  # of membership
        self._changed: list[tuple[int, Notice]] = []  # by number; some serving threads have yet to see them
        self._seen = threading.local()  # how many of these changes each thread has seen
        self._handled: dict[int, int] = {}  # how many of them each thread that serves has handled
        self._handler_lock = threading.RLock()
        self._lock = threading.Lock()
        self._reporter = Reporter(me, transport)
        self.stopping = Stopping()
        self.on_notice = {}
        for kind in ("left", "joined", "done", "waits", "over"):
            transport.handlers[kind] = self._on_notice
        transport.handlers["stop"] = transport.handlers["abandon"] = self._on_stop

    # --- membership ---------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic() - self._began

    def meet(self, peers: Sequence[tuple[str, int, Location]]) -> None:
        """Sets the nodes of the run: role, rank and location of each."""
        nodes = {Peer(role, rank): NodeLocation(*location) for role, rank, location in peers}
        for peer, location in nodes.items():
            if peer != self.me:
                self.transport.introduce(peer, location.address)
        self.members.workers = sorted(peer for peer in nodes if peer.role == "worker")
        self.members.servers = sorted(peer for peer in nodes if peer.role == "server")
        workers = {worker: nodes[worker] for worker in self.members.workers}
        self._group = ProcessGroup(self, workers, self._collective)
        self.one_host = {location.host for location in workers.values()} == {self.transport.host}

    @property
    def everyone(self) -> ProcessGroup:
        assert self._group is not None
        return self._group

    @property
    def left(self) -> dict[Peer, str]:
        """The nodes that have left the run since `members` was updated, and why."""
        notices = [each.notice for each in list(self._notices)]
        return {each.peer: each.reason for each in notices if each.kind == "left" and each.peer is not None}

    def check_wait(
        self, missing: Sequence[Peer], waited: float, group: Sequence[Peer], what: str = "a collective"
    ) -> None:
        """Raises if a collective of a group need not wait any longer for the missing workers."""
        left, workers = self.left, self.members.workers
        died = [peer for peer in group if peer in self.members.lost and peer not in workers]
        died += [peer for peer in group if left.get(peer, "finished") != "finished"]
        # If any member has died the collective fails: the missing workers wait for the dead one too.
        gone = next(iter(died), None) or next(
            (peer for peer in missing if peer in left or peer not in workers), None
        )
        if gone is not None:
            why = "it is gone" if gone in died else _FINISHED
            # If it has not come, no worker has begun to write results.
            message = f"{self.me} waited {waited:.1f} s for {gone} in {what}; {why}"
            raise PeerLost(message, untouched=gone in missing)
        failed = self.stopping.alone  # this notice may come before that of the death
        if missing and (waited > self.transport.wait or self.transport.closed or failed):
            message = f"{self.me} waited {waited:.1f} s for {', '.join(map(str, missing))} in {what}"
            raise PeerLost(f"{message}; the run has failed", True) if failed else WaitError(message)

    def _on_notice(self, incoming: Incoming) -> None:
        """Handles a notice: ends waits for a node that left, learns the address of one that joined.

        `members` changes later, in `receive`, in the order of arrival.
        """
        notice = Notice.of(incoming.kind, incoming.fields)
        check = self.on_notice.get(notice.kind)
        if check is not None and (wrong := check(notice)):
            self._tell_coordinator(NodeFailed(wrong, UsageError.exit_code))
        if notice.kind in ("done", "waits"):
            return
        if notice.peer is not None and notice.kind == "left":
            self.transport.lost(notice.peer, notice.reason)
        elif notice.peer is not None:
            self.transport.introduce(notice.peer, notice.address)
        self._notices.append(_PendingNotice(notice, self.transport.arrived))
        self.transport.wake()

    def _on_stop(self, incoming: Incoming) -> None:
        """Handles a notice that the run ends early."""
        alone = self.stopping.alone
        steps = self.stopping.handle(Notice.of(incoming.kind, incoming.fields))
        if steps is not None:  # in another thread: the one that reads must not send
            ThreadTask(self._tell_coordinator, (StepsTaken(steps),))
        if self.stopping.alone and not alone:
            self.transport.abandon()
            ThreadTask(self.stopping.on_abandoned, ())

    def _update_members(self, notice: Notice) -> None:
        peer, members = notice.peer, self.members
        if peer is None:
            members.over = True
            return
        present = members.workers if peer.role == "worker" else members.servers
        others = [each for each in present if each != peer]
        if notice.kind == "joined":
            others = sorted([*others, peer])
        else:
            members.leave(peer, notice.incarnation, notice.finished)
        if peer.role == "worker":
            members.workers = others
        else:
            members.servers = others

    def _note_handled(self) -> None:
        """Called when this thread has handled all changes that it has seen.

        A change that all threads that serve have handled is logged. If a worker died, its memory is released:
        this node no longer uses it, and a replacement may be waiting for it.
        """
        if not self._changed:
            return
        seen, thread = getattr(self._seen, "changes", 0), threading.get_ident()
        with self._lock:
            if thread in self._handled:
                self._handled[thread] = seen
            least = min(self._handled.values(), default=seen)
            handled = [notice for number, notice in self._changed if number <= least]
            self._changed = [change for change in self._changed if change[0] > least]
        for notice in handled:
            if notice.kind == "joined":
                self.log(PeerJoined(str(notice.peer)))
                continue
            self.log(PeerLeft(str(notice.peer), notice.incarnation, notice.reason))
            if notice.role == "worker" and not notice.finished:
                self._tell_coordinator(ReleaseMemory(notice.rank, notice.incarnation))

    def _tell_coordinator(self, request: Request[None]) -> None:
        kind, fields = pack(request)
        with contextlib.suppress(PolyrhythmError):  # without a coordinator the run is over
            self.transport.send(COORDINATOR, kind, (), fields)

    # --- messages -----------------------------------------------------------------------------------

    def send(self, to: Peer, kind: str, *tensors: Tensor, **fields: Field) -> None:
        self.transport.send(to, kind, [self.buffer(tensor) for tensor in tensors], fields)

    def request(
        self, to: Peer, kind: str, *tensors: Tensor, into: Sequence[Tensor] = (), **fields: Field
    ) -> Reply:
        staged, targets = [], []
        for target in into:
            direct = target.device.type == "cpu" and target.is_contiguous()
            host = target if direct else torch.empty(target.shape, dtype=target.dtype)
            if host is not target:
                staged.append((target, host))
            targets.append(self.buffer(host))
        buffers = [self.buffer(tensor) for tensor in tensors]
        try:
            return ProcessReply(self.transport.request(to, kind, buffers, targets, fields), staged)
        except PeerLost as error:
            return FailedReply(error)

    def receive(self, *kinds: str) -> Message | None:
        self._note_handled()
        while True:
            wakes = self.transport.wake_count  # read first, so that no notice is missed
            # Only messages that arrived before a notice come before it, so a busy node sees it soon.
            next_ = self._notices[0] if self._notices else None
            changed = getattr(self._seen, "changes", 0) != self._changes
            if next_ is None:
                incoming = self.transport.receive(kinds, timeout=0 if changed else None, wake_count=wakes)
            else:
                incoming = self.transport.receive(kinds, timeout=0, wake_count=wakes, before=next_.arrived)
            if incoming is not None:
                message = message_of(incoming)
                late = self.members.outdated(message)
                kind = DeliveredLate if late else Delivered
                self.log(kind(str(message.sender), message.sequence, message.kind))
                if not late:  # the memory of a late message may belong to another node by now
                    return message
            elif next_ is not None or changed:
                with self._lock:
                    # Every thread returns None once, but only the first one changes `members`.
                    if next_ is not None and self._notices and self._notices[0] is next_:
                        self._notices.popleft()
                        self._update_members(next_.notice)
                        self._changes += 1
                        if next_.notice.peer is not None:
                            self._changed.append((self._changes, next_.notice))
                    self._seen.changes = self._changes
                return None

    def subscribe(self, on_message: Callable[[Message | None], None], *kinds: str) -> None:
        def handle_messages() -> None:
            while not self.members.over:
                try:
                    message = self.receive(*kinds)
                except WaitError:
                    if self.transport.closed:
                        return
                    continue  # no message arrived
                on_message(message)

        self.serve(handle_messages)

    def serve(self, function: Callable[[], None]) -> Task:
        def body() -> None:
            thread = threading.get_ident()
            with self._lock:
                self._handled[thread] = 0
            try:
                with torch.no_grad():
                    function()
            except Exception as error:
                if self.transport.closed:
                    return
                expected = isinstance(error, PolyrhythmError)
                if not expected:
                    traceback.print_exc()
                what = str(error) if expected else f"{self.me} failed: {type(error).__name__}: {error}"
                code = error.exit_code if isinstance(error, PolyrhythmError) else 1
                self._tell_coordinator(NodeFailed(what, code))
            finally:
                with self._lock:
                    del self._handled[thread]

        return ThreadTask(body, ())

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        return self._handler_lock

    def expect(self, sender: Peer, kind: str, into: Sequence[Tensor]) -> Callable[[], None]:
        if any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in into):
            return super().expect(sender, kind, into)
        return self.transport.expect(sender, kind, [self.buffer(tensor) for tensor in into])

    def reply(self, message: Message, *tensors: Tensor, **fields: Field) -> bool:
        assert isinstance(message, ReceivedMessage)
        same_count = message.tensors and len(tensors) == len(message.tensors)
        if same_count and all(a is b for a, b in zip(tensors, message.tensors, strict=True)):
            buffers = message.origin.buffers  # the reply was computed in place
        else:
            buffers = [self.buffer(tensor) for tensor in tensors]
        return self.transport.reply(message.origin, buffers, fields)

    def buffer(self, tensor: Tensor) -> Buffer:
        """A tensor as the wire sees it; by reference if it lies in this node's arena."""
        offset = tensor.data_ptr() - self._base
        if 0 <= offset < self.view.nbytes and tensor.is_contiguous():
            view = self.view[offset : offset + tensor.nbytes]
            return Buffer(NAMES[tensor.dtype], view, self.arena, offset)
        host = tensor.detach().cpu().contiguous().view(-1)
        return Buffer(NAMES[host.dtype], host.view(torch.uint8).numpy().data)

    # --- threads, events and shutdown ---------------------------------------------------------------

    def spawn(self, function: Callable[..., None], *args: Any) -> Task:
        return ThreadTask(function, args)

    def log(self, event: Event) -> None:
        self._reporter.log(self.now(), event)

    def totals(self, *, steps: int, samples: int, compute_s: float, wait_s: float) -> None:
        sent, between = self.transport.traffic.bytes_sent, self.transport.traffic.bytes_between
        self._reporter.totals(Totals(steps, samples, sent, between, compute_s, wait_s))

    def start_reports(self, events: EventPolicy) -> None:
        """Starts to send events and totals to the coordinator periodically."""
        self._reporter.start(events)

    def flush(self) -> None:
        """Sends all events and totals so far to the coordinator."""
        self._reporter.flush()

    def close(self) -> None:
        """Ends all threads and connections."""
        self._reporter.close()
        self.transport.close()
        if self._group is not None:
            self._group.close()
