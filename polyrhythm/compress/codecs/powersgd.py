"""PowerSGD: the gradient of a matrix as the product of two thin ones, found by a step of power iteration.

Between workers `reducers.powersgd` takes the mean. The code in this file is for servers: a worker's own P and
Q.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.compress.kernels.algebra import orthonormal
from polyrhythm.compress.kernels.low_rank import Matrices, MatrixPlace, add_products, rests, split
from polyrhythm.compress.reducers.powersgd import PowerSGDReducer
from polyrhythm.core.codec import Codec, Reduction
from polyrhythm.core.errors import UsageError, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState

# A code: the header, the place of each matrix, then P of each, Q of each, and the numbers in no matrix.
HEADER = struct.Struct("<4Q")  # bytes of a number, rank, how many numbers, how many matrices
PLACE = struct.Struct("<3Q")  # start, rows, columns


@dataclass(frozen=True)
class PowerSGD(Codec):
    r"""Sends each matrix as a product of two thin ones, by one step of power iteration (PowerSGD).

    $$
    M_i &= G_i + E_i \\
    P &= \operatorname{orthonormal}\Big(\frac{1}{N} \sum_i M_i Q\Big) \\
    Q &\leftarrow \frac{1}{N} \sum_i M_i^{\top} P, \qquad \hat{G} = P Q^{\top} \\
    E_i &\leftarrow M_i - P (M_i^{\top} P)^{\top}
    $$

    The two means are one all-reduce each, and all workers continue with $\hat{G}$. Momentum is the
    optimizer's, after.

    A tensor of more than two dimensions becomes a matrix whose rows are its first dimension. A vector, such
    as a part of a matrix that is cut between servers, becomes a nearly square matrix, and what is left over
    is sent uncompressed. So is a matrix if $P$ and $Q$ would be no shorter: with a rank as large as either
    side the mean is exact. To a server each worker sends a $P$ and $Q$ of its own.

    - `rank`: the number of columns of $P$ and $Q$
    - `warm`: begin with the $Q$ of the step before, and not with a random one

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
    reduction: ClassVar[Reduction] = Reduction.JOINT

    rank: int = 2
    warm: bool = True
    feedback: bool = field(default=True, kw_only=True)
    per: Literal["vector", "layer"] = field(default="layer", kw_only=True)
    dense: str = field(default="1d", kw_only=True)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError("rank must be 1 or more")

    def reducer(self) -> PowerSGDReducer:
        return PowerSGDReducer(self.rank, self.warm)

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        import torch

        table = Matrices(values, state, self.rank, self.warm)
        p = [orthonormal(p) for p in table.times_q()]
        q = table.transposed_times(p)
        table.keep(q)
        head = HEADER.pack(values.element_size(), self.rank, values.numel(), len(table.places))
        head += b"".join(PLACE.pack(*place) for place in table.places)
        body = torch.cat([part.reshape(-1) for part in (*p, *q, *table.rests)]).cpu()
        return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), body.view(torch.uint8)])

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        rank, places, numbers = _read(code, into.numel())
        sizes = [rank * place.rows for place in places] + [rank * place.columns for place in places]
        parts = split(numbers.to(into), [*sizes, *(rest.numel() for rest in rests(into, places))])
        thin = [part.view(rank, -1) for part in parts[: len(sizes)]]
        add_products(places, thin[: len(places)], thin[len(places) :], parts[len(sizes) :], into, scale)


def _read(code: Tensor, count: int) -> tuple[int, list[MatrixPlace], Tensor]:
    """Rank, places and numbers of a code for so many numbers; WireError if it is not one."""
    import torch

    if code.dtype != torch.uint8 or code.dim() != 1:
        raise WireError(f"powersgd: {code.dim()}-dimensional {code.dtype} received, not bytes")
    data = code.cpu().contiguous()
    if data.numel() < HEADER.size:
        raise WireError(f"powersgd: {data.numel()} bytes received, and the header alone has {HEADER.size}")
    width, rank, values, matrices = HEADER.unpack(bytes(data[: HEADER.size].numpy()))
    body = HEADER.size + PLACE.size * matrices
    if width not in (4, 8) or rank < 1 or values != count or body > data.numel():
        raise WireError(
            f"powersgd: {matrices} matrices of rank {rank} in {values} numbers of {width} bytes received, in "
            f"{data.numel()} bytes, for {count} numbers"
        )
    places = [MatrixPlace(*each) for each in PLACE.iter_unpack(bytes(data[HEADER.size : body].numpy()))]
    thin, reached = 0, 0
    for place in places:
        if place.start < reached or place.stop > count or rank > min(place.rows, place.columns):
            raise WireError(f"powersgd: {place} of rank {rank} does not fit into {count} numbers")
        thin += rank * (place.rows + place.columns)
        reached = place.stop
    wanted = thin + count - sum(place.rows * place.columns for place in places)
    if data.numel() - body != width * wanted:
        raise WireError(
            f"powersgd: {data.numel() - body} bytes received for {wanted} numbers of {width} bytes"
        )
    numbers = data[body:].clone().view(torch.float32 if width == 4 else torch.float64)
    if not bool(torch.isfinite(numbers).all()):
        raise WireError("powersgd: a code holds NaN or infinity")
    return rank, places, numbers
