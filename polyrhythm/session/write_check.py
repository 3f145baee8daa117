"""WriteCheck: finds parameters that the script changes where the next step would overwrite the change.

Under servers a worker's parameters are copies, and under `broadcast` each step computes them from the updates
of all workers. `p.data.clamp_(...)` after a step changes them only until then, and leaves no trace in
PyTorch. So a few elements of each parameter are compared in every step, and all of them in the first steps
and every so often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.core.worker import Worker
from polyrhythm.model.replica import Replica
from polyrhythm.session.loading import WORDS, checksum

FIRST, EVERY = 3, 100  # the steps before which all elements are compared
SAMPLED = 16  # elements of each parameter that are compared before all others
_EVALUATE = "after evaluating other values, put the trained ones back from a copy"


class WriteCheck:
    """Compares the parameters with those that the strategy wrote last."""

    def __init__(self, worker: Worker, replica: Replica) -> None:
        self._worker, self._replica = worker, replica
        self._sampled = [_sample(replica, part) for part in range(len(replica.parameters))]
        self._viewed: Sequence[Tensor] = ()  # vectors on a CPU,
        self._views: list[np.ndarray[Any, Any]] = []  # and what NumPy sees of them
        self.written()

    def written(self) -> None:
        """Called when the strategy has written the parameters."""
        steps = self._replica.steps
        self._elements = self._read()
        self._sums = self._checksums() if steps <= FIRST or steps % EVERY == 0 else []

    def check(self) -> None:
        """Raises UsageError if the script has changed parameters since `written`."""
        name, strategy = self.changed(), self._worker.strategy
        if name is None:
            return
        if self._frozen(name):
            raise UsageError(
                f"the script changed {name}, which is frozen, and under {strategy} the next step overwrites "
                "that: leave parameters that the script computes itself out of the optimizer"
            )
        if strategy.traits.uses_servers:
            raise UsageError(
                f"the script changed {name} outside optimizer.step(), and under {strategy} servers overwrite "
                "that: change it in step() of an optimizer of your own, which servers call, or use a "
                f"strategy without servers, such as allreduce; {_EVALUATE}"
            )
        raise UsageError(
            f"the script changed {name} outside optimizer.step(), and under {strategy} the next step "
            "overwrites that: parameters are computed from the updates of all workers; use a strategy that "
            f"keeps such changes, such as allreduce; {_EVALUATE}"
        )

    def changed(self) -> str | None:
        """The name of the first parameter that the script has changed since `written`, if any."""
        pieces, elements = self._replica.layout.pieces, self._read()
        if elements == self._elements and not self._sums:
            return None
        for part, (before, now) in enumerate(zip(self._elements, elements, strict=True)):
            if before != now:
                size = self._replica.parameters[part].itemsize
                at = int(self._sampled[part][_first_difference(before, now) // size])
                return next(
                    each.name for each in pieces if each.part == part and each.start <= at < each.stop
                )
        sums = zip(pieces, self._sums, self._checksums(), strict=True)
        return next((piece.name for piece, before, now in sums if now != before), None)

    def _frozen(self, name: str) -> bool:
        layout = self._replica.layout
        pairs = zip(layout.pieces, layout.parameters, strict=True)
        return any(piece.name == name and not parameter.requires_grad for piece, parameter in pairs)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Surrounds the saving of a state, in which some strategies write the parameters."""
        rebuilds = self._worker.strategy.traits.rebuilds_parameters
        if rebuilds:
            self.check()
        yield
        if rebuilds:
            self.written()

    def _read(self) -> list[bytes]:
        """The sampled elements."""
        vectors = self._replica.parameters
        if vectors is not self._viewed:
            if any(vector.device.type != "cpu" for vector in vectors):
                return [
                    _bits(vector[at]).tobytes() for vector, at in zip(vectors, self._sampled, strict=True)
                ]
            self._viewed, self._views = vectors, [_bits(vector) for vector in vectors]
        return [view.take(at).tobytes() for view, at in zip(self._views, self._sampled, strict=True)]

    def _checksums(self) -> list[int]:
        layout, vectors = self._replica.layout, self._replica.parameters
        return [checksum(vectors[piece.part][piece.start : piece.stop]) for piece in layout.pieces]


def _bits(vector: Tensor) -> np.ndarray[Any, Any]:
    """The elements of a vector as numbers that NumPy knows, in the vector's own memory on a CPU."""
    known = vector.detach().cpu()
    return known.view(WORDS[known.itemsize]).numpy() if known.itemsize in WORDS else known.numpy()


def _first_difference(one: bytes, other: bytes) -> int:
    return next(index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def _sample(replica: Replica, part: int) -> np.ndarray[Any, Any]:
    """The places of a few elements of each parameter in one of the flat vectors."""
    found = [
        np.linspace(piece.start, piece.stop - 1, min(SAMPLED, piece.stop - piece.start)).astype(np.int64)
        for piece in replica.layout.pieces
        if piece.part == part and piece.stop > piece.start
    ]
    return np.concatenate([np.empty(0, dtype=np.int64), *found])


def write_check(worker: Worker, replica: Replica) -> WriteCheck | None:
    """The check of one part; None where the worker's own parameters are what is trained."""
    traits = worker.strategy.traits
    pulls = traits.uses_servers and worker.strategy.exchanges == "gradients"
    return WriteCheck(worker, replica) if pulls or traits.rebuilds_parameters else None
