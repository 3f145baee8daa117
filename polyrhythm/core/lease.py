"""Lease: batches that a worker has taken to train on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lease:
    """Batches `first` to `first + count` of an epoch."""

    epoch: int
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count
