"""DistributedSession: the session of a node that is part of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.core.group import Group
from polyrhythm.core.requests import (
    BeginEpoch,
    LeaveRun,
    LogMetrics,
    Prepared,
    ShowNote,
    StepsDone,
)
from polyrhythm.core.resolve import ResolvedStrategy, load
from polyrhythm.core.strategy import Strategy
from polyrhythm.core.worker import FetchOptimizerState, Worker
from polyrhythm.model.optimizer_runner import OptimizerRunner
from polyrhythm.model.replica import Replica
from polyrhythm.model.shard import Shard
from polyrhythm.session import batch_norm as norms
from polyrhythm.session.api import Session, plain
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.batch_norm.choose import choose
from polyrhythm.session.batch_norm.policies import Policy
from polyrhythm.session.context import ServerDone, WorldContext, session
from polyrhythm.session.result import digest, left_out, safetensors
from polyrhythm.session.seeds import mix, seed_all
from polyrhythm.session.step import StepDriver
from polyrhythm.session.strategy_check import check_strategy, planned
from polyrhythm.session.training_data import TrainingData


class DistributedSession(Session):
    """The session of a node in a run."""

    def __init__(
        self, here: WorldContext, strategy: Strategy | None = None, batch_norm: str | None = None
    ) -> None:
        super().__init__()
        self._context, self._node = here, here.node
        self.strategy: Strategy
        self.strategy, proposed = _propose(here, strategy)
        self.batch_norm = here.plan.batch_norm or batch_norm or norms.DEFAULT
        norms.check(self.batch_norm, self.strategy)
        welcome = here.join(proposed, self.batch_norm)
        if welcome.strategy.text != proposed.text:  # another node joined first, and decided
            self.strategy = load(welcome.strategy.text, welcome.strategy.classes)
        self.batch_norm = welcome.batch_norm
        self._node.mesh = here.plan.mesh
        self._norms: Policy | None = None
        self.seed = welcome.seed
        self.rank = here.me.rank
        self.workers = welcome.workers
        self._late = welcome.incarnation > 0  # replaces a worker that died
        self._data: TrainingData | None = None
        self._replica: Replica | None = None
        self._worker: Worker | None = None
        self.driver: StepDriver | None = None
        # The same seed on every node, so that all build the same model.
        seed_all(mix("model", self.seed))

    def prepare(self, *objects: Any) -> Any:
        if self._replica is not None:
            raise UsageError("session.prepare() was called twice; a run trains one model")
        given = Arguments(objects)
        if len(given.models) != 1 or len(given.optimizers) != 1:
            raise UsageError(
                f"session.prepare() takes one model and its optimizer, but got {len(given.models)} models "
                f"and {len(given.optimizers)} optimizers"
            )
        (model,), (optimizer,) = given.models, given.optimizers
        node, traits = self._node, self.strategy.traits
        _check_optimizer(self.strategy, optimizer)
        runner = OptimizerRunner(self._context.install_random_state, node.now)
        if self._context.me.role == "server":
            self._serve(model, optimizer, runner)
        if self.rank == 0 and not self._late:
            self._note_left_out(model)
        memory, sparse = node.memory, traits.sparse_gradients
        replica = self._replica = Replica(model, optimizer, memory.empty, sparse, memory.temporary, runner)
        replica.layout.check_servers(len(node.members.servers))
        self._context.request(Prepared(replica.layout.hash))
        seed_all(mix("worker", self.seed, self.rank))  # from here on each worker draws its own numbers
        data = self._data = TrainingData(
            self._context, self.strategy, replica, self._gradient_peers(), self.workers, self.seed
        )
        shared = [data.share(loader) for loader in given.loaders]
        with self._blocking():
            worker = self._worker = data.worker = self.strategy.worker(node, replica, node.everyone)
            driver = self.driver = StepDriver(self._context, worker, replica, self._gradient_peers())
            driver.attach(model, optimizer)
            if isinstance(worker, FetchOptimizerState):
                optimizer.register_state_dict_pre_hook(lambda _: self._fetch(worker))
            if node.members.servers:
                _refuse_loading(model, optimizer)
            _watch_backward()
            if self._late:  # it skips past epochs without a step, and schedulers would warn
                optimizer._opt_called = True  # type: ignore[attr-defined]
            self._norms = choose(
                self.batch_norm, node, replica, shared, lambda: replica.samples, self.seed,
                driver.sum_in_pass, self.strategy,
            )  # fmt: skip
            worker.start()
        if self._norms is not None and self._norms.waits_in_pass:
            # Its collectives run inside backward. Exchanges of buckets in between would come in another order
            # on each worker.
            driver.disable_overlap()
        driver.meter.start()
        return given.returned(dict(zip(given.loaders, shared, strict=True)))

    def epochs(self, count: int) -> Iterator[int]:
        for epoch in range(count):
            self._context.request(BeginEpoch(epoch, count))
            yield epoch

    def log(self, **metrics: Any) -> None:
        if self._late and self._replica is not None and not self._replica.steps:
            return  # this epoch was over before the replacement started
        values = {name: plain(value) for name, value in metrics.items()}
        step = self._replica.steps if self._replica else 0
        self._context.request(LogMetrics(self._node.now(), step, values))

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext() if self.driver is None else self.driver.accumulating()

    def consensus(self) -> nn.Module:
        if self._replica is None or self._worker is None:
            return super().consensus()
        with self._blocking():
            if self._norms is not None:
                self._norms.agree()
            try:
                vectors = self._worker.consensus()
            except BaseException:
                self._replica.abandon_consensus()
                raise
            return self._consensus_model(self._replica, vectors)

    def _consensus_model(self, replica: Replica, vectors: Sequence[Tensor]) -> nn.Module:
        model = replica.copy_with(vectors)
        if self._norms is not None:
            self._norms.show(model)
        return model

    def state_dict(self) -> dict[str, Any]:
        if self._replica is None or self._worker is None:
            return {}
        with self._blocking():
            state = self._worker.state_dict()
        layout = self._replica.layout.hash
        return {"strategy": str(self.strategy), "layout": layout, "workers": self.workers, "worker": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._replica is None or self._worker is None:
            raise UsageError(
                "call session.prepare(model, optimizer, loader) before session.load_state_dict()"
            )
        if state and state.get("strategy") != str(self.strategy):
            raise UsageError(
                f"this state was saved under {state.get('strategy')}, but this run uses {self.strategy}"
            )
        if state and state["layout"] != self._replica.layout.hash:
            raise UsageError("this state was saved with a different model or different parameter groups")
        if state and (saved := state["workers"]) != self.workers:
            raise UsageError(
                f"this state was saved by {saved} workers, but this run has {self.workers}: use --workers "
                f"{saved}"
            )
        # A replacement continues from the state of the others, which is newer than the saved one.
        if state and not self._late:
            with self._blocking():
                self._worker.load_state_dict(state["worker"])

    def close(self) -> None:
        """The script is done: the worker finishes, and one worker sends the result."""
        replica, worker, driver = self._replica, self._worker, self.driver
        if replica is None or worker is None or driver is None:
            raise UsageError("the script never called session.prepare(model, optimizer, loader)")
        replica.leaves_early = self._data is not None and self._data.left_early
        with torch.no_grad():
            worker.finish()
            if self._norms is not None:
                self._norms.finish()
            if self.strategy.traits.parameters_held_by_peers:
                self._context.request(StepsDone())  # until all are, others may need replies
            driver.meter.report()
            self._context.flush()
            if self._context.request(LeaveRun()).last:
                final = worker.consensus(final=True)
                if self._norms is not None:
                    self._norms.collect()
                driver.meter.report()
                self._context.flush()
                result = self._consensus_model(replica, final)
                self._note_left_out(result)
                self._context.send_result(digest(final), safetensors(result))

    def _note_left_out(self, model: nn.Module) -> None:
        note = left_out(model)
        if note is not None:
            self._context.request(ShowNote(note))

    def _fetch(self, worker: FetchOptimizerState) -> None:
        with self._blocking():
            worker.fetch_optimizer_state()

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        with torch.no_grad(), self._context.blocking():
            yield

    def run_backward(self, backward: Callable[[], None]) -> None:
        """Runs a backward pass, which may block on other workers if the BatchNorm policy does."""
        if self._norms is not None and self._norms.waits_in_pass:
            self._context.run_backward(backward)
        else:
            backward()

    def _gradient_peers(self) -> Group:
        """The workers that exchange gradients with this one: those of its site under two levels, or all."""
        return self._node.group("data") if len(self.strategy.parts) > 1 else self._node.everyone

    # --- a server -----------------------------------------------------------------------------------

    def _serve(self, model: nn.Module, optimizer: torch.optim.Optimizer, runner: OptimizerRunner) -> None:
        node = self._node
        shard = Shard(model, optimizer, self.rank, len(node.members.servers), node.memory.empty, runner)
        self._context.request(Prepared(shard.layout.hash))
        seed_all(mix("server", self.seed, self.rank))
        with torch.no_grad():
            self.strategy.server(node, shard).serve()
        node.totals(steps=shard.version, samples=0, compute_s=0.0, wait_s=0.0)
        self._context.flush()
        self._context.request(LeaveRun())
        raise ServerDone


def _propose(here: WorldContext, script: Strategy | None) -> tuple[Strategy, ResolvedStrategy]:
    """The strategy that this node proposes when it joins: that of the run, if it is known already."""
    resolved = here.strategy
    if resolved is not None:
        return load(resolved.text, resolved.classes), resolved
    strategy = planned(here.plan, script)
    return strategy, check_strategy(here.plan, strategy)


def _check_optimizer(strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Some strategies replace a part of one optimizer, and would be wrong with another."""
    wanted = strategy.traits.optimizer
    if wanted != "any" and type(optimizer) is not getattr(torch.optim, wanted):
        raise UsageError(
            f"{strategy} needs torch.optim.{wanted}, but this script uses {type(optimizer).__name__}"
        )
    if getattr(optimizer, "own_gradients", False) and not strategy.traits.steps_in_place:
        raise UsageError(
            f"{strategy} exchanges gradients, but {type(optimizer).__name__} computes its own, row by row: "
            "use hogwild, or torch.optim.SGD with backward()"
        )


