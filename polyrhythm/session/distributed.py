"""DistributedSession: the session of a node that is part of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyrhythm.core.errors import UsageError
from polyrhythm.core.group import Group
from polyrhythm.core.lease import Lease
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import (
    BeginEpoch,
    ExamplesDue,
    LeaveRun,
    LogMetrics,
    Prepared,
    ReturnLease,
    ShareEpoch,
    StepsDone,
    TakeLease,
)
from polyrhythm.core.resolve import ResolvedStrategy, load
from polyrhythm.core.strategy import Strategy
from polyrhythm.core.worker import FetchOptimizerState, OnMembership, Worker
from polyrhythm.model.replica import Replica
from polyrhythm.model.shard import Shard
from polyrhythm.session import batch_norm as norms
from polyrhythm.session.api import Session, plain
from polyrhythm.session.batch_norm.choose import choose
from polyrhythm.session.batch_norm.policies import Policy
from polyrhythm.session.context import ServerDone, WorldContext, session
from polyrhythm.session.data import SharedLoader, mix, seed_all
from polyrhythm.session.result import digest, safetensors
from polyrhythm.session.settle import planned, settle
from polyrhythm.session.step import StepDriver


class DistributedSession(Session):
    """A session that is part of a run."""

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
        if welcome.strategy.text != proposed.text:  # another node was the first
            self.strategy = load(welcome.strategy.text, welcome.strategy.classes)
        self.batch_norm = welcome.batch_norm
        self._node.sites = [[Peer("worker", rank) for rank in site] for site in welcome.sites]
        self._norms: Policy | None = None
        self.seed = welcome.seed
        self.rank = here.me.rank
        self.workers = welcome.workers
        self._cohort = list(range(self.workers))  # the workers that share the data, where they step together
        self._cohort_number = 0  # how many cohorts there were before this one
        self._late = welcome.incarnation > 0  # it takes the place of one that died
        self._loaders: list[SharedLoader] = []
        self._replica: Replica | None = None
        self._worker: Worker | None = None
        self.driver: StepDriver | None = None
        self._due = 0  # examples that only this worker gets, and has not got yet
        # The same on every node, so that all build the same model.
        seed_all(mix("model", self.seed))

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, *loaders: DataLoader[Any]) -> Any:
        if self._replica is not None:
            raise UsageError("session.prepare() was called twice; a run trains one model")
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "session.prepare() takes a model, its optimizer and the training loader, in this order"
            )
        node, traits = self._node, self.strategy.traits
        _check_optimizer(self.strategy, optimizer)
        if self._context.me.role == "server":
            self._serve(model, optimizer)
        memory, sparse = node.memory, traits.sparse_gradients
        replica = self._replica = Replica(model, optimizer, memory.empty, sparse, memory.temporary)
        replica.clock = node.now
        replica.layout.check_servers(len(node.members.servers))
        self._context.request(Prepared(replica.layout.hash))
        seed_all(mix("worker", self.seed, self.rank))  # from here on each draws its own
        shared = self._loaders = [self._share(loader, number) for number, loader in enumerate(loaders)]
        with self._away():
            worker = self._worker = self.strategy.worker(node, replica, node.group())
            driver = self.driver = StepDriver(self._context, worker, replica, self._gradient_peers())
            driver.attach(model, optimizer)
            if isinstance(worker, FetchOptimizerState):
                fetch = worker.fetch_optimizer_state
                optimizer.register_state_dict_pre_hook(lambda _: fetch())
            if node.members.servers:
                _refuse_loading(model, optimizer)
            _watch_backward()
            if self._late:  # it runs through past epochs without a step, and schedulers would complain
                optimizer._opt_called = True  # type: ignore[attr-defined]
            self._norms = choose(
                self.batch_norm, node, replica, shared, lambda: replica.samples, self.seed, driver.sum_within,
                self.strategy,
            )  # fmt: skip
            worker.start()
        if self._norms is not None and self._norms.waits:
            # Its collectives are inside backward: whose gradients come when would change their order.
            driver.wait_for_the_end()
        driver.meter.start()
        return (model, optimizer, *shared)

    def epochs(self, count: int) -> Iterator[int]:
        for epoch in range(count):
            self._context.request(BeginEpoch(epoch, count))
            yield epoch

    def log(self, **metrics: Any) -> None:
        if self._late and self._replica is not None and not self._replica.steps:
            return  # it runs through epochs that are over, and knows nothing of them
        told = {name: plain(value) for name, value in metrics.items()}
        step = self._replica.steps if self._replica else 0
        self._context.request(LogMetrics(self._node.now(), step, told))

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext() if self.driver is None else self.driver.accumulating()

    def consensus(self) -> nn.Module:
        if self._replica is None or self._worker is None:
            return super().consensus()
        with self._away():
            if self._norms is not None:
                self._norms.agree()
            return self._shown(self._replica, self._worker.consensus())

    def _shown(self, replica: Replica, vectors: Sequence[Tensor]) -> nn.Module:
        shown = replica.shown(vectors)
        if self._norms is not None:
            self._norms.show(shown)
        return shown

    def state_dict(self) -> dict[str, Any]:
        if self._replica is None or self._worker is None:
            return {}
        with self._away():
            state = self._worker.state_dict()
        return {"strategy": str(self.strategy), "layout": self._replica.layout.hash, "worker": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._replica is None or self._worker is None:
            raise UsageError(
                "session.load_state_dict() comes after session.prepare(model, optimizer, loader)"
            )
        if state and state.get("strategy") != str(self.strategy):
            raise UsageError(
                f"this state was saved under {state.get('strategy')}, and this run is {self.strategy}"
            )
        if state and state["layout"] != self._replica.layout.hash:
            raise UsageError("this state was saved with another model, or with other parameter groups")
        # A replacement continues with what the others have: they have gone further than its predecessor.
        if state and not self._late:
            with self._away():
                self._worker.load_state_dict(state["worker"])

    def close(self) -> None:
        """The script is done: the worker finishes, and one worker brings the result home."""
        replica, worker, driver = self._replica, self._worker, self.driver
        if replica is None or worker is None or driver is None:
            raise UsageError("the script never called session.prepare(model, optimizer, loader)")
        replica.leaves_early = any(loader.left_early for loader in self._loaders)
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
                self._context.bring(digest(final), safetensors(self._shown(replica, final)))

    @contextmanager
    def _away(self) -> Iterator[None]:
        with torch.no_grad(), self._context.away():
            yield

    def passes(self, backward: Callable[[], None]) -> None:
        """Runs a backward pass. One in which workers wait for each other needs care."""
        if self._norms is not None and self._norms.waits:
            self._context.passes(backward)
        else:
            backward()

    # --- sharing out the data -----------------------------------------------------------------------

    def _site(self) -> Sequence[Peer]:
        """The workers of this one's site, if the strategy has two levels."""
        if len(self.strategy.parts) == 1:
            return ()
        return next(site for site in self._node.sites if self._node.me in site)

    def _gradient_peers(self) -> Group:
        """The workers that exchange gradients with this one: those of its site, or all."""
        everyone, site = self._node.group(), self._site()
        return everyone.split(site) if site else everyone

    def _weighted_with(self) -> list[int]:
        """The workers whose examples a gradient is weighed against; the strategy weighs the rest."""
        if self.strategy.parts[0].traits.weighted_by_examples:
            return [self.rank]
        return [peer.rank for peer in self._site()]

    def _share(self, loader: DataLoader[Any], number: int) -> SharedLoader:
        def take(epoch: int, batches: int, unseen: int) -> Lease | None:
            assert self._replica is not None
            steps, samples = self._replica.steps, self._replica.samples
            request = TakeLease(number, epoch, batches, unseen, steps=steps, samples=samples)
            return self._context.request(request).lease

        def give_back(unseen: int) -> None:
            self._context.request(ReturnLease(number, unseen))

        def deal(epoch: int) -> tuple[int, int, int] | None:
            share = self._context.request(ShareEpoch(number, epoch)).share
            if share is None:
                return None
            self._join_cohort(share.ranks, share.number)
            return self._cohort.index(self.rank), len(self._cohort), share.epoch

        def due(examples: int) -> None:
            assert self._replica is not None
            self._due += examples
            self._context.request(ExamplesDue(self._replica.samples + self._due))

        traits = self.strategy.traits
        return SharedLoader(
            loader,
            rank=self.rank,
            workers=self.workers,
            seed=self.seed,
            leases=None if traits.lockstep else (take, give_back),
            counted=self._counted,
            deal=deal if traits.lockstep and traits.survives else None,
            due=due,
            processes=self._context.processes,
            peers=self._weighted_with() if traits.weighted_by_examples else None,
        )

    def _join_cohort(self, ranks: list[int], number: int) -> None:
        """From here on these workers share the data; in lockstep they are the ones to keep in step with."""
        if number == self._cohort_number:
            return
        self._cohort, self._cohort_number = ranks, number
        if isinstance(self._worker, OnMembership):
            with self._away():
                self._worker.on_membership(ranks, number)

    def _counted(self, samples: int, scale: float) -> None:
        assert self._replica is not None
        self._replica.gradients.scale(scale)
        self._replica.samples += samples
        self._due -= samples

    # --- a server -----------------------------------------------------------------------------------

    def _serve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        node = self._node
        shard = Shard(model, optimizer, self.rank, len(node.members.servers), node.memory.empty)
        self._context.request(Prepared(shard.layout.hash))
        with torch.no_grad():
            self.strategy.server(node, shard).serve()
        node.totals(steps=shard.version, samples=0, compute_s=0.0, wait_s=0.0)
        self._context.flush()
        self._context.request(LeaveRun())
        raise ServerDone


