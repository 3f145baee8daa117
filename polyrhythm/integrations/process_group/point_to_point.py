"""PointToPoint: send and receive, between the workers of a run.

Workers of one host send through shared memory (`collectives.shared_messages`). To another host a send is a
request that lends its tensor, and the reply says that the receiver has it. A send is complete when its tensor
has been received, as in Gloo, so only the tensors that a script has in flight take memory. A small one inside
a host is complete when it has a slot, of which there are few.

A receive that has begun is completed whatever the script does meanwhile: by the thread that waits for any
send or receive, or by a thread in the background. Tensors that arrive before their receive begins wait in a
list.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from polyrhythm.collectives.shared_memory import MAX_SLEEP, SPIN
from polyrhythm.collectives.shared_messages import Sent, SharedMessages
from polyrhythm.core.errors import PeerLost, WaitError
from polyrhythm.core.message import Message, Reply
from polyrhythm.core.peer import Peer
from polyrhythm.integrations.process_group.flat import check, fill, flat
from polyrhythm.integrations.process_group.works import DoneWork, GroupWork
from polyrhythm.worlds.processes.node import ProcessNode

SMALL = 1 << 16  # bytes up to which a send inside a host is complete when it has a slot
_KIND = "torch send"
_PAUSE, _LONG_PAUSE = 0.002, 0.016  # seconds between two looks at shared memory while the script computes
_CHECK = 0.05  # seconds between two looks at the run while a worker waits

Line = tuple[int, int]  # a channel, which is a group, and a tag


def channel_of(group: str) -> int:
    """The channel of a group of this name."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=7).digest(), "big")


class Letter(NamedTuple):
    """A tensor that has arrived. `take` is called when it has been copied."""

    sender: Peer
    values: Tensor
    take: Callable[[], object]


class _PeerWork(GroupWork):
    """A send or receive that has begun, and the workers that it waits for."""

    what = "a receive"

    def __init__(self, owner: PointToPoint, tensor: Tensor, awaited: Sequence[Peer]) -> None:
        super().__init__([tensor])
        self.owner, self.awaited = owner, awaited
        self._arrived: threading.Event | None = None

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        if self._arrived is not None:
            self._arrived.set()

    def sleep(self, seconds: float) -> None:
        """Waits so long, or until the work is done."""
        if self._arrived is None:
            self._arrived = threading.Event()
        if not self.done:
            self._arrived.wait(seconds)

    def progress(self) -> None:
        self.owner.progress()

    def block(self, timeout: float | None) -> None:
        self.owner.wait(self, timeout)


class ReceiveWork(_PeerWork):
    """A receive from one of the members of a group; `source` is None for any."""

    def __init__(self, owner: PointToPoint, tensor: Tensor, source: Peer | None, members: Sequence[Peer]):
        super().__init__(
            owner, tensor, [source] if source else [each for each in members if each != owner.me]
        )
        self.tensor, self.source, self._members = tensor, source, members
        self.sender: Peer | None = None

    def source_rank(self) -> int:
        """The rank in the group of the worker that has sent."""
        assert self.sender is not None
        return self._members.index(self.sender)

    _source_rank = source_rank


class _SendWork(_PeerWork):
    """A send. Nothing tells when it is complete: who wants to know looks."""

    what = "a send"

    def get_future(self) -> Future[Any]:
        if not self.done:
            threading.Thread(target=self._finish_beside, name="polyrhythm send", daemon=True).start()
        return super().get_future()

    def _finish_beside(self) -> None:
        try:
            self.owner.wait(self, None)
        except Exception as error:
            self.finish(error)


class SharedSendWork(_SendWork):
    """A send to a worker of this host."""

    def __init__(self, owner: PointToPoint, tensor: Tensor, to: Peer, sent: Sent) -> None:
        super().__init__(owner, tensor, [to])
        self._sent = sent

    def progress(self) -> None:
        super().progress()
        if self._sent.taken and not self.done:
            self.finish()


