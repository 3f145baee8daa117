"""What the trainers of other libraries need of a session: shared data, the consensus, and collectives.

A trainer owns the loop. It asks for the length of its loader, and makes iterators, before it has made its
optimizers. It evaluates and saves the module that the user gave it, not a copy.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.hooks import Hook
from polyrhythm.session.api import init
from polyrhythm.session.context import session, world_context
from polyrhythm.session.data import SharedLoader
from polyrhythm.session.distributed import DistributedSession


class Trainee(NamedTuple):
    """What a trainer has made by the time it draws its first batch."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    epoch: int = 0  # the first one to train, after a checkpoint was loaded
    schedulers: Sequence[LRScheduler] = ()  # those that are stepped after each batch
    equal_steps: bool = False  # all workers take the same number, for which schedules are built
    whole_run: bool = False  # schedules are built for the steps of a single process


class TrainerSession:
    """The session of a trainer: that of the script if it has one, or a new one.

    Outside a run it changes nothing. `trainee` is called when the first batch is drawn.
    """

    def __init__(
        self,
        trainee: Callable[[], Trainee],
        strategy: str | Strategy | None = None,
        batch_norm: str | None = None,
    ) -> None:
        mine = session.get()
        if mine is None or (world_context.get() is not None and not isinstance(mine, DistributedSession)):
            mine = init(strategy, batch_norm=batch_norm)
        self.session = mine
        self.run = mine if isinstance(mine, DistributedSession) else None
        self.workers = mine.workers
        # A server runs the script up to the first batch. It is never the one that logs and saves.
        self.serves = self.run is not None and self.run._context.me.role == "server"
        self.rank = mine.rank + (self.workers if self.serves else 0)
        self._trainee = trainee
        self._loaders: list[DeferredLoader] = []
        self._trained: ModelSwap | None = None  # of the prepared model
        self._consensus: nn.Module | None = None  # since the last step: what was evaluated is what is saved

    @property
    def lockstep(self) -> bool:
        """True if all workers take the same number of steps."""
        return self.run is None or self.run.strategy.traits.lockstep

    # --- data ---------------------------------------------------------------------------------------

    def share(self, loader: Any, length: int | None) -> DeferredLoader:
        """The training loader with this worker's batches; `length` is what the trainer is told."""
        if not isinstance(loader, DataLoader):
            raise UsageError(
                f"the training data is a {type(loader).__name__}, which cannot be shared among workers: use "
                "a torch.utils.data.DataLoader"
            )
        shared = DeferredLoader(loader, length, self.prepare, self.forget_consensus)
        if self._trained is None:
            self._loaders.append(shared)
        else:  # a trainer that makes a new loader for later epochs
            shared.shared = self.session.prepare(loader)
        return shared

    def share_of(self, loader: DataLoader[Any]) -> int:
        """The number of batches that each worker gets of an epoch, in lockstep."""
        batches = loader.batch_sampler
        if type(batches) is not BatchSampler:
            return math.ceil(len(loader) / self.workers)
        size, examples = batches.batch_size, len(batches.sampler)  # type: ignore[arg-type]
        if batches.drop_last:
            examples -= examples % size
        return math.ceil(examples / (size * self.workers))

    def prepare(self) -> None:
        """Called when the first batch is drawn, or before."""
        trainee = self._trainee()
        loaders = [deferred.loader for deferred in self._loaders]
        unequal = not self.lockstep and not trainee.equal_steps
        schedulers = trainee.schedulers if unequal or trainee.whole_run else ()
        prepared = self.session.prepare(*loaders, trainee.model, *trainee.optimizers, *schedulers)
        self._trained = ModelSwap(trainee.model)
        if self.run is not None:
            self.run.before_close.append(self.show_replica)
            assert self.run._data is not None
            for scheduler in trainee.schedulers:
                self.run._data.schedules.exempt(scheduler)
        for deferred, shared in zip(self._loaders, prepared, strict=False):
            deferred.shared, shared.epoch = shared, trainee.epoch

    def check_untrained(self, what: str) -> None:
        """Raises if the session is prepared already: a trainer makes new optimizers for each call."""
        if self._trained is not None:
            raise UsageError(f"{what} was called twice; a run trains once: train all epochs in one call")

    def begin_batch(self) -> None:
        """Called before each training step: trainers may draw batches ahead."""
        self.forget_consensus()
        for deferred in self._loaders:
            deferred.begin_batch()

    # --- the model that the workers agree on --------------------------------------------------------

    def show_consensus(self) -> None:
        """From here on the trainer's model holds the parameters that all workers agree on. Collective."""
        if self._trained is None or not self.shows_replica:
            return
        if self._consensus is None:
            with torch.inference_mode(False):  # its tensors outlive the evaluation
                if not self.lockstep:
                    self.barrier()  # or each would see what the others have done by then
                self._consensus = self.session.consensus()
                if not self.lockstep:
                    self._agree(self._consensus)
        self._trained.show(self._consensus)

    def _agree(self, model: nn.Module) -> None:
        """Gives all workers the model of the first: under `broadcast` messages may still be on their way."""
        if self.run is None or self.workers == 1:
            return
        with torch.no_grad(), self.run._context.blocking():
            for tensor in _tensors(model):
                dense = tensor.detach().contiguous()
                self.run._node.everyone.broadcast(dense.view(-1))
                tensor.data = dense

    def forget_consensus(self) -> None:
        """Called when training goes on, by each worker in each epoch: one may get no batch of it."""
        self._consensus = None

    def show_replica(self) -> None:
        """From here on the trainer's model is this worker's replica again."""
        if self._trained is not None:
            self._trained.restore()

    @property
    def shows_replica(self) -> bool:
        """True while the trainer's model is this worker's replica."""
        return self._trained is not None and not self._trained.shown

    @contextmanager
    def consensus_shown(self) -> Iterator[None]:
        """A context in which the trainer's model holds the consensus. Collective, unless it does already."""
        changes = self.shows_replica
        self.show_consensus()
        try:
            yield
        finally:
            if changes:
                self.show_replica()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context in which a state may be loaded into the shown consensus, even where servers train."""
        if self._trained is None or self.shows_replica:
            yield
            return
        with self._trained.loading():
            yield

    # --- collectives --------------------------------------------------------------------------------

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all workers, by rank. Collective; a server gets its own."""
        if self.run is None or self.serves:
            return [tensor]
        with torch.inference_mode(False):
            return self.run.gather(tensor)

    def barrier(self) -> None:
        """Waits until all workers are here."""
        if not self.serves:
            self.session.barrier()

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of one worker: numbers, texts, None, and lists and dicts of them. Collective."""
        if self.run is None or self.serves:
            return value
        mine = os.fspath(value) if isinstance(value, os.PathLike) else value
        return dict(self.run.gather((self.rank, mine)))[source]


class DeferredLoader:
    """A training loader for a time before the session is prepared; otherwise like the one it wraps."""

    def __init__(
        self,
        loader: DataLoader[Any],
        length: int | None,
        prepare: Callable[[], None],
        on_epoch: Callable[[], None],
    ) -> None:
        self.loader, self._length, self._prepare, self._on_epoch = loader, length, prepare, on_epoch
        self.shared: SharedLoader | None = None
        self._drawn: deque[Callable[[], None]] = deque()  # count the batches that no step has used yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("workers take unequal numbers of batches")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._on_epoch()
        if self.shared is None:
            self._prepare()
        assert self.shared is not None
        self.shared.defer = self._drawn.append
        self._drawn.clear()
        yield from self.shared

    def begin_batch(self) -> None:
        """The next batch is used: its examples count, and its gradient has its scale."""
        if self._drawn:
            self._drawn.popleft()()


class ModelSwap:
    """Lets a model hold the tensors of another one for a while. What others write to its own is not lost."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: list[Tensor] = []

    @property
    def shown(self) -> bool:
        return bool(self._own)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context in which the session does not check what is loaded into the model."""
        held = []
        for hooks in (module._load_state_dict_pre_hooks for module in self._model.modules()):
            ours = {key: hook for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), Hook)}
            held.append((hooks, ours))
            for key in ours:
                del hooks[key]
        try:
            yield
        finally:
            for hooks, ours in held:
                hooks.update(ours)

    def show(self, other: nn.Module) -> None:
        mine = _tensors(self._model)
        self._own = [tensor.data for tensor in mine]
        for tensor, theirs in zip(mine, _tensors(other), strict=True):
            tensor.data = theirs.data

    def restore(self) -> None:
        if self._own:
            for tensor, own in zip(_tensors(self._model), self._own, strict=True):
                tensor.data = own
            self._own = []


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


class CurrentRank(int):
    """The rank of the worker that is running: in simulation all workers share the modules of a library."""

    def __eq__(self, other: object) -> bool:
        return _rank() == other

    def __ne__(self, other: object) -> bool:
        return _rank() != other

    def __hash__(self) -> int:
        return hash(_rank())

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (_rank(),)


def _rank() -> int:
    """The rank of this node; a server has one that is never 0."""
    here, mine = world_context.get(), session.get()
    if here is None or mine is None:
        return 0
    return here.me.rank + (mine.workers if here.me.role == "server" else 0)
