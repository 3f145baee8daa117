"""Simulated: starts the nodes as greenlets and runs them to the end."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from greenlet import GreenletExit

from polyrhythm.coordination.coordinator import Coordinator
from polyrhythm.core.compile_note import compile_note
from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.parallel.captures import Captures, captures
from polyrhythm.session.context import ServerDone, world_context
from polyrhythm.session.script import explained, run_script, salvage
from polyrhythm.session.seeds import start_script
from polyrhythm.worlds.simulated.context import SimulatedContext
from polyrhythm.worlds.simulated.fibers import Fiber, Loop
from polyrhythm.worlds.simulated.foreign_threads import ForeignThreads
from polyrhythm.worlds.simulated.group import OpenCollectives
from polyrhythm.worlds.simulated.modules import OwnModules
from polyrhythm.worlds.simulated.network import Network
from polyrhythm.worlds.simulated.node import MembershipChange, SimulatedNode
from polyrhythm.worlds.simulated.random_states import GlobalGenerators

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.coordination.ports import Recorder
    from polyrhythm.core.plan import Plan
    from polyrhythm.core.resolve import ResolvedStrategy
    from polyrhythm.worlds.cluster import Cluster, Crash
    from polyrhythm.worlds.cost_model import CostModel


class Simulated:
    """A simulated run. `run` trains to the end and returns the coordinator, which knows the outcome."""

    def __init__(
        self,
        program: Callable[[], None],
        plan: Plan,
        cluster: Cluster,
        strategy: ResolvedStrategy | None = None,
        record: Recorder | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
        own: Sequence[Path] = (),
    ) -> None:
        self.program, self.plan, self.cluster = program, plan, cluster
        self.ring = plan.collective == "ring"
        self._comes_back = False
        self.foreign_threads = ForeignThreads()
        self.loop = Loop()
        compile_note.begin_run(says=True)
        self.nodes: dict[Peer, SimulatedNode] = {}
        self.present: dict[str, list[Peer]] = {"worker": [], "server": []}
        self.collectives = OpenCollectives(self)
        self.memory: dict[str, Tensor] = {}  # shared by all workers, by name
        self.locks: dict[
            str, list[SimulatedNode]
        ] = {}  # by name: the holder, then the nodes that wait for it
        self.costs = self._place(plan.servers or 0)
        self.network = Network(self.loop, self.costs)
        self._fibers: list[Fiber] = []
        self.say = say
        self.generators = GlobalGenerators()
        self.captures = Captures()
        self._own = own  # where the modules are that every node has a copy of
        self.modules: OwnModules | None = None
        self.coordinator: Coordinator = Coordinator(plan, strategy, self, lambda: self.loop.now, record)
        for rank in range(plan.workers):
            self._start(Peer("worker", rank))
        for crash in cluster.failures:
            for rank in crash.workers:
                if rank < plan.workers:
                    self.loop.at(crash.at, self._crash, (Peer("worker", rank), crash))

    def run(self) -> Coordinator:
        grad = torch.is_grad_enabled()
        self.modules = OwnModules(self._own) if self._own else None
        try:
            here = self.coordinator
            ending, membership = here.ending, here.membership

            def is_over() -> bool:
                # The run may be finished before the last failure of the cluster file. Called before each
                # event, so what is nearly always true is looked at first.
                return (ending.failure is not None and ending.over) or (
                    not membership.members and here.finished
                )

            with self.foreign_threads.guarded():
                self.loop.run(is_over)
            if (refused := self.foreign_threads.error) is not None:
                here.fail(str(refused), refused.exit_code)
            if here.failure is None and not here.finished:
                waiting = "; ".join(str(fiber) for fiber in self._fibers if not fiber.dead)
                here.fail(
                    here.ended.waited_for(self.present["worker"])
                    or f"deadlock at {self.loop.now:.6g} s: {waiting or 'nobody is left'}"
                )
                self.loop.run(is_over)
        finally:
            for fiber in self._fibers:
                fiber.kill()
            self.generators.restore()
            if self.modules is not None:
                self.modules.restore()
            torch.set_grad_enabled(grad)
        return self.coordinator

    # --- for the coordinator ------------------------------------------------------------------------

    def start_servers(self, count: int) -> None:
        """Starts the servers, once their number is known."""
        self.network.costs = self.costs = self._place(count)
        for rank in range(count):
            self._start(Peer("server", rank))

    def tell(self, notice: Notice) -> None:
        """Notifies every member except the one that the notice is about."""
        if notice.kind in ("stop", "abandon"):
            return self._stop(notice)
        peer = notice.peer
        for other in self.coordinator.membership.members:
            check = self.nodes[other].on_notice.get(notice.kind)
            if other != peer and check is not None and (wrong := check(notice)):
                self.coordinator.fail(wrong, UsageError.exit_code)
        if notice.kind in ("done", "waits"):
            return
        if peer is not None:
            others = [each for each in self.present[peer.role] if each != peer]
            self.present[peer.role] = sorted([*others, peer]) if notice.kind == "joined" else others
        change = MembershipChange(notice, self.present["worker"])
        for other in self.coordinator.membership.members:
            if other != peer:
                self.nodes[other].notice(change)

    def _stop(self, notice: Notice) -> None:
        """Tells the workers that the run ends early. May be called by a signal handler: it never waits."""
        for peer in list(self.coordinator.membership.workers):
            steps = self.nodes[peer].stopping.handle(notice)
            if steps is not None:
                self.coordinator.ending.report(peer, steps)
        if notice.kind == "abandon":
            self.collectives.lose(abandon=True)

    def end(self, peer: Peer) -> None:
        """Ends a worker, because another one that held the same model has crashed."""
        self.nodes[peer].crash()

    def replace(self, model: Sequence[Peer]) -> bool:
        """True if the model that has just crashed comes back, according to the cluster file."""
        return self._comes_back

    def rescue(self, model: Sequence[Peer]) -> bool:
        """False: a simulated last worker is never replaced."""
        return False

    def released(self, peer: Peer, incarnation: int) -> None:
        """Nothing to do: simulated nodes lend no memory."""

    # --- nodes --------------------------------------------------------------------------------------

    def _place(self, servers: int) -> CostModel:
        return self.cluster.cost_model(self.plan.workers, servers, self.plan.seed, self.plan.colocated)

    def _crash(self, which: tuple[Peer, Crash]) -> None:
        """Stops a worker as if its process were killed, unless it has left already."""
        peer, crash = which
        if peer not in self.coordinator.membership.members:
            return
        self._comes_back, model = crash.back is not None, self.coordinator.membership.model_of(peer)
        self.coordinator.died(peer, f"crashed at {crash.at:.6g} s")
        if not self.coordinator.ending.over:
            self.nodes[peer].crash()
            self.collectives.lose()
            if crash.back is not None and peer in self.coordinator.membership.expected:  # it had work left
                for each in model:
                    self.loop.at(crash.back, self._come_back, each)

    def _come_back(self, peer: Peer) -> None:
        incarnation = self.coordinator.membership.incarnations[peer]
        if self.nodes[peer].incarnation < incarnation:  # it has not come back after an earlier crash
            self._start(peer, incarnation)

    def _start(self, me: Peer, incarnation: int = 0) -> None:
        node = self.nodes[me] = SimulatedNode(self, me, incarnation)
        if not incarnation:  # a replacement becomes present when it joins
            self.present[me.role].append(me)
        fiber = Fiber(self.loop, node, lambda: self._live(node, fiber))
        self._fibers.append(fiber)
        self.loop.at(self.loop.now, fiber.start, None)

    def _live(self, node: SimulatedNode, fiber: Fiber) -> None:
        """Runs the user's script as this node."""
        node.fiber = fiber
        node.install_random_state()
        world_context.set(SimulatedContext(node))
        captures.set(self.captures)
        start_script(self.plan.seed)
        try:
            run_script(self.program, node.stopping)
        except (ServerDone, GreenletExit):
            pass
        except Exception as error:
            if not node.crashed:  # a killed process reports no error
                self.failed(node.me, error)
                salvage(error)

    def failed(self, peer: Peer, error: Exception) -> None:
        """Ends the run because of an error on a node."""
        if isinstance(error, PolyrhythmError):
            self.coordinator.fail(explained(error), error.exit_code)
            return
        traceback.print_exception(error)
        self.coordinator.fail(f"{peer} failed: {type(error).__name__}: {error}")
