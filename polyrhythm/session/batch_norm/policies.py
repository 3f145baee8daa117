"""The policies: which BatchNorm statistics `consensus()` and the final model show.

Training does not use the running statistics, so they are merged only when they are needed: all workers call
`agree` in `consensus()` and at the end of the script, and `show` writes the result into the copy of the model
that is returned. Only BatchNorm's buffers change. Where workers continue when one dies, nothing waits for all
of them (see `statistics_exchange`), and the worker that sends the result merges once more at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.core.errors import UsageError
from polyrhythm.core.node import Node
from polyrhythm.core.peer import Peer
from polyrhythm.model.hooks import Hook
from polyrhythm.session.batch_norm.calls import CallRecorder
from polyrhythm.session.batch_norm.pooling import pool, pooled
from polyrhythm.session.batch_norm.statistics_exchange import StatisticsExchange, WorkerStatistics, lowest
from polyrhythm.session.data import SharedLoader
from polyrhythm.session.seeds import mix, seed_all

BATCHES = 100  # the most that `recompute` uses

NAMES = ("running_mean", "running_var", "num_batches_tracked")  # BatchNorm's statistics


def tracking(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm modules that have running statistics here, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and _here(module.running_mean)
    }


def _here(buffer: Tensor | None) -> bool:
    """False for a buffer that another worker holds, where several hold one model."""
    return buffer is not None and not buffer.is_meta


def statistics(module: _BatchNorm) -> tuple[Tensor, ...]:
    assert module.running_mean is not None and module.running_var is not None
    assert module.num_batches_tracked is not None
    return module.running_mean, module.running_var, module.num_batches_tracked


def shared_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers here that are in the model's state, by name. Others are caches, whose shapes may differ."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in module._buffers.items()
        if value is not None and _here(value) and name not in module._non_persistent_buffers_set
    }


def statistics_names(model: nn.Module) -> list[str]:
    """The names of BatchNorm's statistics among the buffers."""
    return [f"{name}.{each}" if name else each for name in tracking(model) for each in NAMES]


def other_names(model: nn.Module) -> list[str]:
    """The names of the buffers that are not BatchNorm's."""
    statistics = {*statistics_names(model)}
    return [name for name in shared_buffers(model) if name not in statistics]


class Policy:
    """Decides which buffers `consensus()` and the final model have. `local` needs none."""

    waits_in_pass: ClassVar[bool] = False  # workers wait for each other inside forward and backward

    def __init__(self, model: nn.Module, node: Node) -> None:
        self.model, self.node = model, node
        self.agreed: dict[str, Tensor] = {}  # buffers by name

    def agree(self) -> None:
        """Called by all workers at the same point of the script."""

    def finish(self) -> None:
        """Called by all workers at the end of the script."""
        self.agree()

    def collect(self) -> None:
        """Called by the worker that sends the result, when all are done."""

    def show(self, model: nn.Module) -> None:
        """Writes the buffers into this copy of the model."""
        places = shared_buffers(model)
        for name, value in self.agreed.items():
            places[name].copy_(value.view_as(places[name]))


class Merged(Policy):
    """Agrees with all workers on one set of buffers; with `exchange`, with those that are alive.

    The buffers named by `copied` are those of one worker, and BatchNorm's statistics named by `merged` those
    of all.
    """

    def __init__(
        self,
        model: nn.Module,
        node: Node,
        samples: Callable[[], int],
        copied: Sequence[str],
        merged: Sequence[str] = (),
    ) -> None:
        super().__init__(model, node)
        self.exchange: StatisticsExchange | None = None
        self.copied, self.merged = list(copied), list(merged)
        self._shapes = {name: value.shape for name, value in shared_buffers(model).items()}
        self._samples = samples
        self._note_tracked()
        model.register_load_state_dict_post_hook(Hook(self._note_tracked))  # type: ignore[no-untyped-call]

    def use_exchange(self, lockstep: bool, workers_stay: bool) -> None:
        """Exchanges buffers by requests, so that no worker waits for a dead one.

        A replacement starts with those of the lowest rank that has trained.
        """
        self.exchange = StatisticsExchange(self.node, self._own, lockstep, workers_stay)
        if self.node.incarnation:
            given = self.exchange.now()
            del given[self.node.me]
            if given:
                *values, _, self._before = lowest(given).tensors
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
        """Agrees on the buffers of these workers, by rank."""
        raise NotImplementedError

    def buffers(self) -> list[Tensor]:
        """Flat copies of this worker's buffers: those that are copied, then those that are merged."""
        own = shared_buffers(self.model)
        for name in (*self.copied, *self.merged):
            if name not in own or own[name].shape != self._shapes[name]:
                now = tuple(own[name].shape) if name in own else None
                raise UsageError(
                    f"the buffer {name} had the shape {tuple(self._shapes[name])} when session.prepare() was "
                    f"called and has {now} now, so workers cannot agree on it: keep its shape, register it "
                    "with persistent=False, or use batch_norm=local"
                )
        return [own[name].flatten().clone() for name in (*self.copied, *self.merged)]

    def broadcast(self, values: Sequence[Tensor]) -> None:
        """Overwrites these buffers with those of worker 0; as bytes, because they may have any dtype."""
        if values := [value for value in values if value.numel()]:
            self.node.everyone.broadcast(*(value.view(torch.uint8) for value in values))

    def _own(self) -> WorkerStatistics:
        """All buffers, then the batches tracked here, then those tracked before the run."""
        flat = (value.cpu() for value in self.buffers())
        return WorkerStatistics((*flat, self._tracked() - self._here, self._before), self._samples())

    def _take(self, values: Sequence[Tensor]) -> None:
        """Agrees on these buffers, in the order of `buffers`."""
        self.agreed = dict(zip((*self.copied, *self.merged), values, strict=True))

    def _note_tracked(self, *_: Any) -> None:
        self._before = self._here = self._tracked()

    def _tracked(self) -> Tensor:
        return torch.tensor([int(statistics(module)[2]) for module in tracking(self.model).values()])


