"""PowerSGD: the gradient of a matrix as the product of two thin ones, found by a step of power iteration."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from polyrhythm.compress.kernels.algebra import add_product, orthonormal
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState
    from polyrhythm.core.group import Group

# A worker's own code: the header, the place of each matrix, then P of each, Q of each, and what is in none.
HEADER = struct.Struct("<4Q")  # bytes of a number, rank, how many values, how many matrices
PLACE = struct.Struct("<3Q")  # start, rows, columns


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Each matrix travels as the product of two thin ones, found together by a step of power iteration.

    M_i = G_i + E_i; P = mean of M_i Q, made orthonormal; Q = mean of M_i^T P; all go on with P Q^T, and
    E_i <- M_i - P (M_i^T P)^T. These are two rounds of all workers, one all-reduce each. The next step goes
    on from this one's Q (`warm`), or from a random one, like the first. Momentum is the optimizer's, after.

    Of a tensor of more than two dimensions the first is the rows. One of a single dimension, such as a matrix
    that is cut between servers, is laid out nearly square, and what is left over travels as it is. So does a
    matrix if P and Q would be no shorter: with a rank as large as either side the mean is exact. To a server
    each worker sends a P and Q of its own.

    >>> import polyrhythm as pr
    >>> pr.parse("allreduce+powersgd:4").codec.rank
    4
    """

    name: ClassVar[str] = "powersgd"
    main: ClassVar[str | None] = "rank"
    paper: ClassVar[str] = (
        "Vogels, Karimireddy, Jaggi 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed "
        "Optimization"
    )
    shared: ClassVar[bool] = True

    rank: int = 2
    warm: bool = True
    feedback: bool = field(default=True, kw_only=True)
    per: Literal["vector", "layer"] = field(default="layer", kw_only=True)
    dense: str = field(default="1d", kw_only=True)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError("rank must be 1 or more")

    def mean(self, group: Group, segments: Sequence[tuple[Tensor, CodecState]]) -> None:
        tables = [
            _Table(self, values if memory.residual is None else memory.residual.add_(values), memory)
            for values, memory in segments
        ]
        first = _means(group, [[*table.times_q(), *table.rests] for table in tables])
        ps = [
            [orthonormal(p) for p in given[: len(table.places)]]
            for table, given in zip(tables, first, strict=True)
        ]
        own = [table.transposed_times(p) for table, p in zip(tables, ps, strict=True)]
        qs = _means(group, own)
        for (values, memory), table, given, p, mine, q in zip(
            segments, tables, first, ps, own, qs, strict=True
        ):
            # By this worker's own Q, not by the mean: so what is left is never more than there was. The other
            # way it would hold all that its gradients have ever differed from the mean.
            if memory.residual is not None:
                table.subtract(p, mine)
            table.keep(q)
            _add(table.places, p, q, given[len(table.places) :], values.zero_())

    def encode(self, values: Tensor, memory: CodecState) -> Tensor:
        import torch

        table = _Table(self, values, memory)
        p = [orthonormal(p) for p in table.times_q()]
        q = table.transposed_times(p)
        table.keep(q)
        head = HEADER.pack(values.element_size(), self.rank, values.numel(), len(table.places))
        head += b"".join(PLACE.pack(*place) for place in table.places)
        body = torch.cat([part.reshape(-1) for part in (*p, *q, *table.rests)]).cpu()
        return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), body.view(torch.uint8)])

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        rank, places, numbers = _read(code, into.numel())
        rests = _rests(into, places)
        sizes = [rank * place.rows for place in places] + [rank * place.columns for place in places]
        parts = _split(numbers.to(into), [*sizes, *(rest.numel() for rest in rests)])
        thin = [part.view(rank, -1) for part in parts[: len(sizes)]]
        _add(places, thin[: len(places)], thin[len(places) :], parts[len(sizes) :], into, scale)


