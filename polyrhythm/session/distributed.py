"""DistributedSession: the session of a node that is part of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from polyrhythm.core.errors import UsageError
from polyrhythm.core.group import Group
from polyrhythm.core.requests import (
    BeginEpoch,
    FileWritten,
    LogMetrics,
    ShowNote,
    WhoIsLost,
)
from polyrhythm.core.resolve import load
from polyrhythm.core.strategy import Strategy
from polyrhythm.core.worker import Worker
from polyrhythm.model.consensus import joined, one_or_all
from polyrhythm.model.optimizer_runner import OptimizerRunner
from polyrhythm.model.replica import Replica
from polyrhythm.session import batch_norm as norms
from polyrhythm.session.agreement import agree
from polyrhythm.session.api import Session, check_reduce, plain
from polyrhythm.session.arguments import Arguments, Evaluated
from polyrhythm.session.backward import BackwardPasses
from polyrhythm.session.balance import planned_balance
from polyrhythm.session.batch_norm.borrowed import protect_statistics
from polyrhythm.session.batch_norm.choose import choose
from polyrhythm.session.batch_norm.policies import Policy
from polyrhythm.session.closing import Closing
from polyrhythm.session.context import WorldContext, session
from polyrhythm.session.data import SharedLoader
from polyrhythm.session.exchange import Exchange, inode_of
from polyrhythm.session.external import ExternalTraining
from polyrhythm.session.grad_scaler import check_scaler
from polyrhythm.session.loading import check_model, check_saved
from polyrhythm.session.model_context import model_context
from polyrhythm.session.optimizer_hooks import watch_optimizer
from polyrhythm.session.part import Parts, check_optimizers
from polyrhythm.session.placement import placement
from polyrhythm.session.places import Call, script_call
from polyrhythm.session.prediction.call import RunTogether
from polyrhythm.session.prediction.models import Predictor
from polyrhythm.session.prediction.rounds import Together
from polyrhythm.session.replica_check import replica_check
from polyrhythm.session.result import left_out
from polyrhythm.session.salvage import salvage_beside
from polyrhythm.session.script_calls import ScriptCalls
from polyrhythm.session.serving import serve_run
from polyrhythm.session.start_notes import start_notes
from polyrhythm.session.strategy_check import proposed
from polyrhythm.session.survivors import Survivors
from polyrhythm.session.training_data import TrainingData
from polyrhythm.session.write_check import write_check


def join_run(here: WorldContext, *asked: Any) -> DistributedSession:
    """Joins the run; returns the session of this node. `asked`: the script's strategy and BatchNorm policy.

    A later call returns the session of the first one: a second one would have exchanges of its own, which
    nobody answers.
    """
    before = session.get()
    if not isinstance(before, DistributedSession) or before._context is not here:
        if here.plan.predicts_with is None:
            return DistributedSession(here, *asked)
        from polyrhythm.session.prediction.session import PredictingSession  # imports this module

        return PredictingSession(here, *asked)
    for first, later in zip(before.asked, asked, strict=True):
        if later is not None and later != first:
            raise UsageError(
                f"pr.init() was called with {later}, and before with {first}: a run has one of them; start "
                "another run for the other"
            )
    return before


class DistributedSession(Session):
    """The session of a node in a run."""

    def __init__(
        self, here: WorldContext, strategy: Strategy | None = None, batch_norm: str | None = None
    ) -> None:
        super().__init__()
        self.asked = strategy, batch_norm  # for, by the script
        self.strategy: Strategy
        self.strategy, mine = proposed(here, strategy)
        self._batch_norm_chosen = (here.plan.batch_norm or batch_norm) is not None
        self.batch_norm = here.plan.batch_norm or batch_norm or norms.DEFAULT
        norms.check(self.batch_norm, self.strategy)
        welcome = here.join(mine, self.batch_norm)
        if welcome.strategy.text != mine.text:  # another node joined first, and decided
            self.strategy = load(welcome.strategy.text, welcome.strategy.classes)
        self.batch_norm = welcome.batch_norm
        here.node.mesh = here.plan.mesh
        self._context = here = model_context(here, self.strategy)
        self._node = here.node
        self._norms: Policy | None = None
        self.seed = welcome.seed  # `prepare` may replace it by that of the script
        self.rank, self.workers = here.me.rank, here.plan.workers
        self.worker = here.worker.rank
        self._exchange, self._calls = Exchange(here, self.workers), ScriptCalls(here)
        self._placement = placement(here, self.strategy, self.batch_norm, self._exchange)
        self._late = welcome.incarnation > 0  # replaces a worker that died
        self._survivors = Survivors(here, self.workers)
        self._data: TrainingData | None = None
        self._parts: Parts | None = None
        self._closing: Closing | None = None
        self._predictions = RunTogether(here, self.workers, lambda: self._exchange.last)
        self.stopping = self._node.stopping
        self.stopping.on_abandoned = salvage_beside(
            self.stopping, lambda: self.salvage(untouched=False), self._calls.say_where
        )
        self.before_close: list[Callable[[], None]] = []  # called when the script is done

    def prepare(
        self,
        *objects: Any,
        evaluate: Evaluated = (),
        example: Any = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> Any:
        given = Arguments(objects, evaluate, again=self._data is not None, example=example, loss=loss)
        shared = self._begin(given) if self._data is None else self._share(self._data, given.loaders)
        assert self._data is not None
        replaced = dict(zip(given.loaders, shared, strict=True))
        return given.returned(replaced | self._data.share_evaluation(given.evaluated))

    def train_by(self, tool: str) -> None:
        """The script trains by another tool than `prepare`, unless it calls that, too."""
        if self._parts is None:
            self.external = ExternalTraining(self._context, self.strategy, tool)

    def _begin(self, given: Arguments) -> list[SharedLoader]:
        """Starts the workers of the strategy, one for each optimizer; returns the shared loaders."""
        given.check()
        node, optimizers, model = self._node, given.optimizers, joined(given.models)
        check_optimizers(self.strategy, optimizers)
        runner = OptimizerRunner(self._context.install_random_state, node.now)
        self._placement.plan(given)
        if self._context.me.role == "server":
            serve_run(self._context, self.strategy, given, self._placement, runner, self.seed)
        if self.rank == 0 and not self._late:
            self._note(left_out(model))
            notes = start_notes(self.strategy, model, optimizers, self._batch_norm_chosen)
            for note in notes if self.workers > 1 else ():
                self._note(note)
        self._placement.begin(self.seed)
        parts = self._parts = Parts(self.strategy, node, model, optimizers, runner)
        self._given = given
        with self._calls.entered(script_call("session.prepare()", anywhere=True)):
            self.seed = agree(self._context, [each.layout for each in parts.replicas], given, self.seed)
        self._calls.exchanges = lambda: parts.exchanges
        peers = self._gradient_peers()
        data = self._data = TrainingData(self._context, self.strategy, parts, peers, self.workers, self.seed)
        self._counting = data.counting
        data.balance = planned_balance(self._context, parts, self.workers, self._gather)
        shared = [data.share(loader) for loader in given.loaders]
        with self._blocking():
            parts.attach(self._context, given.models, peers)
            for part in parts:
                watch_optimizer(part, self._late, self._blocking)
                data.watch(part)
                part.driver.check_exchange = self._calls.check
            data.watch_models()
            replica, driver = parts.first.replica, parts.first.driver
            self._norms = choose(
                self.batch_norm, node, replica, shared, lambda: replica.samples, self.seed,
                driver.sum_in_pass, self.strategy,
            )  # fmt: skip
            for number, part in enumerate(parts):
                part.worker.start()
                part.driver.writes = write_check(part.worker, part.replica)
                part.driver.check = replica_check(
                    self._context, part.worker, part.replica, number, lambda: data.batches
                )
        self._scheduled = self._placement.scheduled(parts.first)
        waits = self._placement.measured_by(driver.meter)
        waits |= self._norms is not None and self._norms.waits_in_pass
        if waits:
            # Its collectives run inside backward. Exchanges of buckets in between would come in another order
            # on each worker.
            driver.disable_overlap()
        self._closing = Closing(self._context, self.strategy, parts, self._placement, given, self._norms)
        self.backward_passes = BackwardPasses(self._context, [part.driver for part in parts], waits)
        for scheduler in given.schedulers if self.workers > 1 else ():
            data.schedules.prepare(scheduler, self._gather)
        driver.meter.start()
        return shared

    def _share(self, data: TrainingData, loaders: Sequence[DataLoader[Any]]) -> list[SharedLoader]:
        """Shares loaders that were prepared after the models."""
        protected = any(loader.borrows for loader in data.loaders)
        shared = [data.share(loader) for loader in loaders]
        if not protected and any(loader.borrows for loader in shared) and self.batch_norm != "sync":
            assert self._replica is not None
            protect_statistics(self._replica)
        return shared

    @property
    def _replica(self) -> Replica | None:
        return None if self._parts is None else self._parts.first.replica

    @property
    def _steps(self) -> int:
        """The steps that this worker has taken."""
        if self._parts is not None:
            return self._parts.steps
        return 0 if self.external is None else self.external.steps

    @property
    def _worker(self) -> Worker | None:
        return None if self._parts is None else self._parts.first.worker

    def _begin_epoch(self, epoch: int, count: int) -> None:
        self._context.request(BeginEpoch(epoch, count))

    @property
    def is_main(self) -> bool:
        return self.rank == 0 and self._context.me.role == "worker" and self._placement.leads

    @property
    def _speaks(self) -> bool:
        return self._survivors.first and self._placement.leads

    def scheduler_steps(self, scheduler: LRScheduler) -> None:
        if self._data is not None and self.workers > 1 and self._trains(scheduler.optimizer):
            self._data.schedules.on_step(scheduler)

    def past_end(self, scheduler: LRScheduler) -> str:
        return self._data.schedules.past_end(scheduler) if self._data is not None and self.workers > 1 else ""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        if self._data is not None and not self._trains(optimizer):
            self._data.check_other(optimizer)
        elif self._data is None and self.external is not None:
            self.external.on_step()

    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None:
        if self._trains(optimizer):
            check_scaler(self.strategy)

    def whole_norm(self, norm: Tensor, gradients: Sequence[Tensor], kind: float) -> Tensor:
        with self._blocking():
            return self._placement.norm(norm, gradients, kind)

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(part.optimizer is optimizer for part in self._parts or ())

    def file_written(self, path: str | os.PathLike[str], once: bool = False) -> None:
        if self._context.me.role == "worker":
            written = FileWritten(os.path.abspath(path), self._steps, inode_of(path), once)
            self._context.request(written)

    def _gather(self, value: Any, call: Call) -> list[Any]:
        parts = self._parts
        with self._calls.entered(call), parts.first.driver.meter.exchange() if parts else nullcontext():
            with self._blocking():
                parts.on_meeting() if parts else None
            return self._exchange.gather(value, call, self._data.epochs if self._data else 0, self._steps)

    def log(self, *, reduce: Any = "mean", **metrics: Any) -> None:
        check_reduce(reduce)
        if self._context.me.role == "server":
            return  # its script runs to prepare() only
        step, samples = self._steps, self._parts.samples if self._parts else 0
        if self._late and self._parts is not None and not step:
            return  # this epoch was over before the replacement started
        values = {name: plain(value) for name, value in metrics.items()}
        self._context.request(LogMetrics(self._node.now(), step, values, reduce, samples))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        with ExitStack() as all_parts:
            for part in self._parts or ():
                all_parts.enter_context(part.driver.accumulating())
            yield

    def consensus(self) -> Any:
        return super().consensus() if self._closing is None else one_or_all(self._agreed(whole=True))

    def _agreed(self, whole: bool) -> list[nn.Module]:
        """Copies of the models that the workers agree on; not `whole`: of divided ones, a worker's part."""
        assert self._parts is not None and self._closing is not None
        self._placement.flush()
        buffers = self._norms is not None
        together = self.workers > 1 and self._parts.exchange_in_consensus(buffers)
        waits = self._calls.entered(script_call("session.consensus()")) if together else nullcontext()
        with waits, self._blocking():
            return self._closing.agreed(self.workers > 1, whole)

    def _together(self) -> Together:
        call = script_call("session.predict()")
        return self._predictions.begin(lambda value: self._gather(value, call))

    def _predictor(self) -> Predictor:
        self._one_model()
        return self._placement.predictor(self._context, self._agreed(whole=False)[0])

    def state_dict(self) -> dict[str, Any]:
        parts = self._parts
        if parts is None:
            return {}
        self._placement.flush()
        # The position first: where batches are leased, workers wait for each other in what follows.
        data = self._data.state_dict() if self._data is not None else {}
        with self._blocking():
            parts.reattach()
            states = parts.state_dict()
        return {
            "strategy": str(self.strategy),
            "layout": parts.layout,
            "workers": self.workers,
            "lost": self._context.request(WhoIsLost()).workers if self.strategy.traits.survives else [],
            "data": data,
            "placement": self._placement.state_dict(),
            **states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = self._parts
        if parts is None:
            raise UsageError("call session.prepare(...) before session.load_state_dict()")
        if not state:
            return
        check_saved(state, self.strategy)
        self._placement.load_state_dict(state.get("placement", {}))
        check_model(state, parts.layout, self.workers)
        assert self._data is not None
        if self._late:  # it continues from the state of the others, which is newer
            self._data.load_position(state.get("data"))
        else:
            with self._blocking():
                self._data.load_state_dict(state.get("data"))
                parts.load_state_dict(state)
            self._data.restore_random(state.get("data"))

    def close(self) -> None:
        """The script is done: the worker finishes, and one worker sends the result."""
        parts = self._parts
        if parts is None and self.external is None:
            raise UsageError("the script never called session.prepare(model, optimizer, loader)")
        for each in self.before_close:
            each()
        if parts is None:
            assert self.external is not None
            return self.external.close()
        if self._scheduled is not None:
            self._scheduled.close()
        parts.reattach()
        self._note(parts.last_change() if self.rank == 0 else "")
        self._note(parts.own.note if self.workers > 1 else "")
        assert self._closing is not None
        self._closing.close(left_early=self._data is not None and self._data.left_early)

    def salvage(self, untouched: bool) -> None:
        """The run has failed: sends the parameters that this worker has, or can get from servers.

        `untouched`: the exchange that failed has changed none of them.
        """
        if self._closing is not None:
            self._closing.salvage(untouched)

    def _note(self, text: str | None) -> None:
        """Tells the person something, if there is something to tell."""
        if text:
            self._context.request(ShowNote(text))

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        with torch.no_grad(), self._context.blocking():
            yield

    def _gradient_peers(self) -> Group:
        """The workers that exchange gradients with this one: those of its site under two levels, or all."""
        return self._node.group("data") if len(self.strategy.parts) > 1 else self._node.everyone
