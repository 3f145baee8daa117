"""TrainingData: how the training loaders of one worker get their share of the batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from polyrhythm.core.errors import UsageError
from polyrhythm.core.group import Group
from polyrhythm.core.last_step import ended_early
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import (
    ExamplesDue,
    OrderDrawn,
    ResumeData,
    ShareEpoch,
    ShowNote,
)
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.hooks import Hook
from polyrhythm.session.balance import WHOLE, Balance
from polyrhythm.session.context import WorldContext, on_iterate
from polyrhythm.session.counting import Counting
from polyrhythm.session.data import SharedLoader, Training
from polyrhythm.session.evaluation import EvaluationLoader
from polyrhythm.session.given import GivenBatch, GivenBatches
from polyrhythm.session.lease_requests import LeaseRequests
from polyrhythm.session.loading import NO_POSITION
from polyrhythm.session.pairs import Pairs
from polyrhythm.session.part import Parts, TrainingPart
from polyrhythm.session.random_states import restore_states, saved_states
from polyrhythm.session.schedules import Schedules
from polyrhythm.session.seeds import Separation, equally_seeded, mix
from polyrhythm.session.sharing import (
    CohortPlace,
    CohortSharing,
    LeasedSharing,
    LockstepSharing,
    Position,
    Sharing,
)

NO_LOADER = (
    "no training loader was given to session.prepare(): unless the script divides its data by session.rank "
    "and session.workers, all workers train on the same batches; pass the DataLoader to prepare()"
)
ALONE = (
    "{name} was not passed to session.prepare(): what it trains, each worker trains alone; pass it to "
    "prepare() with its model"
)
NOT_USED = (
    "the script takes a step before it has got a batch of the loader that session.prepare() returned: if it "
    "trains on the loader that it had before, no worker shares its data; use what prepare() returns"
)
OLD_LOADER = (
    "the script trains on the loader that it passed to session.prepare(), so every worker trains on all the "
    "data: use what it returns, as in model, optimizer, loader = session.prepare(model, optimizer, loader)"
)


class TrainingData:
    """The training loaders of one worker, and the workers with which it shares the current epoch."""

    def __init__(
        self,
        context: WorldContext,
        strategy: Strategy,
        parts: Parts,
        gradient_peers: Group,
        workers: int,
        seed: int,
    ) -> None:
        self._context, self._strategy, self._parts = context, strategy, parts
        self._gradient_peers, self._workers, self._seed = gradient_peers, workers, seed
        self._rank, self._lockstep = context.me.rank, strategy.traits.lockstep
        self.loaders: list[SharedLoader] = []
        self._evaluated: list[EvaluationLoader] = []
        self.schedules = Schedules(strategy, self.loaders, self._examples_evaluated, self.note)
        self._seeds: list[int] = []  # of the orders of the loaders
        self._pairs = Pairs(leased=not self._lockstep)
        self.given = GivenBatches(lambda: self.passes, parts.weigh, self.note)
        self.counting = Counting(self.given.counts, self.note)
        self._separation = Separation(context.me.role, context.plan.seed, self._rank)
        self.balance: Balance | None = None  # divides rounds by the speeds of the workers
        self._cohort: Sequence[int] = range(workers)  # in lockstep: the workers that share the current epoch
        self._cohort_number = 0  # how often the cohort has changed
        self._due = 0  # examples for this worker alone that it has not used yet
        self._noted: set[str] = set()
        self._old_loader = False  # the script uses a loader that it passed to prepare()
        on_iterate.set(self._on_iterate)
        self._ended: tuple[Peer, int] | None = None  # in lockstep: who has ended, after how many steps
        if self._lockstep and not context.node.incarnation:  # a replacement takes fewer steps
            context.node.on_notice["done"] = self._on_done

    @property
    def batches(self) -> int:
        """How many batches the script has got."""
        return sum(loader.progress.count.own for loader in self.loaders)

    @property
    def epochs(self) -> int:
        """How many epochs of all loaders the script has begun; if any, also those before it resumed."""
        begun = any(loader.begun for loader in self.loaders)
        return sum(loader.begun or loader.epoch for loader in self.loaders) if begun else 0

    @property
    def left_early(self) -> bool:
        """True if the script did not finish the last epoch of a loader."""
        return any(loader.left_early for loader in self.loaders)

    @property
    def no_batch(self) -> str:
        """Why the script's last loop over a loader was empty; "" if it was not."""
        if not any(loader.empty for loader in self.loaders):
            return ""
        if self._context.node.incarnation:
            return "this worker replaces one that was lost, and gets no batch of epochs that are over"
        return "no batch of this epoch was left for this worker"

    def watch(self, part: TrainingPart) -> None:
        """Has this called around the steps of a part."""
        part.driver.check_step, part.driver.on_training = self.check_step, self._separation.begin
        part.driver.on_backward = self.given.before_backward
        part.replica.epochs = lambda: self.epochs
        if self.balance is not None and part is self._parts.first:
            part.driver.after_step = self.balance.after_step

    def watch_models(self) -> None:
        """Has this called before the models of the script run."""

        def begin(_: object, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():  # not in an evaluation
                self.given.before_forward((*args, *kwargs.values()))

        for model in self._parts.models if self._workers > 1 else ():
            model.register_forward_pre_hook(Hook(begin), with_kwargs=True)

    def check_step(self) -> None:
        """Called when a step begins. Raises if in lockstep another worker has taken its last step before."""
        if self._workers > 1:
            if not self.loaders:
                self.note(NO_LOADER)
            elif not any(loader.progress.count.own for loader in self.loaders):
                if self._old_loader:
                    raise UsageError(OLD_LOADER)
                self.note(NOT_USED)
            if not self._lockstep:
                self.schedules.own_rates.check(self._parts.optimizers)
        for replica in self._parts.replicas:
            if name := replica.gradients.densified:
                self.note(
                    f"the gradient of {name} is sparse: under {self._strategy} it is made dense, so each "
                    "step costs as much as the whole tensor (hogwild keeps it sparse)"
                )
        if self._ended is not None and (wrong := self._beyond(*self._ended)):
            raise UsageError(wrong)

    def _on_iterate(self, loader: DataLoader[Any]) -> None:
        self._old_loader |= any(loader is each.loader for each in self.loaders)

    def check_other(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that was not prepared takes a step."""
        if self._workers == 1 or self._parts.first.replica.runner.running:  # a part of one that was
            return
        prepared = {id(each) for replica in self._parts.replicas for each in replica.layout.parameters}
        others = [each for group in optimizer.param_groups for each in group["params"]]
        name = type(optimizer).__name__
        if any(id(each) in prepared for each in others):
            raise UsageError(
                f"{name} steps parameters of a prepared optimizer, and was not passed to session.prepare(): "
                "workers would train them apart; pass all optimizers to one call of prepare(), or change "
                "the settings of the prepared one"
            )
        self.note(ALONE.format(name=name))

    def _on_done(self, notice: Notice) -> str:
        assert notice.peer is not None
        self._ended = notice.peer, notice.steps
        return self._beyond(*self._ended)  # the step that this worker is in would wait for the other

    def _beyond(self, peer: Peer, steps: int) -> str:
        mine = self._parts.steps
        return ended_early(peer, steps, self._context.me, mine, self._strategy) if mine > steps else ""

    def share(self, loader: DataLoader[Any]) -> SharedLoader:
        """The loader that gives out this worker's share of the batches."""
        number = len(self.loaders)
        sharing, training = self._sharing(number), _LoaderTraining(self, number)
        seed = self._seed_of(loader)
        shared = SharedLoader(loader, sharing, seed, training, self._context.processes)
        if self.balance is not None and not shared.splits:
            raise UsageError(WHOLE)
        if note := sharing.shortage(shared.order, self._strategy):
            self.note(note)
        if self._context.node.incarnation:  # the batches before its first one count too
            shared.progress.resume(0, 0, within=False)
        self.loaders.append(shared)
        self._seeds.append(seed)
        self.schedules.follow(shared)
        return shared

    def _seed_of(self, loader: DataLoader[Any]) -> int:
        """Each loader has an order of its own, unless the script has seeded it like an earlier one."""
        for earlier, seed in zip(self.loaders, self._seeds, strict=True):
            if equally_seeded(earlier.loader, loader):
                return seed
        number = len(self.loaders)
        return mix("loader", self._seed, number) if number else self._seed

    def share_evaluation(self, loaders: Sequence[DataLoader[Any]]) -> dict[DataLoader[Any], DataLoader[Any]]:
        """For each of these loaders one that gives each example to one of the workers, once."""
        rank, workers, processes = self._rank, self._workers, self._context.processes
        made = [EvaluationLoader(loader, rank, workers, self._seed, processes) for loader in loaders]
        self._evaluated += made
        return dict(zip(loaders, made, strict=True))

    def _examples_evaluated(self) -> int:
        return sum(loader.examples for loader in self._evaluated)

    def note(self, text: str) -> None:
        """Tells the person something about the data. The coordinator shows it once for all workers."""
        if text not in self._noted:
            self._noted.add(text)
            self._context.request(ShowNote(text))

    def state_dict(self) -> dict[str, Any]:
        """The position of each loader, and the states of the random number generators."""
        self._separation.begin()
        balance = {} if self.balance is None else {"balance": self.balance.state_dict()}
        return {
            "loaders": [loader.state_dict() for loader in self.loaders],
            "random": saved_states(),
            "schedules": self.schedules.state_dict(),
            **balance,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continues from saved positions; before `restore_random`, because it may wait for others.

        None: an earlier version has saved none.
        """
        if state is None:
            self.note(NO_POSITION)
            return
        if len(state["loaders"]) != len(self.loaders):
            raise UsageError(
                f"this state was saved with {len(state['loaders'])} training loaders, but session.prepare() "
                f"got {len(self.loaders)}: pass the same loaders in the same order"
            )
        for loader, position in zip(self.loaders, state["loaders"], strict=True):
            loader.load_state_dict(position)
        self.schedules.load_state_dict(state.get("schedules", ()))
        if self.balance is not None and "balance" in state:
            self.balance.load_state_dict(state["balance"])

    def load_position(self, state: dict[str, Any] | None) -> None:
        """For a replacement: its script resumes with the saved epoch, and may load schedulers that are older
        than the run is now. What is left of the epochs the others know."""
        if state is None:
            return
        for number, (loader, position) in enumerate(zip(self.loaders, state["loaders"], strict=True)):
            saved = Position(**position)
            loader.epoch = saved.epoch
            loader.progress.resume(saved.run, saved.reached, within=saved.batches > 0)
            self.compare_position(number, saved.epoch, saved.batches)
        self.schedules.load_state_dict(state.get("schedules", ()))

    def restore_random(self, state: dict[str, Any] | None) -> None:
        """Continues with the saved random numbers, if there are some."""
        if state is not None:
            self._separation.skip()
            restore_states(state["random"])

    def begin_epoch(self) -> None:
        """The script begins to iterate over a loader."""
        self._separation.begin()
        self.counting.mark("epoch")

    def on_give(self, loader: SharedLoader, examples: int, counts: bool) -> None:
        """The script gets a batch of a loader; not `counts` if it is borrowed."""
        self.counting.give(examples, counts)
        if self._workers > 1:
            self._pairs.give(loader)

    def _sharing(self, number: int) -> Sharing:
        traits = self._strategy.traits
        if not traits.lockstep:
            return LeasedSharing(self._workers, LeaseRequests(self._context, self._parts, number))
        if traits.survives:
            return self._by_cohort(number)
        averaged_with = self._averaged_with() if traits.weighted_by_examples else None
        if self.balance is not None:
            return self.balance.sharing(self._rank, averaged_with)
        return LockstepSharing(self._rank, self._workers, averaged_with)

    def _averaged_with(self) -> list[int]:
        """The ranks over which uneven batches are balanced by scaling; the strategy weights all others."""
        if self._strategy.parts[0].traits.weighted_by_examples:
            return [self._rank]
        return [peer.rank for peer in self._gradient_peers.members]

    def _by_cohort(self, number: int) -> Sharing:
        def join(epoch: int) -> CohortPlace | None:
            share = self._context.request(ShareEpoch(number, epoch)).share
            if share is None:
                return None
            self._join_cohort(share.ranks, share.number)
            return CohortPlace(self._cohort.index(self._rank), len(self._cohort), share.epoch)

        def due(examples: int) -> None:
            self._due += examples
            self._context.request(ExamplesDue(self._parts.samples + self._due))

        return CohortSharing(self._workers, join, due)

    def _join_cohort(self, ranks: list[int], number: int) -> None:
        """From here on these workers share the data and step together."""
        if number == self._cohort_number:
            return
        self._cohort, self._cohort_number = ranks, number
        with torch.no_grad(), self._context.blocking():
            self._parts.on_membership(ranks, number)

    def on_batch(self, loader: int, samples: int, batch: GivenBatch) -> None:
        """The script gets a batch."""
        self._parts.on_batch(samples)
        self.given.give(loader, batch)
        self._due -= samples

    def on_unused(self, samples: int) -> None:
        """The script did not train on these examples after all."""
        for replica in self._parts.replicas:
            replica.samples -= samples

    @property
    def passes(self) -> int:
        """Backward passes and steps so far."""
        replicas = self._parts.replicas
        if len(replicas) == 1:  # called ten times a step
            return replicas[0].gradients.passes
        return sum(replica.gradients.passes for replica in replicas)

    @property
    def evaluates(self) -> bool:
        """True if all models are in evaluation mode."""
        return not any(model.training for model in self._parts.models)

    def compare_order(self, loader: int, epoch: int, digest: str, data: str) -> None:
        """Lets the coordinator check that all workers have drawn the same order of the same data."""
        self._context.request(OrderDrawn(loader, epoch, digest, data))

    def compare_position(self, loader: int, epoch: int, batches: int) -> None:
        """Lets the coordinator check that all workers resume from the same position."""
        self._context.request(ResumeData(loader, epoch, batches))


class _LoaderTraining(Training):
    """What one loader must know of the training."""

    def __init__(self, data: TrainingData, number: int) -> None:
        self._data, self._number = data, number

    @property
    def passes(self) -> int:  # type: ignore[override]
        return self._data.passes

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        return self._data.evaluates

    def begin(self) -> None:
        self._data.begin_epoch()

    def on_give(self, loader: SharedLoader, examples: int, counts: bool) -> None:
        self._data.on_give(loader, examples, counts)

    def on_batch(self, samples: int, batch: GivenBatch) -> None:
        self._data.on_batch(self._number, samples, batch)

    def on_end(self) -> None:
        self._data.given.end(self._number)

    def settle(self) -> None:
        self._data.given.settle()

    def on_unused(self, samples: int) -> None:
        self._data.on_unused(samples)

    def on_drawn(self, epoch: int, digest: str, data: str) -> None:
        self._data.compare_order(self._number, epoch, digest, data)

    def on_resumed(self, epoch: int, batches: int) -> None:
        self._data.compare_position(self._number, epoch, batches)

    def note(self, text: str) -> None:
        self._data.note(text)
