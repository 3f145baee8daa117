"""Decompressor and Compressor: both ends of a compressed link.

Both cut flat vectors into the same segments (see `segments`) and hand each to the codec. 16-bit numbers are
encoded as 32-bit ones, and their residual is kept in 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from polyrhythm.collectives.ring import bounds
from polyrhythm.compress import feedback as error_feedback
from polyrhythm.compress.segments import Segment, segments_of, wide
from polyrhythm.compress.transforms.base import needs_norm
from polyrhythm.core.errors import WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import SenderState
    from polyrhythm.core.codec import Codec
    from polyrhythm.model.layout import Layout


class Decompressor:
    """The receiving end: decodes the codes of a `Compressor` for the same range of the layout."""

    def __init__(self, codec: Codec, layout: Layout, start: int = 0, stop: int | None = None) -> None:
        self.codec, self.start = codec, start
        self.stop = layout.total if stop is None else stop
        self.segments = list(segments_of(codec, layout, start, self.stop))
        self.coded = [segment for segment in self.segments if segment.coded]
        for dtype in {kind for kind, _ in layout.kinds}:
            codec.prepare(wide(dtype))

    def dense(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The segments that travel as they are."""
        return [segment.of(vectors) for segment in self.segments if not segment.coded]

    def codable(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The segments that travel in codes."""
        return [segment.of(vectors) for segment in self.coded]

    def norm(self, vectors: Sequence[Tensor]) -> float:
        """The Euclidean norm of all coded segments together."""
        parts = self.codable(vectors)
        return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts))

    def combine(self, codes: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None:
        """Overwrites the coded segments with the mean over all workers, summed in rank order."""
        for each in codes:
            self._check_count(each, self.coded)
        for place, segment in enumerate(self.coded):
            target = segment.of(into)
            total = target if target.element_size() >= 4 else torch.empty_like(target, dtype=torch.float32)
            total.zero_()
            for given in codes:
                self.codec.decode(given[place], total)
            if len(codes) > 1:
                total.div_(len(codes))
            if total is not target:
                target.copy_(total)

    def add_chunk(self, codes: Sequence[Tensor], into: Sequence[Tensor], number: int, count: int) -> None:
        """Decodes chunk `number` of `count` and adds it to these segments."""
        for code, segment in zip(codes, into, strict=True):
            low, high = bounds(segment.numel(), count, number)
            self.codec.decode(code, segment[low:high])

    def combine_chunks(self, chunks: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None:
        """Overwrites the coded segments with the mean, from sums received in chunks, one per worker."""
        for each in chunks:
            self._check_count(each, self.coded)
        for place, segment in enumerate(self.coded):
            target = segment.of(into)
            total = torch.zeros_like(target, dtype=wide(target.dtype))
            for number, given in enumerate(chunks):
                self.add_chunk([given[place]], [total], number, len(chunks))
            target.copy_(total.div_(len(chunks)))

    def adopt(self, theirs: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Copies the coded segments of other vectors."""
        for source, target in zip(self.codable(theirs), self.codable(into), strict=True):
            target.copy_(source)

    def add(self, message: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Decodes the result of `Compressor.encode_all` and adds it to the vectors."""
        self._check_count(message, self.segments)
        for code, segment in zip(message, self.segments, strict=True):
            target = segment.of(into)
            if not segment.coded:
                _add_dense(code, target)
            elif target.element_size() >= 4:
                self.codec.decode(code, target)
            else:
                exact = target.float()
                self.codec.decode(code, exact)
                target.copy_(exact)

    def _check_count(self, given: Sequence[Tensor], wanted: Sequence[Segment]) -> None:
        if len(given) != len(wanted):
            raise WireError(f"received {len(given)} codes where {self.codec} makes {len(wanted)}")


class Compressor(Decompressor):
    """The sending end, with the sender's state for every coded segment."""

    def __init__(
        self,
        codec: Codec,
        state: SenderState,
        *,
        start: int = 0,
        stop: int | None = None,
        feedback: bool | None = None,
        whole_norm: Callable[[float], float] = float,
    ) -> None:
        """`whole_norm`: the norm of a vector of the whole model, from that of the part here."""
        super().__init__(codec, state.layout, start, stop)
        self.worker = state.worker
        self._needs_norm, self._whole_norm = needs_norm(codec), whole_norm
        keep = codec.feedback if feedback is None else feedback
        self.states = [state.segment(each, self.start, self.stop, keep) for each in self.coded]

    def values(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The coded segments in at least 32 bits: views of the vectors, or copies of 16-bit ones."""
        return [each if each.element_size() >= 4 else each.float() for each in self.codable(vectors)]

    def send(self, vectors: Sequence[Tensor], norm: float | None = None) -> list[Tensor]:
        """The codes of the coded segments; `norm` is that of all that is sent, if it is more than this."""
        if norm is None and self._needs_norm:
            norm = self._whole_norm(self.norm(vectors))
        codes = []
        for values, state in zip(self.values(vectors), self.states, strict=True):
            state.norm = norm
            codes.append(error_feedback.encode(self.codec, values, state))
            error_feedback.check_residual(self.codec, state.residual, self.worker)
            state.sent()
        return codes

    def encode_chunk(self, values: Sequence[Tensor], number: int, count: int) -> list[Tensor]:
        """The codes of chunk `number` of `count` of each of these segments. Each chunk has its own state."""
        codes = []
        for segment, state in zip(values, self.states, strict=True):
            low, high = bounds(segment.numel(), count, number)
            part = state.part(low, high)
            codes.append(error_feedback.encode(self.codec, segment[low:high], part))
            part.sent()
        return codes

    def encode_all(self, vectors: Sequence[Tensor], norm: float | None = None) -> list[Tensor]:
        """One tensor for each segment: its code, or the segment itself if it travels as it is."""
        codes = iter(self.send(vectors, norm))
        return [next(codes) if each.coded else each.of(vectors) for each in self.segments]

    def exchanged(self, values: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
        """Called when the mean over all workers is in what `values` returned: stores it in the vectors."""
        for target, mean, state in zip(self.codable(vectors), values, self.states, strict=True):
            state.sent()
            if mean.dtype != target.dtype:
                target.copy_(mean)

    def flush(self, vectors: Sequence[Tensor]) -> None:
        """Adds the residuals to the vectors, to be sent as they are, and clears them."""
        for target, state in zip(self.codable(vectors), self.states, strict=True):
            if state.residual is not None:
                target.add_(state.residual)
                state.residual.zero_()


def _add_dense(given: Tensor, target: Tensor) -> None:
    if given.numel() != target.numel() or given.dtype != target.dtype:
        raise WireError(
            f"received {given.numel()} uncompressed numbers ({given.dtype}) in place of {target.numel()} "
            f"({target.dtype})"
        )
    target.add_(given.to(target.device))
