"""Coordinator: the central decisions of a run, as logic without I/O.

It admits nodes, checks that all train the same model, leases batches, collects reports, tracks membership and
builds the summary. The launcher calls it with requests from sockets, the simulator calls it directly; both
pass a `respond` that is called at once or later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from polyrhythm.coordination.call_order import CallOrder
from polyrhythm.coordination.data_sharing import DataSharing
from polyrhythm.coordination.deaths import fatal
from polyrhythm.coordination.ending import Ending, Failure
from polyrhythm.coordination.finish import Finish
from polyrhythm.coordination.gathers import Gathers
from polyrhythm.coordination.handlers import (
    Respond,
    compared,
    due,
    failing,
    late,
    logged,
    noted,
    once,
    releasing,
    resuming,
)
from polyrhythm.coordination.key_values import KeyValues
from polyrhythm.coordination.last_steps import LastSteps
from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.ports import NodeLauncher, NullRecorder, Recorder
from polyrhythm.coordination.preparing import Preparing
from polyrhythm.coordination.received_result import ReceivedResult
from polyrhythm.coordination.replica_comparison import ReplicaComparison
from polyrhythm.coordination.reply_barrier import ReplyBarrier
from polyrhythm.coordination.summary import SummaryBuilder
from polyrhythm.coordination.welcome import welcome
from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import Event, NodeJoined, NodeLeft, RunFailed, Totals
from polyrhythm.core.key_value import KeyValue
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.requests import (
    BeginEpoch,
    CompareReplica,
    EnterCall,
    ExamplesDue,
    Farewell,
    FileWritten,
    Gather,
    JoinRun,
    LastStep,
    LeaveRun,
    LogMetrics,
    NodeFailed,
    OfferResult,
    OrderDrawn,
    Prepared,
    ReleaseMemory,
    Report,
    Request,
    ResumeData,
    ReturnLease,
    ScriptAt,
    ShareEpoch,
    ShowNote,
    StepsDone,
    StepsTaken,
    TakeLease,
    TrainedBy,
    Welcome,
    WhereIsData,
    WhoIsLate,
    WhoIsLost,
    WorkerNames,
)
from polyrhythm.core.resolve import ResolvedStrategy


class Coordinator:
    """One run, from the first node that joins to the summary."""

    def __init__(
        self,
        plan: Plan,
        strategy: ResolvedStrategy | None,
        launcher: NodeLauncher,
        clock: Callable[[], float],
        record: Recorder | None = None,
    ) -> None:
        self.plan = plan  # completed by the choices of the script, once they are known
        self.strategy: ResolvedStrategy | None = None
        self.clock = clock
        self.membership = Membership()
        self.ending = Ending(launcher, self.membership)
        self._finish = Finish()
        self.data = DataSharing(
            plan.workers, self.membership, self._finish.done, self._log, self._refuse, launcher.say
        )
        self.tally = SummaryBuilder(self.membership.dead)
        self.running = False
        self._prepared = False  # all nodes have built their models
        self.digest = ""  # of the final parameters
        self._no_result = False  # the workers have none to send
        self._launcher = launcher
        self._record: Recorder = record or NullRecorder()
        self.received = ReceivedResult(self._record, self.fail)
        self.ended = LastSteps(self.membership, launcher, self._refuse)
        self._gathers = Gathers(self.membership, self._finish.done, self.fail)
        self._calls = CallOrder(self.membership, launcher, self._refuse)
        self._joining: ReplyBarrier[Welcome] = ReplyBarrier()
        self._preparing = Preparing(self.membership, self.data.leases, launcher)
        self._handlers: dict[type[Request[Any]], Callable[[Peer, Any, Respond], None]] = {
            JoinRun: self._join, Prepared: self._prepare, TakeLease: self._take_lease,
            ReturnLease: self.data.return_lease, WhereIsData: self.data.position,
            OrderDrawn: self.data.order_drawn, ExamplesDue: due(self.tally, self.membership),
            ResumeData: resuming(self.membership, self._gathers.resume, self.data.resume),
            ShareEpoch: self.data.share_epoch, StepsDone: self._steps_done, LeaveRun: self._leave_run,
            LogMetrics: logged(self.tally, self.membership, self._record),
            BeginEpoch: noted(lambda begun: self.tally.begin_epoch(begun.epoch, begun.count)),
            WhoIsLate: late(self.membership, self._finish.done, self.data.cohorts, self._gathers.waiting),
            ReleaseMemory: releasing(self.membership, launcher.released), Gather: self._gathers.add,
            LastStep: self._end_script, EnterCall: self._calls.enter, FileWritten: self.ending.files.add,
            WhoIsLost: lambda peer, _, respond: respond(WorkerNames(self.membership.lost_for_good)),
            ShowNote: noted(once(launcher.say)),
            NodeFailed: failing(self.fail), ScriptAt: self.ending.add_place,
            StepsTaken: lambda peer, taken, _: self.ending.report(peer, taken.steps),
            CompareReplica: compared(ReplicaComparison(), self.membership),
            TrainedBy: noted(lambda by: self._begin(by.tool)), KeyValue: KeyValues().handle,
            OfferResult: lambda peer, offer, respond: self.ending.offer(peer, offer.source, respond),
        }  # fmt: skip
        if strategy is not None:
            self.set_strategy(strategy)

    def set_strategy(self, strategy: ResolvedStrategy) -> None:
        """Sets the strategy of the run, and starts its servers."""
        self.strategy = self.ended.strategy = strategy
        self._gathers.keep, self._calls.lockstep = strategy.traits.survives, strategy.traits.lockstep
        servers = self.plan.servers or int(strategy.traits.uses_servers)
        self.data.share_among_models(self.plan.workers, strategy.traits.model_size)
        self.plan = replace(self.plan, strategy=strategy.text, classes=strategy.classes, servers=servers)
        for note in strategy.notes:
            self._launcher.say(note)
        self._launcher.start_servers(servers)

    # --- requests of nodes --------------------------------------------------------------------------

    def handle(self, peer: Peer, request: Request[Any], respond: Respond, incarnation: int = 0) -> None:
        """Handles one request of a node."""
        if isinstance(request, Report):
            self.tally.report((peer, incarnation), request)
            self._record.lines(request.lines)
            respond(None)
        elif (peer, incarnation) in self.membership.dead:
            pass  # its process has died since or is being ended, and needs no reply
        else:
            self._handlers[type(request)](peer, request, respond)

    def _join(self, peer: Peer, request: JoinRun, respond: Respond) -> None:
        if self.ending.stopping:
            return  # a replacement that comes too late; it is ended with the run
        if self.strategy is None:
            self.set_strategy(request.strategy)
        if self.plan.batch_norm is None:
            self.plan = replace(self.plan, batch_norm=request.batch_norm)
        self.membership.join(peer, request.location, late=self._prepared)
        self._log(NodeJoined(str(peer), self.membership.incarnations[peer]))
        self._joining.add(peer, respond)
        model = self.membership.model_of(peer)
        if self.running and all(each in self._joining for each in model):
            for each in model:
                self._joining.release(each, self._welcome(each))
        elif len(self.membership.members) >= self.plan.nodes:
            self._joining.release_all(self._welcome)

    def _prepare(self, peer: Peer, request: Prepared, respond: Respond) -> None:
        if wrong := self.membership.prepare(peer, request):
            self.fail(wrong)
            return
        self.tally.totals[self.membership.current(peer)] = Totals()
        self._gathers.prepared(peer)
        self._preparing.add(peer, request, respond)
        if self._prepared:
            self._preparing.announce(peer)
        elif self.membership.prepared >= self.plan.nodes:
            self._prepared = True
            self._begin()
            self.ending.keeps = self._record.lasting
            self._preparing.release()

    def _begin(self, tool: str = "") -> None:
        """Training begins: by the strategy, or by another tool."""
        self.tally.trained_by = tool
        if not self.running:
            self.running, self.tally.began = True, self.clock()

    def _take_lease(self, peer: Peer, request: TakeLease, respond: Respond) -> None:
        self.tally.advance(self.membership.current(peer), request.steps, request.samples)
        assert self.strategy is not None
        self.data.take_lease(peer, request, self.strategy.traits.max_lease, respond)

    def _steps_done(self, peer: Peer, request: StepsDone, respond: Respond) -> None:
        if peer in self.membership.members:  # otherwise it died while the request was in flight
            self._finish.wait(peer, respond)
            self._advance()

    def _leave_run(self, peer: Peer, request: LeaveRun, respond: Respond) -> None:
        """A node is done. One worker has to send the final parameters before it leaves.

        It is the last one, because the parameters are final only then. In lockstep it is worker 0: all
        workers have the same parameters, and the buffers are then always those of the same worker.
        """
        if not request.result:
            self._no_result, self.tally.ended = True, self.clock()
            respond(Farewell(last=False))
            return self.leave(peer, "finished")
        leads = self.membership.leads(peer)
        if leads and self._peers_hold_parameters:
            self._finish.leave(peer, respond)
            return self._advance()
        lockstep = self.strategy is not None and self.strategy.traits.lockstep
        others = bool(self.membership.expected or self.membership.others(peer))
        last = leads and (peer.rank == 0 if lockstep else not others)
        respond(Farewell(last))
        if not last:
            self.leave(peer, "finished")

    def _end_script(self, peer: Peer, request: LastStep, respond: Respond) -> None:
        self.ended.end(peer, request, respond)
        self._calls.end(peer)

    def result(
        self, peer: Peer, digest: str, file: Sequence[memoryview], respond: Callable[[], object]
    ) -> None:
        """A worker has sent the final parameters, or the last of them: see `ReceivedResult.complete`."""
        self.tally.ended = self.clock()
        self.ending.saved()
        self.digest = self.received.complete(digest, file)
        respond()
        self.leave(peer, "finished")
        for other in self._finish.end():
            self.leave(other, "finished")

    # --- what happens to nodes ----------------------------------------------------------------------

    def leave(self, peer: Peer, reason: str) -> None:
        """A node has finished, or has left the run for another reason."""
        membership = self.membership
        if peer not in membership.members:
            return
        for dead in membership.leave(peer, reason):
            self._launcher.released(*dead)
        incarnation = membership.incarnations[peer]
        self._log(NodeLeft(str(peer), incarnation, reason, self.data.lose(peer, reason)))
        replaced = peer in membership.expected
        self._launcher.tell(Notice("left", peer.role, peer.rank, incarnation, reason, replaced=replaced))
        if peer.role == "worker" and membership.no_workers_left:
            self._launcher.tell(Notice("over"))
        self._gathers.lose(peer)

    def died(self, peer: Peer, reason: str, incarnation: int | None = None) -> None:
        """The process of a node has ended before the node left; it may not even have joined."""
        if peer in self.membership.gone or (peer, incarnation) in self.membership.dead:
            return
        strategy = self.strategy
        if self.failure is None:
            self.membership.count_death(peer, reason)
        if self.failure is not None:
            self.ending.lose(peer)
        elif why := fatal(peer, reason, self.running, strategy, self.tally.trained_by):
            self.fail(why)
        else:
            self._lose(peer, reason)
            self.ending.advance()
        if self.running and self.failure is not None:
            self.leave(peer, reason)  # nobody shall wait for it any longer

    def _lose(self, peer: Peer, reason: str) -> None:
        """A worker has died, which ends its model. The other models continue."""
        membership, model = self.membership, self.membership.model_of(peer)
        ended = f"ended with {peer}, which held a part of the same model"
        for each in model:
            membership.mark_dead(each)
            for waiting in (self._calls, self._joining, self._preparing):
                waiting.forget(each)
        for each in model[1:]:  # they may still run, and would report that they have lost the dead one
            membership.count_death(each, ended)
            self._launcher.end(each)
        again = self._replaced(model)
        if again:
            membership.expected.update(model)
        for each in model:
            dead, joined = membership.current(each), each in membership.members
            why = reason if each == peer else ended
            self.leave(each, why)
            if again:
                membership.expect(each)
            else:
                membership.gone[each] = why
            # Workers that hold the parameters read each other's memory.
            if not joined or not membership.hold(dead, workers_too=self._peers_hold_parameters):
                self._launcher.released(*dead)
        self._advance()
        if membership.no_workers_left and not self.digest:
            self.fail(f"{peer} {reason}, and no worker is left to send the final parameters")

    def _replaced(self, model: Sequence[Peer]) -> bool:
        """True if others will replace the workers of a model, which have died."""
        done, stopping = [self._finish.lose(each) for each in model], self.ending.stopping
        if stopping or (not any(done) and self._launcher.replace(model)):
            return not stopping
        # Servers or shared memory may still hold the parameters, and a worker has to send them.
        others = self.membership.expected or self.membership.others(model[0])
        return not (self.digest or self._peers_hold_parameters or others) and self._launcher.rescue(model)

    def stop(self) -> bool:
        """Ends the run as if the scripts had ended. False if there is nothing to keep yet."""
        stops = self.strategy is not None and self.ending.stop(self.strategy.traits.stops_together)
        self._advance()
        return stops

    def fail(self, message: str, exit_code: int = 1, waiting: Peer | None = None) -> None:
        """Ends the run with a failure; only the first one counts. `waiting`: who has waited too long."""
        if self.ending.fail(message, exit_code, waiting):
            self.tally.ended = self.clock()
            self._log(RunFailed(message))
            self.received.discard()

    def _refuse(self, message: str) -> None:
        self.fail(message, UsageError.exit_code)

    @property
    def failure(self) -> Failure | None:
        """Why the run ended before its scripts did."""
        return self.ending.failure

    @property
    def finished(self) -> bool:
        """True if the final parameters have arrived, where there are any, and all nodes have left."""
        return bool(self.digest or self._no_result) and not self.membership.members

    def log(self, node: str, event: Event) -> None:
        """Counts and records an event of a node."""
        self.tally.counts.add(event)
        self._record.event(node, self.clock(), event)

    def summary(self) -> dict[str, Any]:
        """Builds the summary of the run and records it."""
        return self._record.summary({
            **self.tally.build(self.plan, self.membership.model_size),
            **self.membership.summary(),
            "batches_undone": self.data.leases.undone,
            "samples_left_out": self.tally.left_out(self.membership.dead),
            "digest": self.digest,
            **self.ending.summary(),
        })  # fmt: skip

    # --- inside -------------------------------------------------------------------------------------

    @property
    def _peers_hold_parameters(self) -> bool:
        """True if workers hold the parameters, so that they stay until the result has arrived."""
        return self.strategy is not None and self.strategy.traits.parameters_held_by_peers

    def _advance(self) -> None:
        """Replies to workers that wait for others, if the others are done or gone."""
        self._gathers.advance()
        self.data.begin()
        if not self.membership.expected:
            self._finish.advance(self.membership.workers, self.membership.leaders)

    def _welcome(self, peer: Peer) -> Welcome:
        assert self.strategy is not None
        return welcome(self.plan, self.strategy, self.membership, peer, self.data.cohorts.number)

    def _log(self, event: Event) -> None:
        self._record.event("coordinator", self.clock(), event)