class RequestWork(_SendWork):
    """A send to a worker of another host."""

    def __init__(self, owner: PointToPoint, tensor: Tensor, to: Peer, reply: Reply) -> None:
        super().__init__(owner, tensor, [to])
        self._reply = reply

    def progress(self) -> None:
        if self._reply.arrived and not self.done:
            self._wait()

    def block(self, timeout: float | None) -> None:
        if timeout is None:
            self._wait()
        else:
            super().block(timeout)

    def _wait(self) -> None:
        error: BaseException | None = None
        try:
            self._reply.wait()
        except Exception as failed:
            error = failed
        self.finish(error)


class PointToPoint:
    """The sends and receives of this worker. `node` is None in a single process, which can only send to
    itself."""

    def __init__(self, node: ProcessNode | None, me: Peer) -> None:
        self._node, self.me = node, me
        self._lock = threading.Lock()
        self._receives: dict[Line, list[ReceiveWork]] = {}  # that wait for a letter, in order
        self._letters: dict[Line, list[Letter]] = {}  # that wait for a receive, in order
        self._requests: deque[RequestWork] = deque()
        self._here: Sequence[Peer] = ()
        self._shared: SharedMessages | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if node is not None:
            self._here, self._shared = node.everyone.shared_messages()
            if not {*node.members.workers} <= {me, *self._here}:
                node.subscribe(self._on_message, _KIND)

    # --- the script ---------------------------------------------------------------------------------

    def send(self, channel: int, to: Peer, tensor: Tensor, tag: int) -> GroupWork:
        """Begins to send a tensor."""
        values = flat(tensor)
        if to == self.me:
            copy = values.clone()
            self._deliver(self._matched([((channel, tag), Letter(self.me, copy, lambda: None))]))
            return DoneWork([tensor])
        assert self._node is not None
        if self._shared is not None and to in self._here:
            with self._lock:
                sent = self._shared.send(self._here.index(to), channel, tag, values)
            self._node.transport.traffic.count(values.nbytes)
            if not sent.number:
                self._run_beside()
            elif values.nbytes <= SMALL:
                return DoneWork([tensor])
            return SharedSendWork(self, tensor, to, sent)
        reply = self._node.request(to, _KIND, values, channel=channel, tag=tag)
        work = RequestWork(self, tensor, to, reply)
        while self._requests and self._requests[0].is_completed():
            self._requests.popleft()
        self._requests.append(work)
        return work

    def receive(
        self, channel: int, source: Peer | None, members: Sequence[Peer], tensor: Tensor, tag: int
    ) -> ReceiveWork:
        """Begins to receive a tensor, from one of the members or from any."""
        work, line = ReceiveWork(self, tensor, source, members), (channel, tag)
        with self._lock:
            letter = _taken(self._letters, line, lambda each: source in (None, each.sender))
            if letter is None:
                self._receives.setdefault(line, []).append(work)
        if letter is not None:
            self._deliver([(letter, work)])
        else:
            self.progress()
            if not work.done:
                self._run_beside()
        return work

    def wait(self, work: _PeerWork, timeout: float | None) -> None:
        """Waits until a send or a receive is complete or has failed."""
        began, checked = time.perf_counter(), 0.0
        spin = SPIN if any(peer in self._here for peer in work.awaited) else 0.0
        while not work.is_completed():
            waited = time.perf_counter() - began
            if waited < spin:
                os.sched_yield()
                continue
            work.sleep(min(waited / 8, MAX_SLEEP) if spin else _CHECK)
            if waited > checked:
                self._check(work, waited, timeout)
                checked = waited + _CHECK

    def close(self) -> None:
        """The script is over, and receives nothing more. What it has sent must be in shared memory, where it
        stays, or have reached the other host."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._take_all()
        for work in self._requests:
            if not work.done:
                work.block(None)  # an error does not matter now
        self._requests.clear()
        began = time.perf_counter()
        while self._node is not None and (full := self._there(self._full())):
            everyone = self._node.everyone.members
            self._node.check_wait(full, time.perf_counter() - began, everyone, "a send")
            self.progress()
            self._take_all()
            time.sleep(_PAUSE)

    def _full(self) -> list[Peer]:
        """The workers of this host that have no slot for what was sent to them."""
        return [self._here[index] for index in self._shared.waiting] if self._shared is not None else []

    def _there(self, peers: Sequence[Peer]) -> list[Peer]:
        """Those that have not left the run."""
        assert self._node is not None
        workers, left = self._node.members.workers, self._node.left
        return [peer for peer in peers if peer in workers and peer not in left]

    def _take_all(self) -> None:
        """Drops what has arrived, so that nobody waits until it is received."""
        with self._lock:
            letters = [letter for line in self._letters.values() for letter in line]
            self._letters.clear()
        for letter in letters:
            letter.take()

    # --- messages -----------------------------------------------------------------------------------

    def progress(self) -> None:
        """Completes receives whose tensors have arrived in shared memory, and makes room for sends."""
        if self._shared is None:
            return
        with self._lock:
            self._shared.advance()
            arrivals = self._shared.arrivals()
            if not arrivals:
                return
            letters = [
                Letter(self._here[each.sender], each.values, self._locked(each.take)) for each in arrivals
            ]
            lines = [(each.channel, each.tag) for each in arrivals]
            pairs = self._match(list(zip(lines, letters, strict=True)))
        self._deliver(pairs)

    def _on_message(self, message: Message | None) -> None:
        """Called in a thread with each message from another host; None means that a worker has left."""
        if message is None or self._node is None:
            return
        node, request = self._node, message
        letter = Letter(message.sender, message.tensors[0], lambda: node.reply(request))
        if self._closing.is_set():
            letter.take()
            return
        self._deliver(self._matched([((message["channel"], message["tag"]), letter)]))

    def _locked(self, take: Callable[[], None]) -> Callable[[], None]:
        def locked() -> None:
            with self._lock:
                take()

        return locked

    def _matched(self, letters: Sequence[tuple[Line, Letter]]) -> list[tuple[Letter, ReceiveWork]]:
        with self._lock:
            return self._match(letters)

    def _match(self, letters: Sequence[tuple[Line, Letter]]) -> list[tuple[Letter, ReceiveWork]]:
        """Finds the first receive for each letter; keeps the letters that have none."""
        pairs = []
        for line, letter in letters:
            work = _taken(self._receives, line, partial(_accepts, letter.sender))
            if work is None:
                self._letters.setdefault(line, []).append(letter)
            else:
                pairs.append((letter, work))
        return pairs

    def _deliver(self, pairs: Sequence[tuple[Letter, ReceiveWork]]) -> None:
        for letter, work in pairs:
            error: Exception | None = None
            try:
                check(letter.values, work.tensor, "a send", letter.sender, self.me)
                with torch.no_grad():
                    fill(work.tensor, letter.values)
            except Exception as failed:
                error = failed
            letter.take()
            work.sender = letter.sender
            work.finish(error)

    def _check(self, work: _PeerWork, waited: float, timeout: float | None) -> None:
        """Raises if a work need not be waited for any longer."""
        node = self._node
        if node is None:
            raise PeerLost(f"{self.me} waits in {work.what}, but there is no other worker")
        # Any of several may still send, if it is there.
        awaited = self._there(work.awaited) or work.awaited
        node.check_wait(awaited, waited, node.everyone.members, work.what)
        if timeout is not None and waited > timeout:
            who = " or ".join(map(str, work.awaited))
            raise WaitError(f"{self.me} waited {waited:.1f} s for {who} in {work.what}")

    # --- the background -----------------------------------------------------------------------------

    def _run_beside(self) -> None:
        """Lets a thread complete receives and find slots for sends, unless the script waits for them."""
        if self._thread is None and self._shared is not None:  # for other hosts the thread of the node does
            self._thread = threading.Thread(target=self._work, name="polyrhythm messages", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        assert self._shared is not None
        pause = _PAUSE
        while not self._closing.wait(pause):
            receives, sends = len(self._receives), self._shared.waiting
            if receives or sends:
                self.progress()
            idle = len(self._receives) == receives and not sends
            pause = min(2 * pause, _LONG_PAUSE) if idle else _PAUSE


def _accepts(sender: Peer, work: ReceiveWork) -> bool:
    return work.source in (None, sender)


T = TypeVar("T")


def _taken(lines: dict[Line, list[T]], line: Line, fits: Callable[[T], bool]) -> T | None:
    """Removes and returns the first that fits, of those on a line."""
    waiting = lines.get(line, [])
    found = next((each for each in waiting if fits(each)), None)
    if found is not None:
        lines[line] = [each for each in waiting if each is not found]
        if not lines[line]:
            del lines[line]
    return found
