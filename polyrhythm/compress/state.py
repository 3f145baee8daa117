"""What a sender keeps between messages: CodecState for one segment, SenderState for all of them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from polyrhythm.compress.segments import Segment, wide
from polyrhythm.core.worker import State
from polyrhythm.model.layout import Empty, Layout, private
from polyrhythm.model.vectors import cloned, copied, cut

if TYPE_CHECKING:
    from torch import Tensor

Own = TypeVar("Own")


class CodecState:
    """One sender's state for one segment.

    `residual` is what was not sent yet, or None without feedback. `count` is the number of messages sent. A
    codec keeps vectors as long as the segment with `vector`, and anything else in a dataclass with `own`.
    """

    def __init__(
        self,
        vector: Callable[[str], Tensor],
        *,
        shapes: Sequence[tuple[int, ...]],
        feedback: bool,
        seed: int = 0,
        worker: int = 0,
        workers: int = 1,
        name: str = "",
    ) -> None:
        self.vector = vector  # a vector as long as the segment, by name; kept, and zero at first
        self.shapes = tuple(shapes)  # of the tensors in the segment, in order; one that is cut is flat
        self.workers = workers
        self.residual = vector("residual") if feedback else None
        self.norm: float | None = None  # of all that is sent at once, if a transform needs it; not saved
        self.count = 0
        self._origin = seed, name, worker
        self._own: dict[str, Any] = {}
        self._parts: dict[int, CodecState] = {}
        self._saved: State = {"own": {}, "parts": {}}  # loaded, and not used yet

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
        """The state for a segment of `count` numbers that belongs to no sender."""
        vectors: dict[str, Tensor] = {}

        def vector(name: str) -> Tensor:
            return vectors.setdefault(name, torch.zeros(count, dtype=dtype or torch.float32))

        return cls(
            vector, shapes=shapes if shapes is not None else [(count,)], feedback=feedback, seed=seed,
            worker=worker, workers=workers,
        )  # fmt: skip

    def own(self, kind: type[Own]) -> Own:
        """The state that a codec defines for itself: a dataclass with defaults, made on first use."""
        name = kind.__name__
        if name not in self._own:
            self._own[name] = kind(**self._saved["own"].pop(name, {}))
        return cast(Own, self._own[name])

    def part(self, low: int, high: int) -> CodecState:
        """The state for elements `low` to `high` of the segment, when they are encoded separately."""
        seed, name, worker = self._origin
        part = self._parts.get(low)
        if part is None or part.shapes != ((high - low,),):
            saved = self._saved["parts"].pop(low, None) if part is None else part.state_dict()
            part = self._parts[low] = CodecState(
                lambda name: self.vector(name)[low:high], shapes=[(high - low,)],
                feedback=self.residual is not None, seed=seed, worker=worker, workers=self.workers,
                name=f"{name} from {low}",
            )  # fmt: skip
            part.load_state_dict(saved or {})
        return part

    def sent(self) -> None:
        """Counts one more message."""
        self.count += 1

    def stream(self) -> int:
        """A 64-bit seed for the next message, different on every worker."""
        return _hashed(*self._origin, self.count)

    def shared_stream(self) -> int:
        """A 64-bit seed for the next message, equal on all workers that have sent equally many."""
        seed, name, _ = self._origin
        return _hashed(seed, name, "all", self.count)

    def state_dict(self) -> State:
        """The count and the codec's own state. Vectors are saved by the `SenderState`."""
        own = {name: copy.deepcopy(vars(each)) for name, each in self._own.items()}
        parts = {low: part.state_dict() for low, part in self._parts.items()}
        saved = copy.deepcopy(self._saved)
        return {
            "count": self.count,
            "own": {**saved["own"], **own},
            "parts": {**saved["parts"], **parts},
        }

    def load_state_dict(self, state: State) -> None:
        """Continues from what `state_dict` returned; from nothing if it is empty."""
        self.count = state.get("count", 0)
        self._own, self._parts = {}, {}
        self._saved = copy.deepcopy({name: state.get(name, {}) for name in ("own", "parts")})


def _hashed(*words: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little")


class SenderState:
    """All that one sender keeps for its codec: flat vectors by name, and the state of each segment.

    The vectors cover the layout from `start` to `stop`. `name` and `worker` tell senders apart, so that
    random codecs draw differently in each; `workers` is how many there are.
    """

    def __init__(
        self,
        layout: Layout,
        empty: Empty = private,
        start: int = 0,
        stop: int | None = None,
        *,
        name: str = "sent",
        seed: int = 0,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self.layout, self.start = layout, start
        self.stop = layout.total if stop is None else stop
        self.name, self.seed, self.worker, self.workers = name, seed, worker, workers
        self.vectors: dict[str, tuple[Tensor, ...]] = {}
        self._empty = empty
        self._segments: dict[str, CodecState] = {}
        self._saved: State = {}  # loaded, and not used yet

    def vector(self, name: str) -> tuple[Tensor, ...]:
        """Flat vectors by name, in at least 32 bits; kept, and zero at first."""
        if name not in self.vectors:
            self.vectors[name] = self._new()
        return self.vectors[name]

    def _new(self) -> tuple[Tensor, ...]:
        vectors, offset = [], 0
        for (dtype, device), count in zip(self.layout.kinds, self.layout.counts, strict=True):
            size = min(self.stop - offset, count) - max(self.start - offset, 0)
            vectors.append(self._empty(max(size, 0), wide(dtype), device).zero_())
            offset += count
        return tuple(vectors)

    def segment_name(self, segment: Segment, start: int) -> str:
        """A name for a segment of the range from `start` on. It is part of the seed of random codecs."""
        return f"{self.name} {start} {segment.part} {segment.low}"

    def segment(self, segment: Segment, start: int, stop: int, feedback: bool) -> CodecState:
        """The state for one segment of the range from `start` to `stop`."""
        name = self.segment_name(segment, start)
        if name not in self._segments:

            def vector(name: str) -> Tensor:
                return segment.of(cut(self.vector(name), start - self.start, stop - self.start))

            state = self._segments[name] = CodecState(
                vector, shapes=segment.shapes, feedback=feedback, seed=self.seed, worker=self.worker,
                workers=self.workers, name=name,
            )  # fmt: skip
            state.load_state_dict(self._saved.pop(name, {}))
        return self._segments[name]

    def segments_dict(self) -> State:
        """The state of each segment, by its name."""
        return {**self._saved, **{name: each.state_dict() for name, each in self._segments.items()}}

    def load_segments(self, state: State) -> None:
        """Continues from what `segments_dict` returned."""
        self._saved = copy.deepcopy(state)
        for name, segment in self._segments.items():
            segment.load_state_dict(self._saved.pop(name, {}))

    def state_dict(self) -> State:
        vectors = {name: cloned(parts) for name, parts in self.vectors.items()}
        return {"vectors": vectors, "segments": self.segments_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continues from what `state_dict` returned, in place: segments are views of the vectors."""
        for name in self.vectors.keys() - state["vectors"].keys():
            for part in self.vectors[name]:
                part.zero_()
        for name, saved in state["vectors"].items():
            copied(saved, self.vector(name))
        self.load_segments(state["segments"])
