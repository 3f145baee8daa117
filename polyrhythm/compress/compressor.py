"""Coder and Sender: flat vectors cut into stretches, each of which a codec sees by itself.

The stretches follow from the codec, the layout of the model and the range of it that is sent, so both ends
know them. A layer that travels `dense` is a stretch without a code. Numbers of 16 bits are coded as 32-bit
ones, and what is kept of them is kept in 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from polyrhythm.collectives.ring import bounds
from polyrhythm.compress.state import CodecState
from polyrhythm.core.errors import NotFinite, UsageError, WireError
from polyrhythm.model.vectors import cut

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.codec import Codec
    from polyrhythm.model.layout import Layout, Piece


class Home(Protocol):
    """Where a sender keeps what it remembers: a replica or a shard."""

    notes: dict[str, Any]

    def buffer(self, name: str, exact: bool = False) -> tuple[Tensor, ...]: ...


class Segment(NamedTuple):
    """From `low` to `high` of one of the vectors that are sent."""

    part: int
    low: int
    high: int
    shapes: tuple[tuple[int, ...], ...]  # of the tensors in it; one that is cut is flat
    coded: bool

    def of(self, vectors: Sequence[Tensor]) -> Tensor:
        return vectors[self.part][self.low : self.high]


class Decompressor:
    """What is known at both ends: how vectors that are a range of the layout are cut, and how to decode."""

    def __init__(self, codec: Codec, layout: Layout, start: int = 0, stop: int | None = None) -> None:
        self.codec, self.start = codec, start
        self.stop = layout.total if stop is None else stop
        self.segments = list(_segments(codec, layout, start, self.stop))
        self.coded = [each for each in self.segments if each.coded]
        for dtype in {kind for kind, _ in layout.kinds}:
            codec.prepare(wide(dtype))

    def plain(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """What of the vectors travels as it is."""
        return [each.of(vectors) for each in self.segments if not each.coded]

    def codable(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """What of the vectors travels in codes."""
        return [each.of(vectors) for each in self.coded]

    def combine(self, codes: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None:
        """Overwrites what is coded of the vectors with the mean of what all sent, added up in rank order."""
        for each in codes:
            self._count(each, self.coded)
        for place, segment in enumerate(self.coded):
            target = segment.of(into)
            total = target if target.element_size() >= 4 else torch.empty_like(target, dtype=torch.float32)
            total.zero_()
            for given in codes:
                self.codec.decode(given[place], total)
            if len(codes) > 1:
                total.div_(len(codes))
            self.codec.agree(total)
            if total is not target:
                target.copy_(total)

    def combine_chunks(self, chunks: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None:
        """Overwrites what is coded of the vectors with the mean whose sum came in chunks, one per worker."""
        for each in chunks:
            self._count(each, self.coded)
        for place, segment in enumerate(self.coded):
            target = segment.of(into)
            total = torch.zeros_like(target, dtype=wide(target.dtype))
            for number, given in enumerate(chunks):
                low, high = bounds(total.numel(), len(chunks), number)
                self.codec.decode(given[place], total[low:high])
            self.codec.agree(total.div_(len(chunks)))
            target.copy_(total)

    def norm(self, vectors: Sequence[Tensor]) -> float:
        """The Euclidean length of all that is coded of the vectors."""
        parts = [segment.of(vectors) for segment in self.coded]
        return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts))

    def adopt(self, theirs: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Copies what is coded of other vectors."""
        for segment in self.coded:
            segment.of(into).copy_(segment.of(theirs))

    def agree(self, mean: Sequence[Tensor]) -> None:
        """Makes of the mean of what all have sent what all go on with."""
        for segment in self.coded:
            self.codec.agree(segment.of(mean))

    def add(self, given: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Adds what `Sender.everything` has made to the vectors."""
        self._count(given, self.segments)
        for code, segment in zip(given, self.segments, strict=True):
            target = segment.of(into)
            if not segment.coded:
                if code.numel() != target.numel() or code.dtype != target.dtype:
                    raise WireError(
                        f"{code.numel()} numbers ({code.dtype}) came where {target.numel()} ({target.dtype}) "
                        "travel as they are"
                    )
                target.add_(code.to(target.device))
            elif target.element_size() >= 4:
                self.codec.decode(code, target)
            else:
                exact = target.float()
                self.codec.decode(code, exact)
                target.copy_(exact)

    def _count(self, given: Sequence[Tensor], wanted: Sequence[Segment]) -> None:
        if len(given) != len(wanted):
            raise WireError(f"{len(given)} codes came where {self.codec} makes {len(wanted)}")


class Compressor(Decompressor):
    """One end that sends, with its memory of every stretch."""

    def __init__(
        self,
        codec: Codec,
        layout: Layout,
        home: Home,
        name: str,
        *,
        start: int = 0,
        stop: int | None = None,
        feedback: bool | None = None,
        seed: int = 0,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        super().__init__(codec, layout, start, stop)
        self.worker = worker
        kept = home.notes.setdefault("codecs", {})

        def memory(segment: Segment) -> CodecState:
            place = f"{name} {start} {segment.part} {segment.low}"

            def vector(what: str) -> Tensor:
                return segment.of(self._mine(home.buffer(f"{name}: {what}", exact=True)))

            return CodecState(
                vector, kept.setdefault(place, {}), shapes=segment.shapes, place=place, seed=seed,
                worker=worker, workers=workers, feedback=codec.feedback if feedback is None else feedback,
            )  # fmt: skip

        self.memories = [memory(segment) for segment in self.coded]

    def _mine(self, vectors: Sequence[Tensor]) -> Sequence[Tensor]:
        """A buffer may be that of the whole layout, or of this range only."""
        whole = sum(vector.numel() for vector in vectors) != self.stop - self.start
        return cut(vectors, self.start, self.stop) if whole else vectors

    def pairs(self, vectors: Sequence[Tensor]) -> list[tuple[Tensor, CodecState]]:
        """What is coded of the vectors, stretch by stretch, with what is remembered of each."""
        values = [segment.of(vectors) for segment in self.coded]
        exact = [each if each.element_size() >= 4 else each.float() for each in values]
        return list(zip(exact, self.memories, strict=True))

    def send(self, vectors: Sequence[Tensor], norm: float | None = None) -> list[Tensor]:
        """The codes of all that is coded of the vectors; `norm` is its length, if more than this is sent."""
        codes = []
        if norm is None and self.codec.needs_norm:
            norm = self.norm(vectors)
        for values, memory in self.pairs(vectors):
            memory.norm = norm
            codes.append(self.codec.send(values, memory))
            self._check(memory)
            memory.sent()
        return codes

    def _check(self, memory: CodecState) -> None:
        """Raises `NotFinite` if what waits has overflowed, though all that came was finite."""
        residual = memory.residual
        # A sum takes a small part of the time that coding does; but that of large numbers may overflow too.
        if residual is None or math.isfinite(float(residual.sum())) or bool(torch.isfinite(residual).all()):
            return
        raise NotFinite(
            f"worker {self.worker}: what {self.codec} has not sent yet has grown beyond the largest number "
            f"({residual.dtype}): lower the learning rate, clip gradients, or send more of them at a time"
        )

    def sent(self, pairs: Sequence[tuple[Tensor, CodecState]], vectors: Sequence[Tensor]) -> None:
        """All workers have exchanged these, and their mean is in its place."""
        for segment, (values, memory) in zip(self.coded, pairs, strict=True):
            memory.sent()
            if values.dtype != vectors[segment.part].dtype:
                segment.of(vectors).copy_(values)

    def everything(self, vectors: Sequence[Tensor], norm: float | None = None) -> list[Tensor]:
        """One tensor for each stretch: its code, or as it is."""
        codes = iter(self.send(vectors, norm))
        return [next(codes) if each.coded else each.of(vectors) for each in self.segments]

    def settle(self, vectors: Sequence[Tensor]) -> None:
        """Adds all that was not sent yet to the vectors: it is owed no longer."""
        for segment, memory in zip(self.coded, self.memories, strict=True):
            if memory.residual is not None:
                segment.of(vectors).add_(memory.residual)
                memory.residual.zero_()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The numbers that those of this kind are coded as."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def _segments(codec: Codec, layout: Layout, start: int, stop: int) -> Iterator[Segment]:
    """What lies side by side and travels the same way is one, but with `per=layer` each tensor."""
    asked = [word for word in codec.dense.split("/") if word]
    for word in asked:
        if word != "1d" and not any_within((piece.name for piece in layout.pieces), word):
            known = ", ".join(
                dict.fromkeys(piece.name.rpartition(".")[0] or piece.name for piece in layout.pieces)
            )
            raise UsageError(f"{codec}: the model has no layer {word!r} to leave as it is; it has: {known}")
    offsets = [0] * len(layout.counts)
    open_: Segment | None = None
    for _, piece, low, high in layout.groups(start, stop):
        begin = offsets[piece.part]
        end = offsets[piece.part] = begin + high - low
        shape = tuple(piece.shape) if high - low == piece.shape.numel() else (high - low,)
        coded = not any(_left_out(piece, word) for word in asked)
        new = Segment(piece.part, begin, end, (shape,), coded)
        joins = codec.per == "vector" or not coded
        if open_ and joins and (open_.part, open_.high, open_.coded) == (new.part, begin, coded):
            open_ = open_._replace(high=end, shapes=(*open_.shapes, shape))
            continue
        if open_:
            yield open_
        open_ = new
    if open_:
        yield open_


def any_within(names: Iterable[str], layer: str) -> bool:
    """Whether one of these parameters is in that layer, or is it."""
    return any(name == layer or name.startswith(f"{layer}.") for name in names)


def _left_out(piece: Piece, word: str) -> bool:
    return len(piece.shape) <= 1 if word == "1d" else any_within([piece.name], word)
