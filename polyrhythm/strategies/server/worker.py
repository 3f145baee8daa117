"""The workers of the parameter server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.core.worker import Worker
from polyrhythm.model.vectors import cloned, copied
from polyrhythm.strategies.call_numbers import CallNumbers
from polyrhythm.strategies.server.client import PrefetchingClient, ServerClient
from polyrhythm.strategies.server.snapshot import SnapshotClient
from polyrhythm.strategies.server.updates import PushRequest

if TYPE_CHECKING:
    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.worker import State
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.vectors import Vectors
    from polyrhythm.strategies.server.parameter_server import ParameterServer


class ParameterServerWorker(Worker):
    """Trains with parameters that servers hold."""

    strategy: ParameterServer

    def __init__(self, strategy: ParameterServer, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        client = PrefetchingClient if strategy.prefetch else ServerClient
        self.servers = client(strategy, node, replica)
        self.snapshots = SnapshotClient(node, CallNumbers(replica))

    def start(self) -> None:
        if self.node.rank == 0:
            self.servers.initialize()
        self.servers.pull(fresh=True)

    def finish(self) -> None:
        self.servers.finish()
        lockstep = self.strategy.traits.lockstep
        if self.strategy.feedback and not lockstep and self.replica.leaves_early:
            self.servers.flush()  # others continue, so the residual still counts

    def consensus(self, final: bool = False) -> Vectors:
        return self.servers.fetch_parameters(final)

    def on_meeting(self) -> None:
        self.servers.join_push()
        self.snapshots.pause()

    def state_dict(self) -> State:
        """Waits for all workers. One of them has the servers' state too."""
        self.servers.join_push()
        own, servers = self.own_state(), self.snapshots.save()
        return {} if servers is None else {**own, "servers": servers}

    def load_state_dict(self, state: State) -> None:
        """Waits until all workers load, and all servers have loaded."""
        self.snapshots.load(state.get("servers", {}))
        if state:
            self.load_own_state(state)
        else:
            self.servers.pull(fresh=True)

    def own_state(self) -> State:
        """This worker's part of the state. Subclasses add theirs."""
        return {"parameters": cloned(self.replica.parameters), "client": self.servers.state_dict()}

    def load_own_state(self, state: State) -> None:
        """Continues from what `own_state` returned."""
        copied(state["parameters"], self.replica.parameters)
        self.servers.load_state_dict(state["client"])


class GradientWorker(ParameterServerWorker):
    """Pushes gradients; the servers run the user's optimizer."""

    def step(self) -> None:
        self.servers.rescale()
        absent = self.replica.gradients.absent
        self.servers.push(PushRequest(self.outgoing(), self.replica.settings(), absent))

    def outgoing(self) -> Vectors:
        """The vectors to push."""
        return self.replica.gradient

    def fetch_optimizer_state(self) -> None:
        self.servers.fetch_optimizer_state()
