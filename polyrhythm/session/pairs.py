"""Pairs: finds training loaders that a script iterates together and that would lose their pairing.

`zip(images, labels)` of two loaders in a fixed order pairs batches of the same number. Workers in lockstep
divide both loaders in the same way, if both have the same `batch_size`, or if the batches of both stay whole
(those of a batch sampler or a stream). Workers that lease batches take those of each loader as they go, so
nothing keeps pairs together. Loaders that are shuffled independently of each other, or have different numbers
of batches, have no pairs to lose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from polyrhythm.session.order import Order

ADVICE = "use one dataset that returns both, such as torch.utils.data.StackDataset"


class Iterated(Protocol):
    """One iteration of the script over a loader."""

    given: int  # batches


class Paired(Protocol):
    """A training loader."""

    epoch: int
    order: Order

    @property
    def iteration(self) -> Iterated | None:
        """The open iteration."""


class Pairs:
    """Watches which loaders give their batches in turns. `leased`: nothing keeps pairs together."""

    def __init__(self, leased: bool) -> None:
        self._leased = leased
        self._turn = 0
        self._last: dict[Paired, tuple[object, int]] = {}  # by loader: its last iteration and turn

    def give(self, loader: Paired) -> None:
        """The script gets a batch of a loader."""
        self._turn += 1
        if loader.iteration is not None and loader.iteration.given == 1:  # the second batch
            _, first = self._last[loader]
            for other, (its, at) in self._last.items():
                if at > first and its is other.iteration:
                    self._check(loader, other)
        self._last[loader] = loader.iteration, self._turn

    def _check(self, loader: Paired, other: Paired) -> None:
        one, two = loader.order, other.order
        if not _paired(one, loader.epoch, two, other.epoch):
            return
        if self._leased:
            raise UsageError(
                "two training loaders in the same order are iterated together, as by zip(), but each worker "
                f"leases the batches of each as it goes, so pairs are lost: {ADVICE}, or a strategy in "
                "lockstep such as allreduce"
            )
        if one.splits != two.splits or (one.splits and one.batch_size != two.batch_size):
            raise UsageError(
                "two training loaders in the same order are iterated together, as by zip(), but workers "
                f"divide their batches differently, so pairs are lost: {ADVICE}, or give both the same "
                "batch_size and no batch sampler or stream"
            )


def _paired(one: Order, epoch: int, other: Order, others: int) -> bool:
    """True if two loaders have equally many batches, as far as they say, in a fixed or the same order."""
    try:
        if len(one) != len(other):
            return False
    except TypeError:  # a stream
        pass
    digest = one.digest(epoch)
    return (one.fixed and other.fixed) or (bool(digest) and digest == other.digest(others))