def _propose(here: WorldContext, script: Strategy | None) -> tuple[Strategy, ResolvedStrategy]:
    """The strategy that this node proposes when it joins: the run's, if that is settled."""
    settled = here.strategy
    if settled is not None:
        return load(settled.text, settled.classes), settled
    strategy = planned(here.plan, script)
    return strategy, settle(here.plan, strategy)


def _check_optimizer(strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Some strategies are about what one optimizer does, and would be wrong with another."""
    wanted = strategy.traits.optimizer
    if wanted != "any" and type(optimizer) is not getattr(torch.optim, wanted):
        raise UsageError(
            f"{strategy} needs torch.optim.{wanted}, and this script has {type(optimizer).__name__}"
        )
    if getattr(optimizer, "own_gradients", False) and not strategy.traits.steps_in_place:
        raise UsageError(
            f"{strategy} works on gradients, and {type(optimizer).__name__} makes its own, row by row: use "
            "hogwild, or torch.optim.SGD with backward()"
        )


def _refuse_loading(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Where servers hold the parameters and the optimizer's state, what is loaded into a worker is lost."""

    def refuse(what: object, *_: object) -> None:
        if what is model or what is optimizer:
            raise UsageError("load_state_dict() comes before session.prepare(): the servers start from it")

    model.register_load_state_dict_post_hook(refuse)  # type: ignore[no-untyped-call]
    optimizer.register_load_state_dict_post_hook(refuse)


_backward = torch.autograd.backward


def _watch_backward() -> None:
    """Lets a session know when a backward pass has ended.

    `Tensor.backward` looks this function up at each call. A hook inside the engine would not do: a strategy
    may block here, and the engine must not be held while others use it (in simulation, hundreds of workers
    take turns on one thread).
    """
    if torch.autograd.backward is _backward:
        torch.autograd.backward = _backward_and_tell


def _backward_and_tell(*args: Any, **kwargs: Any) -> None:
    mine = session.get()
    if not isinstance(mine, DistributedSession):
        return _backward(*args, **kwargs)
    driver = mine.driver
    if driver is None:
        return _backward(*args, **kwargs)
    driver.before_backward()
    try:
        mine.passes(lambda: _backward(*args, **kwargs))
    except BaseException:
        driver.failed_backward()
        raise
    driver.after_backward()
