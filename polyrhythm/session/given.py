"""GivenBatches: which of the batches that a script has got it trains on now.

In lockstep a batch has a weight, which is not 1 in the last round of an epoch. It must go to the gradient of
this batch, though a script may draw batches ahead, keep some in a list, skip some, or go through them again.
The forward pass tells which batch it is: the one whose tensors the model gets. Where these are new tensors,
as on another device, batches are assumed to be used in the order in which they were drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

APART = (
    "one backward pass uses batches of different weights, as the last ones of two loaders: in the last round "
    "of an epoch some examples count twice; give both loaders as many examples, or use drop_last=True"
)
AFTER = (
    "the script trains on something else after it has read a prepared loader to its end: unless it divides "
    "that by session.rank and session.workers, all workers train on the same; pass every training loader to "
    "session.prepare()"
)


MOST = 1024  # batches that a script may draw ahead


class GivenBatch:
    """A batch that a loader has given to the script."""

    def __init__(self, content: Any, scale: float, before: Any = None) -> None:
        self.scale = scale  # the weight of its gradient
        self.before = before  # the progress of the loader before it
        self.done = False  # the script has trained on it, or on a later one instead
        self.storages = [StorageWeakRef(each.untyped_storage()) for each in _tensors(content)]  # type: ignore[no-untyped-call]


class GivenBatches:
    """The batches that the loaders of one worker have given to the script.

    `passes` counts backward passes; `weigh` sets the weight of the next gradient.
    """

    def __init__(
        self, passes: Callable[[], int], weigh: Callable[[float], None], note: Callable[[str], None]
    ) -> None:
        self._passes, self._weigh, self._note = passes, weigh, note
        # By loader, the oldest first: batches that are not done, or that the last pass has used.
        self._waiting: dict[int, deque[GivenBatch]] = {}
        self._open: set[int] = set()  # loaders that the script iterates over
        self._known: dict[int, tuple[int, GivenBatch]] = {}  # by storage: the loader and the batch
        self._shared: set[int] = set()  # storages of several batches
        self._limit = 64  # entries of `_known`, before those of freed tensors are dropped
        self._used: dict[GivenBatch, bool] = {}  # for the next pass; True if a model got it
        self._at = 0  # passes when it was settled which batches are done

    def give(self, loader: int, batch: GivenBatch) -> None:
        """The script gets a batch of a loader."""
        self.settle()
        self._open.add(loader)
        waiting = self._waiting.setdefault(loader, deque())
        self._advance(waiting)
        waiting.append(batch)
        if len(waiting) > MOST:
            waiting.popleft().done = True
        if len(waiting) == 1:
            self._use(batch)
        self._remember(loader, batch)

    def end(self, loader: int) -> None:
        """The script has read a loader to its end, or has left it."""
        self.settle()
        self._open.discard(loader)
        if loader in self._waiting:
            self._advance(self._waiting[loader])

    def before_forward(self, arguments: Any) -> None:
        """A model gets these arguments, in training."""
        self.settle()
        for loader, batch in dict.fromkeys(self._found(arguments)):
            waiting = self._waiting[loader]
            # What was only drawn is not used after all.
            self._used = {each: seen for each, seen in self._used.items() if seen or each not in waiting}
            if batch in waiting:
                while waiting[0] is not batch:
                    waiting.popleft().done = True
            self._use(batch, seen=True)

    def before_backward(self) -> None:
        """A backward pass begins."""
        self.settle()
        if not self._used and self._waiting and not self._open and not any(self._waiting.values()):
            self._note(AFTER)
            self._weigh(1.0)

    def settle(self) -> None:
        """Marks what a pass has used as done."""
        passes = self._passes()
        if passes != self._at:
            for batch in self._used:
                batch.done = True
            self._used, self._at = {}, passes

    def counts(self, content: Any) -> bool | None:
        """False if this batch is borrowed and has no weight; None if it is unknown."""
        found = [batch.scale > 0 for _, batch in self._found(content)]
        return any(found) if found else None

    def _advance(self, waiting: deque[GivenBatch]) -> None:
        """Drops what is done. The next batch is used, unless the models will get another."""
        before = len(waiting)
        while waiting and waiting[0].done:
            waiting.popleft()
        if waiting and len(waiting) < before:
            self._use(waiting[0])

    def _use(self, batch: GivenBatch, seen: bool = False) -> None:
        """The next pass is about this batch, and about those that are used before the pass, too."""
        self._used[batch] = seen or self._used.get(batch, False)
        weights = {each.scale for each in self._used}
        if len(weights) > 1:
            self._note(APART)
        self._weigh(max(weights))

    def _found(self, value: Any) -> list[tuple[int, GivenBatch]]:
        keys = [each.untyped_storage()._cdata for each in _tensors(value)]
        return [self._known[key] for key in keys if key in self._known and key not in self._shared]

    def _remember(self, loader: int, batch: GivenBatch) -> None:
        for storage in batch.storages:
            if self._known.setdefault(storage.cdata, (loader, batch))[1] is not batch:
                self._shared.add(storage.cdata)  # batches are views of one tensor, which tells nothing
        if len(self._known) > self._limit:
            batches = {each for _, each in self._known.values()}
            storages = [storage for each in batches for storage in each.storages]
            alive = {each.cdata for each in storages if not each.expired()}  # type: ignore[no-untyped-call]
            self._known = {key: value for key, value in self._known.items() if key in alive}
            self._shared &= self._known.keys()  # a freed storage's number may be that of another one later
            self._limit = max(64, 2 * len(self._known))


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, but for those that have no storage, such as sparse ones."""
    if isinstance(value, Tensor):
        while functorch.is_functorch_wrapped_tensor(value):  # inside `torch.func.grad` or `vmap`
            value = functorch.get_unwrapped(value)
        return [value] if value.layout is torch.strided else []
    if type(value) in (tuple, list):
        return [each for part in value for each in _tensors(part)]
    if type(value) is dict:
        return _tensors(list(value.values()))
    if value is None or type(value) in (int, float, bool, str):
        return []
    leaves = pytree.tree_leaves(value)
    return [] if len(leaves) == 1 and leaves[0] is value else _tensors(leaves)
