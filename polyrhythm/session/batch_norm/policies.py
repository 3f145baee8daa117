"""The policies: which BatchNorm statistics `consensus()` and the final model show.

Training does not use the running statistics, so they are merged only when they are needed: all workers call
`agree` in `consensus()` and at the end of the script, and `show` writes the result into the copy of the model
that is returned. Only BatchNorm's buffers change. Where workers continue when one dies, nothing waits for all
of them (see `statistics_exchange`), and the worker that sends the result merges once more at the end.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.core.node import Node
from polyrhythm.core.peer import Peer
from polyrhythm.session.batch_norm.calls import CallRecorder
from polyrhythm.session.batch_norm.hooks import Hook
from polyrhythm.session.batch_norm.pooling import pool, pooled
from polyrhythm.session.batch_norm.statistics_exchange import StatisticsExchange, WorkerStatistics
from polyrhythm.session.data import SharedLoader
from polyrhythm.session.seeds import mix, seed_all

BATCHES = 100  # the most that `recompute` uses

NAMES = ("running_mean", "running_var", "num_batches_tracked")  # BatchNorm's statistics

Statistics = dict[str, tuple[Tensor, ...]]  # by module name: mean, variance, batches tracked


def tracking(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm modules that have running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def statistics(module: _BatchNorm) -> tuple[Tensor, ...]:
    assert module.running_mean is not None and module.running_var is not None
    assert module.num_batches_tracked is not None
    return module.running_mean, module.running_var, module.num_batches_tracked


class Policy:
    """A BatchNorm policy. `local` needs none."""

    waits_in_pass: ClassVar[bool] = False  # workers wait for each other inside forward and backward

    def __init__(self, model: nn.Module, node: Node) -> None:
        self.model, self.node = model, node
        self.agreed: Statistics = {}

    def agree(self) -> None:
        """Called by all workers at the same point of the script."""

    def finish(self) -> None:
        """Called by all workers at the end of the script."""
        self.agree()

    def collect(self) -> None:
        """Called by the worker that sends the result, when all are done."""

    def show(self, model: nn.Module) -> None:
        """Writes the statistics into this copy of the model."""
        modules = tracking(model)
        for name, values in self.agreed.items():
            for place, value in zip(statistics(modules[name]), values, strict=True):
                place.copy_(value.view_as(place))


class Merged(Policy):
    """Merges the statistics of all workers; with `exchange`, of those that are alive."""

    def __init__(self, model: nn.Module, node: Node, samples: Callable[[], int]) -> None:
        super().__init__(model, node)
        self.exchange: StatisticsExchange | None = None
        self._samples = samples
        self._note_tracked()
        model.register_load_state_dict_post_hook(Hook(self._note_tracked))  # type: ignore[no-untyped-call]

    def use_exchange(self, lockstep: bool) -> None:
        """Exchanges statistics by requests, so that no worker waits for a dead one.

        A replacement starts with the statistics of the lowest rank that has trained.
        """
        self.exchange = StatisticsExchange(self.node, self._own, lockstep)
        if self.node.incarnation:
            given = self.exchange.now()
            del given[self.node.me]
            if given:
                *values, _, self._before = _lowest(given).tensors
                self._take(values)
                self.show(self.model)
                self.agreed, self._here = {}, self._tracked()

    def finish(self) -> None:
        if self.exchange is None:
            self.agree()

    def collect(self) -> None:
        if self.exchange is not None:
            self.merge(self.exchange.now())

    def merge(self, given: dict[Peer, WorkerStatistics]) -> None:
        """Agrees on the statistics of these workers, by rank."""
        raise NotImplementedError

    def _own(self) -> WorkerStatistics:
        """All statistics, then the batches tracked here, then those tracked before the run."""
        values = [value for module in tracking(self.model).values() for value in statistics(module)]
        flat = (value.flatten().cpu().clone() for value in values)
        return WorkerStatistics((*flat, self._tracked() - self._here, self._before), self._samples())

    def _take(self, values: Sequence[Tensor]) -> None:
        """Agrees on these statistics, in the order of `_own`."""
        self.agreed = {
            name: tuple(values[at : at + len(NAMES)])
            for name, at in zip(tracking(self.model), range(0, len(values), len(NAMES)), strict=True)
        }

    def _note_tracked(self, *_: Any) -> None:
        self._before = self._here = self._tracked()

    def _tracked(self) -> Tensor:
        return torch.tensor([int(statistics(module)[2]) for module in tracking(self.model).values()])


class Rank0(Merged):
    """The statistics of worker 0, by a broadcast. Where workers may die: of the lowest rank that is alive."""

    def agree(self) -> None:
        if self.exchange is not None:
            return self.merge(self.exchange.all())
        own = {name: statistics(module) for name, module in tracking(self.model).items()}
        self.agreed = {name: tuple(value.flatten().clone() for value in each) for name, each in own.items()}
        self.node.everyone.broadcast(*(value for each in self.agreed.values() for value in each))

    def merge(self, given: dict[Peer, WorkerStatistics]) -> None:
        *values, _, _ = _lowest(given).tensors
        self._take(values)


def _lowest(given: dict[Peer, WorkerStatistics]) -> WorkerStatistics:
    """The statistics of the lowest rank that has trained: a new replacement has not."""
    return next((each for each in given.values() if each.samples), next(iter(given.values())))


class Mean(Merged):
    """The statistics of all workers, weighted by the examples of each; equally before the first example.

    The numbers of batches tracked are summed, because the merged statistics are of all of them. Batches that
    the model had tracked before the run count once. Those of a worker that died are lost.
    """

    def agree(self) -> None:
        if self.exchange is not None:
            return self.merge(self.exchange.all())
        node, modules = self.node, tracking(self.model)
        own = [statistics(module) for module in modules.values()]
        if len(node.members.workers) == 1:  # bit for bit unchanged
            self.agreed = dict(zip(modules, own, strict=True))
            return
        counts = self._tracked()
        if node.rank:
            counts -= self._before
        means, variances = (torch.cat([each[part].cpu() for each in own]) for part in (0, 1))
        mean, variance, _ = pool(
            lambda table: node.everyone.all_reduce(table, counts),
            node.rank, len(node.members.workers), means, variances, self._samples(),
        )  # fmt: skip
        sizes = [each[0].numel() for each in own]
        merged = zip(*(torch.split(each, sizes) for each in (mean, variance)), counts, strict=True)
        self.agreed = dict(zip(modules, merged, strict=True))

    def merge(self, given: dict[Peer, WorkerStatistics]) -> None:
        if len(given) == 1:  # bit for bit unchanged
            return self._take(next(iter(given.values())).tensors[:-2])
        weights = torch.tensor([each.samples for each in given.values()], dtype=torch.float64)
        before = next(iter(given.values())).tensors[-1]
        counts = before + sum(each.tensors[-2] for each in given.values())
        columns = list(zip(*(each.tensors[:-2] for each in given.values()), strict=True))
        values: list[Tensor] = []
        for at in range(0, len(columns), len(NAMES)):
            means, variances = (torch.stack(each).double() for each in columns[at : at + 2])
            values += [*pooled(means, variances, weights), counts[at // len(NAMES)]]
        self._take(values)


class Recompute(Policy):
    """Recomputes the statistics from training batches, with the parameters of the model that is returned.

    The model is called in training mode, as the script calls it (see `calls`). Every example counts equally:
    the statistics are those of all batches together. Workers that are in the same epoch use the same batches.
    Training is not affected.
    """

    def __init__(self, model: nn.Module, node: Node, loader: SharedLoader, seed: int) -> None:
        super().__init__(model, node)
        self._loader, self._seed = loader, seed
        self._calls = CallRecorder(model)
        loader.watch = self._calls.on_batch
        self._frozen: set[str] = set()
        self._find_frozen()

    def _find_frozen(self) -> None:
        """Finds the frozen modules: those in eval mode while the model trains."""
        if self.model.training:
            self._frozen = {name for name, each in tracking(self.model).items() if not each.training}

    def show(self, model: nn.Module) -> None:
        self._find_frozen()
        training, buffers = model.training, [(place, place.clone()) for place in model.buffers()]
        model.train()
        frozen = [module for name, module in tracking(model).items() if name in self._frozen]
        for module in frozen:
            module.eval()
        pools = {module: _Moments() for module in tracking(model).values() if module.training}
        with contextlib.ExitStack() as until, _own_random_numbers(model, mix("norms", self._seed)):
            for module, each in pools.items():
                until.enter_context(module.register_forward_pre_hook(each.add, with_kwargs=True))
            for batch in self._loader.sample(BATCHES):
                if not self._calls.replay(model, batch):
                    warnings.warn(
                        "batch_norm=recompute does not know yet how the model is called, because this worker "
                        "has taken no step: its BatchNorm statistics are left unchanged",
                        stacklevel=2,
                    )
                    pools.clear()
                    break
        for place, value in buffers:  # the calls may have changed other buffers too
            place.copy_(value)
        for module, each in pools.items():
            each.write(*statistics(module))
        model.train(training)


class _Moments:
    """Count per channel, mean and variance of all inputs of one BatchNorm module so far."""

    def __init__(self) -> None:
        self.count = self.calls = 0
        self.mean = self.variance = torch.zeros(())

    def add(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = (args[0] if args else kwargs["input"]).double()
        count = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x, (0, *range(2, x.dim())), correction=0)
        if self.calls:
            weights = torch.tensor([self.count, count], dtype=torch.float64, device=x.device)
            mean, variance = pooled(
                torch.stack([self.mean, mean]), torch.stack([self.variance, variance]), weights
            )
        self.mean, self.variance = mean, variance
        self.count, self.calls = self.count + count, self.calls + 1

    def write(self, mean: Tensor, variance: Tensor, tracked: Tensor) -> None:
        """Writes the statistics, with the unbiased variance as BatchNorm does, if the module was called."""
        if self.calls:
            mean.copy_(self.mean)
            variance.copy_(self.variance * (self.count / max(self.count - 1, 1)))
            tracked.fill_(self.calls)


@contextlib.contextmanager
def _own_random_numbers(model: nn.Module, seed: int) -> Iterator[None]:
    """Dropout and augmentation draw the same numbers every time, and training keeps its random state."""
    others = np.random.get_state(), random.getstate()
    devices = {each.device.index for each in model.parameters() if each.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
        seed_all(seed)
        try:
            yield
        finally:
            np.random.set_state(others[0])
            random.setstate(others[1])
