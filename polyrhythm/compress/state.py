"""Memory: what a sender keeps for one stretch of the flat vectors that it sends through a codec.

What has not been sent yet, above all. All of it lives in the replica, or in the shard, whose it is: a memory
is a view of its buffers and notes, so that it is saved with them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.model.layout import Empty, Layout


class CodecState:
    """What one sender keeps for one stretch."""

    def __init__(
        self,
        vector: Callable[[str], Tensor],
        notes: dict[str, Any],
        *,
        shapes: Sequence[tuple[int, ...]],
        feedback: bool,
        seed: int = 0,
        worker: int = 0,
        workers: int = 1,
        place: str = "",
    ) -> None:
        self.buffer = vector  # a persistent flat vector like the stretch, by name; zero at first
        self.shapes = tuple(shapes)  # of the tensors in the stretch, in order; one that is cut is flat
        self.workers = workers  # how many there are
        self.residual = vector("residual") if feedback else None  # what was not sent yet
        # The length of all coded stretches that are sent at once, for a codec that needs it; not kept.
        self.norm: float | None = None
        self.numbers: dict[str, float] = notes.setdefault("numbers", {})
        self.tensors: dict[str, Tensor] = notes.setdefault("tensors", {})
        notes.setdefault("count", 0)
        self._notes = notes
        self._origin = seed, place, worker

    @classmethod
    def alone(
        cls,
        count: int,
        *,
        feedback: bool = True,
        shapes: Sequence[tuple[int, ...]] | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        worker: int = 0,
        workers: int = 1,
    ) -> CodecState:
        """A memory that belongs to nobody else, for a stretch of `count` numbers."""
        import torch

        vectors: dict[str, Tensor] = {}

        def vector(name: str) -> Tensor:
            return vectors.setdefault(name, torch.zeros(count, dtype=dtype or torch.float32))

        return cls(
            vector, {}, shapes=shapes if shapes is not None else [(count,)], feedback=feedback, seed=seed,
            worker=worker, workers=workers,
        )  # fmt: skip

    def part(self, low: int, high: int) -> CodecState:
        """The memory of a part of the stretch that is coded by itself."""
        seed, place, worker = self._origin
        return CodecState(
            lambda name: self.buffer(name)[low:high],
            self._notes.setdefault(f"from {low}", {}),
            shapes=[(high - low,)],
            feedback=self.residual is not None,
            seed=seed,
            worker=worker,
            workers=self.workers,
            place=f"{place} from {low}",
        )

    @property
    def count(self) -> int:
        """How often something was sent before."""
        return int(self._notes["count"])

    def sent(self) -> None:
        """Something was sent."""
        self._notes["count"] += 1

    def stream(self) -> int:
        """A 64-bit seed for what is drawn now, another on every worker and every time."""
        return _mixed(*self._origin, self.count)

    def shared_stream(self) -> int:
        """The same on all workers that have sent equally often."""
        seed, place, _ = self._origin
        return _mixed(seed, place, "all", self.count)


def _mixed(*words: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little")


class SenderState:
    """All that a sender keeps for its codec: vectors and notes by name."""

    def __init__(self, layout: Layout, empty: Empty) -> None:
        self._layout, self._empty = layout, empty
        self.vectors: dict[str, tuple[Tensor, ...]] = {}
        self.notes: dict[str, Any] = {}

    def buffer(self, name: str, exact: bool = True) -> tuple[Tensor, ...]:
        """Persistent flat vectors by name, in at least 32 bits, zero at first."""
        if name not in self.vectors:
            self.vectors[name] = self._layout.vectors(self._empty, exact)
            for vector in self.vectors[name]:
                vector.zero_()
        return self.vectors[name]

    def state_dict(self) -> dict[str, Any]:
        vectors = {name: [part.clone() for part in parts] for name, parts in self.vectors.items()}
        return {"vectors": vectors, "notes": copy.deepcopy(self.notes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parts in state["vectors"].items():
            for place, part in zip(self.buffer(name), parts, strict=True):
                place.copy_(part)
        self.notes = copy.deepcopy(state["notes"])
