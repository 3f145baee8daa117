"""Snapshots: how the workers save and load their state and the servers' state together.

All workers call `state_dict` at the same place of the script, and `load_state_dict` before the first step:

1. Each has received the replies to all of its pushes, and waits at the first server until all do (`meet`).
   The other servers know that it is paused. Nothing is under way now.
2. One worker, the keeper, fetches the state of every server, or sends it.
3. All wait at the first server again, and continue in rank order.

A worker that joins later runs through the script from its beginning, and skips the saves at which the
others have saved before.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from polyrhythm.core.errors import PolyrhythmError, UsageError, WaitError
from polyrhythm.model.packing import pack, unpack

if TYPE_CHECKING:
    from polyrhythm.core.message import Field, Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.worker import State
    from polyrhythm.strategies.call_numbers import CallNumbers

Purpose = Literal["save", "load", "continue"]


class SnapshotClient:
    """A worker that saves or loads with all others."""

    def __init__(self, node: Node, calls: CallNumbers) -> None:
        self._node, self._calls = node, calls  # when it saves, or waits for all others

    def save(self) -> State | None:
        """The servers' state, on the keeper, and what identifies the snapshot.

        None if the others saved at this place before this worker joined.
        """
        node = self._node
        self._calls.next()
        while True:
            meeting = self._meet("save")
            if meeting["past"]:
                return None
            keeper, states = meeting["keeper"], []
            if keeper == node.rank:
                requests = [
                    node.request(server, "snapshot", verdicts=meeting["verdicts"])
                    for server in node.members.servers
                ]
                states = [unpack(reply.wait().tensors) for reply in requests]
            if self._meet("continue")["complete"]:
                return {"mark": [*meeting["mark"], keeper], "states": states}

    def load(self, saved: State) -> None:
        """Restores the servers' state, or waits until the keeper has. A new worker has no saved state."""
        node, states = self._node, saved.get("states", [])
        meeting = self._meet("load", mark=saved.get("mark", []), keeps=bool(states))
        if meeting["keeper"] == node.rank:
            requests = [
                node.request(server, "restore", *pack(state))
                for server, state in zip(node.members.servers, states, strict=bool(states))
            ]
            for reply in requests:
                reply.wait()
        if not self._meet("continue")["complete"]:
            raise PolyrhythmError(
                f"worker {meeting['keeper']} died while it sent the servers their saved state; start again"
            )

    def pause(self) -> None:
        """This worker waits for all others: until it pushes again, the servers do not wait for it."""
        number, servers = self._calls.next(), self._node.members.servers
        for paused in [self._node.request(server, "pause", save=number) for server in servers]:
            paused.wait()

    def _meet(self, purpose: Purpose, **fields: Field) -> Message:
        """Waits at the first server until all workers do."""
        node, number = self._node, self._calls.last
        first, *others = node.members.servers
        if purpose == "save":
            for paused in [node.request(server, "pause", save=number) for server in others]:
                paused.wait()
        try:
            reply = node.request(first, "meet", into=(), purpose=purpose, save=number, **fields).wait()
        except WaitError as error:
            raise WaitError(
                f"{node.me} waits to {purpose}, but another worker does not: all workers must call "
                f"session.state_dict() and load_state_dict() at the same point of the script ({error})"
            ) from None
        if "error" in reply.fields:
            raise UsageError(reply["error"])
        return reply