class _Place(NamedTuple):
    """Where in a stretch a matrix lies."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def of(self, segment: Tensor) -> Tensor:
        return segment[self.start : self.stop].view(self.rows, self.columns)


class _Table:
    """A stretch as matrices, each with the Q to begin with, and the rests between them.

    Here P and Q have their columns as rows: so products with them take a fraction of the time.
    """

    def __init__(self, codec: PowerSGD, values: Tensor, memory: CodecState) -> None:
        self.places = _places(memory.shapes, codec.rank)
        self.matrices = [place.of(values) for place in self.places]
        self.rests = _rests(values, self.places)
        self._memory = memory if codec.warm else None
        self._starts = _starts(codec, self.matrices, memory)

    def times_q(self) -> list[Tensor]:
        return [q @ matrix.T for matrix, q in zip(self.matrices, self._starts, strict=True)]

    def transposed_times(self, ps: Sequence[Tensor]) -> list[Tensor]:
        return [p @ matrix for matrix, p in zip(self.matrices, ps, strict=True)]

    def keep(self, qs: Sequence[Tensor]) -> None:
        """The next step begins with these, if it is to."""
        import torch

        if qs and self._memory is not None:
            self._memory.tensors["q"] = torch.cat([q.reshape(-1) for q in qs])

    def subtract(self, ps: Sequence[Tensor], qs: Sequence[Tensor]) -> None:
        """Leaves what the products have not taken."""
        for matrix, p, q in zip(self.matrices, ps, qs, strict=True):
            matrix.addmm_(p.T, q, alpha=-1.0)
        for rest in self.rests:
            rest.zero_()


def _places(shapes: Sequence[tuple[int, ...]], rank: int) -> list[_Place]:
    """The matrices in a stretch of tensors of these shapes, but for those that P and Q would not shorten.

    >>> _places([(8, 2, 3), (5,), (70,)], rank=1)
    [_Place(start=0, rows=8, columns=6), _Place(start=53, rows=8, columns=8)]
    """
    places, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else math.isqrt(size)
        columns = size // max(rows, 1)
        if rank * (rows + columns) < rows * columns:
            places.append(_Place(start, rows, columns))
        start += size
    return places


def _rests(segment: Tensor, places: Sequence[_Place]) -> list[Tensor]:
    """What lies before, between and after the matrices."""
    starts = [0, *(place.stop for place in places)]
    stops = [*(place.start for place in places), segment.numel()]
    return [segment[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _starts(codec: PowerSGD, matrices: Sequence[Tensor], memory: CodecState) -> list[Tensor]:
    """The Q of each matrix to begin with: the last one, or one that is drawn, on all workers alike.

    Made orthonormal, for as long as a gradient it would make P as long as its square, beyond the range of
    floats. A column that has become zero would stay so for ever: it is drawn anew.
    """
    import torch

    sizes = [matrix.shape[1] * codec.rank for matrix in matrices]
    kept = memory.tensors.get("q") if codec.warm else None
    if kept is None or kept.numel() != sum(sizes):
        kept = torch.zeros(sum(sizes))
    generator = torch.Generator().manual_seed(memory.shared_stream())
    starts = []
    for matrix, part in zip(matrices, _split(kept, sizes), strict=True):
        q = part.view(codec.rank, -1).to(matrix)
        dead = (q == 0).all(1, keepdim=True)
        if bool(dead.any()):
            drawn = torch.empty(q.shape, dtype=torch.float64).normal_(generator=generator)
            q = torch.where(dead, drawn.to(matrix), q)
        starts.append(orthonormal(q))
    return starts


def _split(vector: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of a vector, one after the other."""
    stops = list(accumulate(sizes))
    return [vector[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]


def _means(group: Group, tables: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """New tensors: the means of these over all workers, in one exchange for each kind."""
    import torch

    every = [tensor for tensors in tables for tensor in tensors]
    kinds: dict[object, list[int]] = {}
    for index, tensor in enumerate(every):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    flat = [torch.cat([every[index].reshape(-1) for index in indexes]) for indexes in kinds.values()]
    if flat:
        group.all_reduce(*flat, op="mean")
    for vector, indexes in zip(flat, kinds.values(), strict=True):
        for index, part in zip(indexes, _split(vector, [every[i].numel() for i in indexes]), strict=True):
            every[index] = part.view_as(every[index])
    queue = iter(every)
    return [[next(queue) for _ in tensors] for tensors in tables]


def _add(
    places: Sequence[_Place],
    ps: Sequence[Tensor],
    qs: Sequence[Tensor],
    rests: Sequence[Tensor],
    into: Tensor,
    scale: float = 1.0,
) -> None:
    """into += scale * P Q^T in each matrix, and the rests as they are."""
    for place, p, q in zip(places, ps, qs, strict=True):
        add_product(p * scale, q, place.of(into))
    for part, rest in zip(_rests(into, places), rests, strict=True):
        part.add_(rest, alpha=scale)


def _read(code: Tensor, count: int) -> tuple[int, list[_Place], Tensor]:
    """Rank, places and numbers of a code for so many values; WireError if it is none."""
    import torch

    if code.dtype != torch.uint8 or code.dim() != 1:
        raise WireError(f"powersgd: {code.dim()}-dimensional {code.dtype} came, not bytes")
    data = code.cpu().contiguous()
    if data.numel() < HEADER.size:
        raise WireError(f"powersgd: {data.numel()} bytes came, and the header alone has {HEADER.size}")
    width, rank, values, matrices = HEADER.unpack(bytes(data[: HEADER.size].numpy()))
    body = HEADER.size + PLACE.size * matrices
    if width not in (4, 8) or rank < 1 or values != count or body > data.numel():
        raise WireError(
            f"powersgd: {matrices} matrices of rank {rank} in {values} numbers of {width} bytes came, in "
            f"{data.numel()} bytes, for {count} numbers"
        )
    places = [_Place(*each) for each in PLACE.iter_unpack(bytes(data[HEADER.size : body].numpy()))]
    thin, reached = 0, 0
    for place in places:
        if place.start < reached or place.stop > count or rank > min(place.rows, place.columns):
            raise WireError(f"powersgd: {place} of rank {rank} does not fit into {count} numbers")
        thin += rank * (place.rows + place.columns)
        reached = place.stop
    wanted = thin + count - sum(place.rows * place.columns for place in places)
    if data.numel() - body != width * wanted:
        raise WireError(f"powersgd: {data.numel() - body} bytes came for {wanted} numbers of {width} bytes")
    numbers = data[body:].clone().view(torch.float32 if width == 4 else torch.float64)
    if not bool(torch.isfinite(numbers).all()):
        raise WireError("powersgd: a code holds NaN or infinity")
    return rank, places, numbers