class Rank0(Merged):
    """The buffers of worker 0, by a broadcast. Where workers may die: of the lowest rank that has trained."""

    def agree(self) -> None:
        if self.exchange is not None:
            return self.merge(self.exchange.lowest())
        values = self.buffers()
        self.broadcast(values)
        self._take(values)

    def finish(self) -> None:
        self.agreed = {}  # in lockstep worker 0 sends the result, with its own buffers
        if self.exchange is not None:
            self.exchange.leave()

    def collect(self) -> None:
        if self.exchange is not None:
            self.merge(self.exchange.lowest(final=True))

    def merge(self, given: dict[Peer, WorkerStatistics]) -> None:
        *values, _, _ = lowest(given).tensors
        self._take(values)


class Mean(Merged):
    """The statistics of all workers, weighted by the examples of each; equally before the first example.

    The numbers of batches tracked are summed, because the merged statistics are of all of them. Batches that
    the model had tracked before the run count once. Those of a worker that died are lost. Other buffers
    are those of worker 0.
    """

    def agree(self) -> None:
        if self.exchange is not None:
            return self.merge(self.exchange.all())
        node, values = self.node, self.buffers()
        if len(node.members.workers) == 1:  # bit for bit unchanged
            return self._take(values)
        others, own = values[: len(self.copied)], values[len(self.copied) :]
        self.broadcast(others)
        counts = self._tracked()
        if node.rank:
            counts -= self._before
        means, variances = (torch.cat(own[part :: len(NAMES)]).cpu() for part in (0, 1))
        mean, variance, _ = pool(
            lambda table: node.everyone.all_reduce(table, counts),
            node.rank, len(node.members.workers), means, variances, self._samples(),
        )  # fmt: skip
        sizes = [each.numel() for each in own[:: len(NAMES)]]
        merged = zip(*(torch.split(each, sizes) for each in (mean, variance)), counts, strict=True)
        self._take([*others, *itertools.chain.from_iterable(merged)])

    def merge(self, given: dict[Peer, WorkerStatistics]) -> None:
        if len(given) == 1:  # bit for bit unchanged
            return self._take(next(iter(given.values())).tensors[:-2])
        first = len(self.copied)
        weights = torch.tensor([each.samples for each in given.values()], dtype=torch.float64)
        before = next(iter(given.values())).tensors[-1]
        counts = before + sum(each.tensors[-2] for each in given.values())
        columns = list(zip(*(each.tensors[first:-2] for each in given.values()), strict=True))
        values = list(lowest(given).tensors[:first])
        for at in range(0, len(columns), len(NAMES)):
            means, variances = (torch.stack(each).double() for each in columns[at : at + 2])
            values += [*pooled(means, variances, weights), counts[at // len(NAMES)]]
        self._take(values)


class Recompute(Rank0):
    """Recomputes the statistics from training batches, with the parameters of the model that is returned.

    The model is called in training mode, as the script calls it (see `calls`). Every example counts equally:
    the statistics are those of all batches together. Workers that are in the same epoch use the same batches.
    Training is not affected. Other buffers are those of worker 0.
    """

    def __init__(
        self, model: nn.Module, node: Node, samples: Callable[[], int], loader: SharedLoader, seed: int
    ) -> None:
        super().__init__(model, node, samples, other_names(model))
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
        super().show(model)
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
