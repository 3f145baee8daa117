"""ServerLoop: a parameter server at work.

It collects pushes, applies them in groups, and replies to the workers that may read. Each push counts once,
no worker reads that is too far ahead, and a worker that has left is not waited for. What an update does is up
to the strategy: its own server overrides `transform`, `update`, `view`, `on_request`, `extras` and `forget`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.core.events import Applied, Dropped, Pulled
from polyrhythm.core.held_requests import HeldRequests
from polyrhythm.core.worker import Server
from polyrhythm.model.packing import pack, unpack
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.server.clocks import Clocks
from polyrhythm.strategies.server.codes import CodedReplies, PushDecoder
from polyrhythm.strategies.server.norms import NormExchange
from polyrhythm.strategies.server.push_group import PushGroup
from polyrhythm.strategies.server.snapshot import Rendezvous
from polyrhythm.strategies.server.updates import PushedUpdate, Settings, norm, turned
from polyrhythm.strategies.server.verdicts import Verdicts

if TYPE_CHECKING:
    from polyrhythm.core.message import Field, Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.worker import State
    from polyrhythm.model.shard import Shard
    from polyrhythm.model.vectors import Vectors
    from polyrhythm.strategies.server.parameter_server import ParameterServer

KINDS = (
    "initialize", "push", "pull", "read", "state", "verdict", "pause", "meet", "snapshot", "restore"
)  # fmt: skip


class ServerLoop(Server):
    """One server."""

    strategy: ParameterServer

    def __init__(self, strategy: ParameterServer, node: Node, shard: Shard) -> None:
        self.strategy, self.node, self.shard = strategy, node, shard
        self.started = len(node.members.workers)
        self.initialized = False
        self.clocks = Clocks([worker.rank for worker in node.members.workers])
        self.seen: dict[int, int] = {}  # the sequence number of each worker's last push
        self.group = PushGroup(strategy, shard, self.transform)  # not applied yet
        self.readers = HeldRequests(node)  # that wait for parameters
        lockstep = strategy.traits.lockstep
        self.holds = lockstep or strategy.pull == "next-version"  # pushes, until their group is applied
        # Groups of some of the workers, whose pushes are held.
        self.partial = self.holds and not lockstep and not strategy.single
        self.verdicts = Verdicts(node, needed=self.partial)
        self.rendezvous = Rendezvous(node, self.started)
        self.norms = NormExchange(node)
        self.decoder = PushDecoder(strategy.codec, node, shard)
        self.coded: CodedReplies | None = None
        if strategy.codec is not None and strategy.replies_in_code:
            self.coded = CodedReplies(strategy.codec, node, shard)

    # --- what a strategy changes --------------------------------------------------------------------

    def transform(self, push: PushedUpdate) -> Vectors:
        """The update as it is collected. `push.update` is lent: it may not be changed in place."""
        return push.update

    def update(self, update: Vectors, absent: Sequence[int], settings: Settings) -> None:
        """Applies what was collected; by default with the user's optimizer."""
        self.shard.apply(update, absent, settings)

    def view(self, reader: Message) -> Vectors:
        """The parameters for a worker that pulls or has pushed."""
        return self.shard.parameters

    def on_request(self, message: Message) -> None:
        """Called with each pull and with each push that arrives for the first time."""

    def extras(self, reader: Message) -> dict[str, Field]:
        """More fields of the reply to a worker that pulls or has pushed."""
        return {}

    def forget(self, worker: int) -> None:
        """Called when a worker has left."""

    # --- the loop -----------------------------------------------------------------------------------

    def serve(self) -> None:
        while not self.node.members.over:
            message = self.node.receive(*KINDS)
            if message is None:
                self._membership_changed()
            else:
                self._handle(message)
            if self.verdicts.follows:
                self._follow()
            elif self.group and len(self.group) >= self._quorum():
                self._apply()
            if self.initialized:
                self._reply()
            self.rendezvous.advance(self.clocks.workers, self.shard.version, self.verdicts.number)
        self._apply()

    def _handle(self, message: Message) -> None:
        match message.kind:
            case "push":
                self.rendezvous.trains(message.sender.rank)
                self._collect(message)
            case "pull":
                self.rendezvous.trains(message.sender.rank)
                self.on_request(message)
                self.readers.add(message)
            case "read":
                if message["final"] and not self.verdicts.follows:
                    self._apply()
                    self.verdicts.announce("final")
                self.readers.add(message)
            case "initialize":
                if not self.initialized:  # by worker 0, and not by its replacement
                    copied(message.tensors, self.shard.parameters)
                self.initialized = True
                self.node.reply(message)
            case "state":
                slices, tensors = self.shard.state()
                self.node.reply(message, *tensors, slices=slices)
            case "verdict":
                self.verdicts.add(message)
            case "pause":
                self.rendezvous.pause(message)
                self.node.reply(message)
            case "meet":
                self.rendezvous.add(message, trained=self.seen)
            case "snapshot":
                self.readers.add(message)
            case "restore":
                state = unpack(message.tensors)
                self.shard.load_state_dict(state["shard"])
                self.load_state_dict(state["server"])
                self.node.reply(message)

    def _membership_changed(self) -> None:
        """A worker has joined or left. What the dead have lent is copied, their requests are forgotten."""
        members = self.node.members
        present = {worker.rank for worker in members.workers}
        for worker in [worker for worker in self.clocks.workers if worker not in present]:
            self.clocks.forget(worker)
            self.forget(worker)
            if self.coded is not None:
                self.coded.forget(worker)
        self.rendezvous.membership_changed(present)
        self.initialized |= 0 not in present  # then every server starts from the model that it built itself
        self.readers.forget_dead()
        for push in (*self.group.pushes, *self.verdicts.pending.values()):
            if not members.alive(push.message):
                push.update = tuple(part.clone() for part in push.update)

    # --- collecting ---------------------------------------------------------------------------------

    def _quorum(self) -> int:
        """How many pushes make a group now."""
        if self.strategy.single:
            return 1
        present = len(self.node.members.workers)
        if self.partial:
            present -= len(self.rendezvous.paused)  # they do not push before the others are paused too
        return min(self.strategy.quorum(present, self.started), present)

    def _collect(self, message: Message) -> None:
        """Collects a push, unless it is a repetition or too stale."""
        worker = message.sender.rank
        if message.sequence <= self.seen.get(worker, 0):
            self.readers.add(message)  # applied already; only its reply was lost
            return
        self.seen[worker] = message.sequence
        self.rendezvous.refuse_load(worker)
        self.clocks.tick(worker)
        self.on_request(message)
        push = PushedUpdate.of(message, self.shard.version)
        if self.verdicts.follows:
            self.decoder.decode(push)
            self.verdicts.pending[push.name] = push
            return
        if push.staleness >= self.strategy.discard:
            self._drop(push)
            return
        self.decoder.decode(push)
        if self.holds or self._quorum() <= 1:
            self.group.add(push)
        else:
            self.group.add_at_once(push)
            self.readers.add(message)

    def _drop(self, push: PushedUpdate) -> None:
        self.verdicts.announce("drop", [push])
        self._log(Dropped, push)
        self.readers.add(push.message)

    def _follow(self) -> None:
        """Carries out the verdicts of the first server."""
        while (verdict := self.verdicts.next()) is not None:
            for push in verdict.pushes:
                push.staleness = self.shard.version - push.version
            if verdict.what == "drop":
                for push in verdict.pushes:
                    self._drop(push)
            elif verdict.what == "group":
                self.group.pushes = verdict.pushes
                self._apply()
                if not verdict.pushes:  # the version stays that of the other servers
                    self._clipped(())
                    self.shard.version += 1
            else:
                self.verdicts.finals += 1
                for push in self.verdicts.orphans():
                    self._log(Dropped, push)

    # --- applying -----------------------------------------------------------------------------------

    def _apply(self) -> None:
        """Applies the group, if there is one."""
        group = self.group
        if not group:
            return
        group.sort()
        self.verdicts.announce("group", group.pushes)
        if not group.summed:
            for push in turned(group.pushes, self.node.rank):
                self.readers.add(push.message)
        update = group.reduced()
        self.decoder.agree(update)
        update = self._clipped(update)
        self.update(update, group.absent(), group.pushes[0].settings)
        for push in group.pushes:
            self._log(Applied, push)
        group.clear()

    def _clipped(self, update: Vectors) -> Vectors:
        """The update of a group with its norm, over all servers, at most `clip`."""
        if self.strategy.single or self.strategy.clip == math.inf:
            return update

        def changed() -> None:
            nonlocal update
            update = tuple(part.clone() for part in update)  # the worker that lent it may have left
            self._membership_changed()

        return self.group.clipped(update, self.norms.total(self.shard.version, norm(update), changed))

    def _log(self, event: type[Applied | Dropped], push: PushedUpdate) -> None:
        sequence, step = push.message.sequence, push.message["step"]
        self.node.log(event(self.shard.version, push.worker, sequence, step, push.staleness, push.nbytes))

    # --- replies ------------------------------------------------------------------------------------

    def _reply(self) -> None:
        """Replies to those who may read now."""
        slowest = self.clocks.slowest(self.rendezvous.paused)
        for reader in self.readers.take(lambda reader: self._may_read(reader, slowest)):
            self._reply_to(reader)

    def _may_read(self, reader: Message, slowest: int) -> bool:
        """False for a worker more than `max_staleness` steps ahead of the slowest."""
        if reader.kind == "snapshot":
            return self.verdicts.number >= int(reader["verdicts"])
        if reader.kind == "read":
            return not (reader["final"] and self.verdicts.follows and not self.verdicts.finals)
        if reader.kind == "push" and not reader["fetch"]:
            return True
        if self.rendezvous.busy:
            return False
        return self.clocks[reader.sender.rank] - slowest <= self.strategy.max_staleness

    def _reply_to(self, reader: Message) -> None:
        node, shard = self.node, self.shard
        if reader.kind == "snapshot":
            node.reply(reader, *pack({"shard": shard.state_dict(), "server": self.state_dict()}))
        elif reader.kind == "read":
            self.verdicts.finals -= self.verdicts.follows and reader["final"]
            node.reply(reader, *shard.parameters, version=shard.version)
        elif reader.kind == "push" and not reader["fetch"]:
            node.reply(reader)
        else:
            if reader.kind == "pull":
                node.log(Pulled(reader.sender.rank, shard.version))
            extras, version, view = self.extras(reader), shard.version, self.view(reader)
            if self.coded is not None:
                version, view = self.coded.reply(reader, view)
            node.reply(reader, *view, version=version, **extras)

    # --- saving -------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """The state of this server, besides its shard; its tensors are not copied.

        Called while no worker waits for a reply. Sequence numbers are left out: those of a resumed
        run begin at 0.
        """
        return {
            "started": self.started,
            "clocks": self.clocks.state_dict(),
            "group": self.group.state_dict(),
            "replies": None if self.coded is None else self.coded.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self.started = state["started"]
        self.clocks.load_state_dict(state["clocks"])
        self.group.load_state_dict(state["group"])
        if self.coded is not None:
            self.coded.load_state_dict(state["replies"])
