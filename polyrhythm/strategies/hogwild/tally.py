"""Tally: counts lost updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from polyrhythm.core.node import Lock, Node
    from polyrhythm.model.replica import Replica

    Array = np.ndarray[Any, Any]

MAX_ROWS = 1 << 16  # of a tensor on which updates are counted
MAX_COMPILED = 1 << 12  # the same for compiled loops: their steps are so short that more would double them
LINE = 8  # words of a cache line


class UpdateCounters(NamedTuple):
    """Where a compiled loop counts updates: one counter per 2^shift rows, and this worker's own count."""

    counts: Array
    shift: int
    made: Array


@runtime_checkable
class CountsUpdates(Protocol):
    """An optimizer whose compiled loop counts updates by itself, such as `SparseSGD`."""

    def share(self, rank: int, counters: UpdateCounters, lock: Lock | None) -> None:
        """Counts updates in shared memory from here on, and takes the lock, if any, for each row."""


class Tally:
    """Counts updates where they are made, by integers in shared memory that are not locked either.

    Each step increments the counters of the rows that it has touched, in the same way as it updates the rows:
    read, add, write. Each worker also counts its own increments. The difference in the end is the number of
    lost updates. Of a tensor with many rows only a sample is counted, the same at every step and on every
    worker.
    """

    def __init__(self, node: Node, replica: Replica, workers: int) -> None:
        import torch

        # Of each parameter: where its counters begin and end, and log2 of the rows for each counter.
        self._places: list[tuple[int, int, int]] = []
        self._compiled = isinstance(replica.optimizer, CountsUpdates)
        most = MAX_COMPILED if self._compiled else MAX_ROWS
        stop = 0
        for piece in replica.layout.pieces:
            rows = piece.shape[0] if piece.shape else 1
            shift = max(0, (rows - 1).bit_length() - (most - 1).bit_length())
            start, stop = stop, stop + -(-rows // (1 << shift))
            self._places.append((start, stop, shift))
        self._counts = node.memory.shared("counts", stop, torch.int64).numpy()
        # A cache line for each worker. A replacement continues with the number of its predecessor.
        self._made = node.memory.shared("made", LINE * workers, torch.int64).numpy()
        self._mine = LINE * node.rank
        # Updates that were counted, and of these lost, before the checkpoint that the run resumed from.
        self._before = node.memory.shared("updates before", 2, torch.int64)

    def count(self, replica: Replica) -> None:
        """Counts the updates of the step that was just taken."""
        import numpy as np

        if self._compiled:  # gradients that `backward()` may have left are not used
            return
        made = self._mine
        for parameter, (start, stop, shift) in zip(replica.layout.parameters, self._places, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            counts = self._counts[start:stop]
            if gradient.is_sparse:
                rows = gradient._indices().numpy()[0]
                if shift:
                    rows = rows[rows & ((1 << shift) - 1) == 0] >> shift
                self._made[made] += len(rows)
                np.add.at(counts, rows, 1)
            else:
                self._made[made] += stop - start
                counts += 1

    def counters(self, number: int) -> UpdateCounters:
        """Where a compiled loop counts the updates of one parameter."""
        start, stop, shift = self._places[number]
        return UpdateCounters(self._counts[start:stop], shift, self._made[self._mine : self._mine + 1])

    def result(self) -> tuple[int, int]:
        """The number of updates that all workers have counted, and how many of these were lost."""
        made, (before, lost) = int(self._made.sum()), self._before.tolist()
        return before + made, lost + made - int(self._counts.sum())

    def resume(self, counted: int, lost: int) -> None:
        """Adds what the run had counted when it was saved."""
        self._before[0], self._before[1] = counted, lost
