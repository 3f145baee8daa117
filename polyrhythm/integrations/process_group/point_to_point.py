"""PointToPoint: send and receive, between the workers of a run.

A send is a request that lends its tensor; the reply says that the receiver has taken it. So a send is
complete when it is received, as in Gloo, and at most the tensors that a script has in flight take memory. On
one host the tensor is copied to shared memory, from where the receiver copies it. A thread takes messages as
they arrive: into the tensor of a receive that the script has begun, whatever the script does meanwhile, or
into a list until it begins one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from polyrhythm.core.errors import PeerLost, WaitError
from polyrhythm.core.message import Message, Reply
from polyrhythm.core.peer import Peer
from polyrhythm.integrations.process_group.flat import check, fill, flat
from polyrhythm.integrations.process_group.works import DoneWork, GroupWork, poll
from polyrhythm.worlds.processes.node import ProcessNode

_KIND = "torch send"
_INLINE = 1 << 12  # bytes up to which a tensor is sent in the message
_CHECK = 0.1  # seconds between two looks at the run while a receive waits

Line = tuple[str, int]  # the name of a group and a tag


@dataclass
class Letter:
    """A tensor that was sent. `message` is None if this worker has sent it to itself."""

    sender: Peer
    values: Tensor
    message: Message | None


class SendWork(GroupWork):
    """A send that has begun."""

    def __init__(self, node: ProcessNode, reply: Reply, tensor: Tensor, pool: _Pool, staged: Tensor | None):
        super().__init__([tensor])
        self._node, self._reply, self._pool, self._staged = node, reply, pool, staged

    def block(self, timeout: float | None) -> None:
        if timeout is not None:
            poll(lambda: self._reply.arrived, timeout, "a send")
        error: BaseException | None = None
        try:
            self._reply.wait()
        except Exception as failed:
            error = failed
        with self._lock:
            staged, self._staged = self._staged, None
        if staged is not None:
            self._pool.give(staged)
        if not self.done:
            self.finish(error)

    def progress(self) -> None:
        if self._reply.arrived:
            self.block(None)

    def get_future(self) -> Future[Any]:
        if not self.done:
            self._node.spawn(self.block, None)
        return super().get_future()


class ReceiveWork(GroupWork):
    """A receive that has begun. `source` is None for any."""

    def __init__(self, owner: PointToPoint, tensor: Tensor, source: Peer | None, members: Sequence[Peer]):
        super().__init__([tensor])
        self.tensor, self.source, self.members = tensor, source, members
        self.sender: Peer | None = None
        self._owner, self._arrived = owner, threading.Event()

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        self._arrived.set()

    def block(self, timeout: float | None) -> None:
        self._owner.wait(self._arrived, self.source, timeout)

    def source_rank(self) -> int:
        """The rank in the group of the worker that has sent."""
        assert self.sender is not None
        return self.members.index(self.sender)

    _source_rank = source_rank


class PointToPoint:
    """The sends and receives of this worker. `node` is None in a single process, which can only send to
    itself."""

    def __init__(self, node: ProcessNode | None, me: Peer) -> None:
        self._node, self.me = node, me
        self._lock = threading.Lock()
        self._receives: dict[Line, list[ReceiveWork]] = {}  # that wait for a letter, in order
        self._letters: dict[Line, list[Letter]] = {}  # that wait for a receive, in order
        self._sends: set[SendWork] = set()
        self._pool = _Pool(node)
        if node is not None:
            node.subscribe(self._on_message, _KIND)

    def send(self, group: str, to: Peer, tensor: Tensor, tag: int) -> GroupWork:
        """Begins to send a tensor."""
        values = flat(tensor)
        if to == self.me:
            self._arrive((group, tag), Letter(self.me, values.clone(), None))
            return DoneWork([tensor])
        node = self._node
        assert node is not None
        staged = None
        if values.nbytes > _INLINE and node.everyone.shares_memory(to):
            staged = self._pool.take(values.nbytes)
            values = staged[: values.nbytes].view(values.dtype).copy_(values)
        reply = node.request(to, _KIND, values, group=group, tag=tag)
        work = SendWork(node, reply, tensor, self._pool, staged)
        self._sends = {each for each in self._sends if not each.is_completed()} | {work}
        return work

    def receive(
        self, group: str, source: Peer | None, members: Sequence[Peer], tensor: Tensor, tag: int
    ) -> ReceiveWork:
        """Begins to receive a tensor, from one of the members or from any."""
        work, line = ReceiveWork(self, tensor, source, members), (group, tag)
        with self._lock:
            letters = self._letters.get(line, [])
            letter = next((each for each in letters if source in (None, each.sender)), None)
            if letter is not None:
                letters.remove(letter)
            else:
                self._receives.setdefault(line, []).append(work)
        if letter is not None:
            self._deliver(letter, work)
        else:
            self._check_gone()
        return work

    def wait(self, arrived: threading.Event, source: Peer | None, timeout: float | None) -> None:
        """Waits until a receive is complete or has failed."""
        who, began = "any worker" if source is None else str(source), time.monotonic()
        limit = timeout
        if limit is None:
            limit = self._node.transport.wait if self._node is not None else 0.0
        while not arrived.wait(_CHECK):
            waited = time.monotonic() - began
            if self._node is not None and (self._node.stopping.alone or self._node.transport.closed):
                raise PeerLost(f"{self.me} waited {waited:.1f} s for {who} to send; the run has failed")
            if waited > limit:
                raise WaitError(f"{self.me} waited {waited:.1f} s for {who} to send")

    def drain(self) -> None:
        """Waits until all that was sent has been received. An error has been raised, or does not matter."""
        for work in self._sends:
            if not work.done:
                work.block(None)
        self._sends.clear()

    def _on_message(self, message: Message | None) -> None:
        """Called in a thread with each message; None means that a worker has left."""
        if message is None:
            self._check_gone()
        else:
            self._arrive(
                (message["group"], message["tag"]), Letter(message.sender, message.tensors[0], message)
            )

    def _arrive(self, line: Line, letter: Letter) -> None:
        with self._lock:
            receives = self._receives.get(line, [])
            work = next((each for each in receives if each.source in (None, letter.sender)), None)
            if work is not None:
                receives.remove(work)
            else:
                self._letters.setdefault(line, []).append(letter)
        if work is not None:
            self._deliver(letter, work)

    def _deliver(self, letter: Letter, work: ReceiveWork) -> None:
        error: Exception | None = None
        try:
            check(letter.values, work.tensor, "a send", letter.sender, self.me)
            with torch.no_grad():
                fill(work.tensor, letter.values)
        except Exception as failed:
            error = failed
        if letter.message is not None and self._node is not None:
            self._node.reply(letter.message)
        work.sender = letter.sender
        work.finish(error)

    def _check_gone(self) -> None:
        """Fails the receives whose sender has left the run."""
        if self._node is None:
            return
        here = self._node.members.workers
        gone = []
        with self._lock:
            for receives in self._receives.values():
                for work in list(receives):
                    awaited = [work.source] if work.source is not None else list(work.members)
                    if not any(peer in here for peer in awaited if peer != self.me or work.source):
                        receives.remove(work)
                        gone.append(work)
        for work in gone:
            who = "all other workers of the group" if work.source is None else str(work.source)
            work.finish(PeerLost(f"{self.me} waited for {who} to send, but it is gone"))


class _Pool:
    """Shared memory for tensors in flight. Sizes are powers of two, so that memory is reused."""

    def __init__(self, node: ProcessNode | None) -> None:
        self._node = node
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """At least so many bytes."""
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            free = self._free.setdefault(size, [])
            if free:
                return free.pop()
        assert self._node is not None
        return self._node.memory.empty(size, torch.uint8)

    def give(self, memory: Tensor) -> None:
        with self._lock:
            self._free[memory.numel()].append(memory)