class Rendezvous:
    """Where workers wait for each other: the first server. On the others it knows who is paused."""

    def __init__(self, node: Node, started: int) -> None:
        self._node = node
        self._run = [started, len(node.members.servers)]  # workers and servers of this run
        self.paused: dict[int, int] = {}  # the number of the save or wait at which each paused worker is
        self._saved = 0  # the number of the last save of all workers
        self._waiting: dict[int, Message] = {}  # by worker
        self._keeper: int | None = None  # while a snapshot is taken or loaded
        self._present: set[int] = set()  # the workers that take part in it

    @property
    def busy(self) -> bool:
        """True while a snapshot is taken or loaded: no worker may begin to train now."""
        return self._keeper is not None

    def pause(self, message: Message) -> None:
        """A worker waits at the first server."""
        self.paused[message.sender.rank] = message["save"]

    def add(self, message: Message, trained: Collection[int]) -> None:
        """A worker has arrived. `trained` are the workers that have pushed since the run began."""
        purpose, number = message["purpose"], message["save"]
        if purpose == "save" and number <= self._saved and message.incarnation:
            self._node.reply(message, past=True)
        elif purpose == "load" and trained:
            self._node.reply(message, error=_late(message.sender.rank, min(trained)))
        else:
            self.pause(message)
            self._waiting[message.sender.rank] = message

    def trains(self, worker: int) -> None:
        """A worker pushes or pulls: it and all that were paused at the same save have continued."""
        if worker in self.paused:
            number = self.paused.pop(worker)
            self.paused = {other: at for other, at in self.paused.items() if at > number}

    def refuse_load(self, worker: int) -> None:
        """A worker has pushed: if others wait to load, it has not loaded its state."""
        loading = [each for each in self._waiting.values() if each["purpose"] == "load"]
        for message in loading:
            del self._waiting[message.sender.rank]
            self._node.reply(message, error=_late(message.sender.rank, worker))

    def membership_changed(self, workers: Collection[int]) -> None:
        """Forgets workers that have left."""
        alive = self._node.members.alive
        self._waiting = {rank: each for rank, each in self._waiting.items() if alive(each)}
        self.paused = {rank: number for rank, number in self.paused.items() if rank in workers}
        self._present &= set(workers)

    def advance(self, workers: Collection[int], version: int, verdicts: int) -> None:
        """Replies to all workers, in rank order, once all of them wait."""
        expected = self._present if self.busy else workers  # one that joins now is not awaited
        if not self._waiting or any(rank not in self._waiting for rank in expected):
            return
        waiting = [self._waiting[rank] for rank in sorted(self._waiting)]
        self._waiting, self._present = {}, set(self._waiting)
        purposes = {message["purpose"] for message in waiting}
        fields: dict[str, Any]
        if len(purposes) > 1:
            fields = {"error": "some workers save a state while others load one: all must do the same"}
        elif purposes == {"load"}:
            fields = self._loaded(waiting)
        elif purposes == {"save"}:
            self._keeper = waiting[0].sender.rank
            mark = [*self._run, waiting[0]["save"], version]
            fields = {"past": False, "keeper": self._keeper, "mark": mark, "verdicts": verdicts}
        else:
            complete = self._keeper in {message.sender.rank for message in waiting}
            if complete:
                self._saved = max(self._saved, *(message["save"] for message in waiting))
            self._keeper = None
            fields = {"complete": complete}
        for message in waiting:
            self._node.reply(message, **fields)

    def _loaded(self, waiting: list[Message]) -> dict[str, Any]:
        """The reply to workers that all load a state."""
        saved = [message for message in waiting if message["mark"]]
        self._keeper = (saved or waiting)[0].sender.rank
        if not saved:
            return {"keeper": self._keeper}
        mark = saved[0]["mark"]
        for message in saved:
            if message["mark"] != mark:
                return self._refused(
                    f"{message.sender} resumed from a different checkpoint than {saved[0].sender}; load the "
                    "same step on all workers"
                )
        if mark[:2] != self._run:
            counts = "{} workers and {} servers"
            return self._refused(
                f"this state was saved by {counts.format(*mark[:2])}, and this run has "
                f"{counts.format(*self._run)}: use as many"
            )
        keepers = [message.sender.rank for message in saved if message["keeps"]]
        if not keepers:
            return self._refused(
                f"no worker loads the state of the servers: it is in what worker {mark[-1]} saved"
            )
        self._keeper = keepers[0]
        return {"keeper": self._keeper}

    def _refused(self, error: str) -> dict[str, Any]:
        self._keeper = None
        return {"error": error}


def _late(loading: int, trained: int) -> str:
    return (
        f"worker {loading} loads a state, and worker {trained} has taken a step already: all workers call "
        "session.load_state_dict() after session.prepare(), before the first step, or none does"
    )
