"""The codec state of a DDP bucket, which follows its parameters when DDP rebuilds the buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.compress.segments import Segment
from polyrhythm.compress.state import CodecState, SenderState
from polyrhythm.core.errors import UsageError
from polyrhythm.core.worker import State
from polyrhythm.model.layout import Layout, Piece


class BucketLayout(Layout):
    """The layout of one bucket: parameters of one dtype, by name."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], like: Tensor) -> None:
        self.parameters, self.pieces, self.total = [], [], 0
        for name, shape in shapes.items():
            self.pieces.append(Piece(name, torch.Size(shape), 0, 0, self.total))
            self.total = self.pieces[-1].stop
        self.kinds, self.counts = [(like.dtype, like.device)], [self.total]


class BucketState(SenderState):
    """The codec state of a bucket.

    A state that was loaded, or whose bucket no longer exists, is only a source for new ones.
    """

    def __init__(self, layout: BucketLayout, seed: int = 0, worker: int = 0, workers: int = 1) -> None:
        super().__init__(layout, name="ddp", seed=seed, worker=worker, workers=workers)
        self.places = {piece.name: (piece.start, piece.stop) for piece in layout.pieces}
        self._bounds: dict[str, tuple[int, int]] = {}  # start and stop of each segment, by its place

    def segment(self, segment: Segment, start: int, stop: int, feedback: bool) -> CodecState:
        self._bounds[self.segment_name(segment, start)] = segment.low, segment.high
        return super().segment(segment, start, stop, feedback)

    def scale(self, name: str, factor: float) -> None:
        """Multiplies the residual of a parameter by a factor."""
        start, stop = self.places[name]
        for part in self.vectors.get("residual", ()):
            part[start:stop] *= factor

    def take_vectors(self, states: Mapping[str, BucketState]) -> None:
        """Copies the vectors of each parameter from the state that had it, by name."""
        for name, (start, stop) in self.places.items():
            if name not in states:
                continue
            low, high = states[name].places[name]
            if high - low != stop - start:
                raise UsageError(f"parameter {name} has {stop - start} elements, but had {high - low} before")
            for what, (vector,) in states[name].vectors.items():
                self.vector(what)[0][start:stop] = vector[low:high]

    def take_segments(self, states: Mapping[str, BucketState]) -> None:
        """Continues each segment from the one that had its first parameter.

        Tensors of a codec's own state are kept only if the segment has the same parameters as before.
        """
        taken: State = {}
        for place, bounds in self._bounds.items():
            names = self._inside(bounds)
            before = states.get(names[0]) if names else None
            for then, saved in before._by_names() if before is not None else ():
                if names[0] in then:
                    taken[place] = saved if then == names else _without_tensors(saved)
        self.load_segments(taken)

    def _by_names(self) -> list[tuple[list[str], State]]:
        """The parameters in each segment, and its state."""
        saved = self.segments_dict()
        return [(self._inside(bounds), saved[place]) for place, bounds in self._bounds.items()]

    def _inside(self, bounds: tuple[int, int]) -> list[str]:
        low, high = bounds
        return [name for name, (start, stop) in self.places.items() if low <= start < stop <= high]

    def state_dict(self) -> State:
        shapes = {piece.name: tuple(piece.shape) for piece in self.layout.pieces}
        ((dtype, device),) = self.layout.kinds
        return {
            **super().state_dict(), "shapes": shapes, "bounds": dict(self._bounds),
            "like": torch.empty(0, dtype=dtype, device=device),
        }  # fmt: skip

    @classmethod
    def loaded(cls, saved: State) -> BucketState:
        state = cls(BucketLayout(saved["shapes"], saved["like"]))
        state._bounds = {place: (low, high) for place, (low, high) in saved["bounds"].items()}
        state.load_state_dict(saved)
        return state


def _without_tensors(saved: State) -> State:
    def plain(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if not isinstance(value, Tensor)}

    return {**saved, "own": {name: plain(fields) for name, fields in saved["own"].items()}}