def _refuse_loading(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Servers hold the parameters and the optimizer's state, so loading them on a worker has no effect."""

    def refuse(what: object, *_: object) -> None:
        if what is model or what is optimizer:
            raise UsageError("call load_state_dict() before session.prepare(): the servers start from it")

    model.register_load_state_dict_post_hook(refuse)  # type: ignore[no-untyped-call]
    optimizer.register_load_state_dict_post_hook(refuse)


_backward = torch.autograd.backward


def _watch_backward() -> None:
    """Replaces `torch.autograd.backward`, so that the session knows when a backward pass ends.

    `Tensor.backward` looks this function up at each call. A hook inside the autograd engine would not do: a
    strategy may block here, and in simulation hundreds of workers share the engine of one thread.
    """
    if torch.autograd.backward is _backward:
        torch.autograd.backward = _backward_with_session


def _backward_with_session(*args: Any, **kwargs: Any) -> None:
    mine = session.get()
    if not isinstance(mine, DistributedSession):
        return _backward(*args, **kwargs)
    driver = mine.driver
    if driver is None:
        return _backward(*args, **kwargs)
    driver.before_backward()
    try:
        mine.run_backward(lambda: _backward(*args, **kwargs))
    except BaseException:
        driver.backward_failed()
        raise
    driver.after_backward()
