"""TrainingData: how the training loaders of one worker get their share of the batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from polyrhythm.core.group import Group
from polyrhythm.core.lease import Lease
from polyrhythm.core.requests import ExamplesDue, ReturnLease, ShareEpoch, TakeLease
from polyrhythm.core.strategy import Strategy
from polyrhythm.session.context import WorldContext
from polyrhythm.session.data import SharedLoader
from polyrhythm.session.part import Parts
from polyrhythm.session.sharing import CohortPlace, CohortSharing, LeasedSharing, LockstepSharing, Sharing


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
        self._rank = context.me.rank
        self.loaders: list[SharedLoader] = []
        self._cohort: Sequence[int] = range(workers)  # in lockstep: the workers that share the current epoch
        self._cohort_number = 0  # how often the cohort has changed
        self._due = 0  # examples for this worker alone that it has not used yet

    @property
    def left_early(self) -> bool:
        """True if the script did not finish the last epoch of a loader."""
        return any(loader.left_early for loader in self.loaders)

    def share(self, loader: DataLoader[Any]) -> SharedLoader:
        """The loader that gives out this worker's share of the batches."""
        shared = SharedLoader(
            loader, self._sharing(len(self.loaders)), self._seed, self._on_batch, self._context.processes
        )
        self.loaders.append(shared)
        return shared

    def _sharing(self, number: int) -> Sharing:
        traits = self._strategy.traits
        if not traits.lockstep:
            return self._leased(number)
        if traits.survives:
            return self._by_cohort(number)
        averaged_with = self._averaged_with() if traits.weighted_by_examples else None
        return LockstepSharing(self._rank, self._workers, averaged_with)

    def _averaged_with(self) -> list[int]:
        """The ranks over which uneven batches are balanced by scaling; the strategy weights all others."""
        if self._strategy.parts[0].traits.weighted_by_examples:
            return [self._rank]
        return [peer.rank for peer in self._gradient_peers.members]

    def _leased(self, number: int) -> Sharing:
        def take(epoch: int, batches: int, unseen: int) -> Lease | None:
            steps, samples = self._parts.steps, self._parts.samples
            request = TakeLease(number, epoch, batches, unseen, steps=steps, samples=samples)
            return self._context.request(request).lease

        def give_back(unseen: int) -> None:
            self._context.request(ReturnLease(number, unseen))

        return LeasedSharing(self._workers, take, give_back)

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

    def _on_batch(self, samples: int, scale: float) -> None:
        self._parts.on_batch(samples, scale)
        self._due -= samples
