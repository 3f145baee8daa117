"""Sparse codecs: they send a few entries of a vector, the largest or random ones. The rest waits."""

from __future__ import annotations

import binascii
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polyrhythm.compress.codecs.warmup import density_now
from polyrhythm.compress.kernels import selection
from polyrhythm.core.codec import Codec, Reduction
from polyrhythm.core.errors import UsageError, WireError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.compress.state import CodecState


@dataclass(frozen=True)
class Sparse(Codec):
    """Codecs that send a share of a vector's entries, in the format of `kernels.sparse_format`.

    - `density`: the share of the entries that is sent
    - `warmup`: for so many messages more is sent: from 25 % geometrically down to `density`
    """

    density: float = 0.01
    warmup: int = 0
    feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise UsageError("density must be more than 0 and at most 1, as in 0.01")
        if self.warmup < 0:
            raise UsageError("warmup must be 0 or more")

    def quota(self, length: int, count: int) -> int:
        """How many entries of a vector message `count` may have: at least one."""
        return min(length, max(1, round(length * density_now(self.density, self.warmup, count))))

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        selection.add(code, into, scale)

    def prepare(self, dtype: torch.dtype) -> None:
        selection.warm(dtype)


@dataclass(frozen=True)
class TopK(Sparse):
    r"""Sends the share `density` of the entries with the largest magnitudes; the rest waits (top-k).

    $$
    r &\leftarrow r + g \\
    I &= \text{the } k \text{ entries with the largest } \lvert r_i \rvert \\
    \hat{g}_I &= r_I, \qquad r_I \leftarrow r_I - \hat{g}_I
    $$

    - `values`: send values as 16-bit floats, whose rounding error waits in $r$, or as they are
    - `pick`: sampled: take the threshold from a sample, so sometimes a few less than k are sent; exact:
      always k

    >>> import torch
    >>> import polyrhythm as pr
    >>> from polyrhythm.compress import feedback
    >>> from polyrhythm.compress.state import CodecState
    >>> state, got = CodecState.alone(count=4), torch.zeros(4)
    >>> codec = pr.parse("allreduce+topk:0.25").codec
    >>> codec.decode(feedback.encode(codec, torch.tensor([0.5, -3.0, 1.0, 2.5]), state), got)
    >>> got, state.residual
    (tensor([ 0., -3.,  0.,  0.]), tensor([0.5000, 0.0000, 1.0000, 2.5000]))
    """

    name: ClassVar[str] = "topk"
    main: ClassVar[str | None] = "density"
    paper: ClassVar[str] = "Aji, Heafield 2017, Sparse Communication for Distributed Gradient Descent"

    values: Literal["fp16", "fp32"] = "fp16"
    pick: Literal["sampled", "exact"] = "sampled"

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        indexes = selection.largest(values, self.quota(len(values), state.count), exact=self.pick == "exact")
        return selection.pack(values, indexes, half=self.values == "fp16")[0]

    def encode_with_feedback(self, values: Tensor, residual: Tensor, state: CodecState) -> Tensor:
        return self.take_largest(values, residual, state)[0]

    def take_largest(self, values: Tensor, residual: Tensor, state: CodecState) -> tuple[Tensor, Tensor]:
        """Adds the values to the residual and takes its largest entries out: their code and indexes."""
        quota = self.quota(len(values), state.count)
        indexes = selection.largest(residual, quota, plus=values, exact=self.pick == "exact")
        code, got = selection.pack(residual, indexes, half=self.values == "fp16")
        selection.take(residual, indexes, got)  # 16-bit values leave their rounding error
        return code, indexes


SEED_SIZE = 10  # numbers before the values: eight bytes of the seed and two of its checksum


@dataclass(frozen=True)
class RandomK(Sparse):
    r"""Sends a random share `density` of the entries, the same ones on all workers, so no indexes are sent.

    $$
    \hat{g}_i = g_i \text{ if } i \text{ is drawn, otherwise } 0
    $$

    The vector is cut into $k$ cells, and each gives one entry at random. Since all workers draw the same
    entries, codes can be summed on the way. With feedback, entries that were not drawn wait. With
    `feedback=no` a value is multiplied by the size of its cell, which makes the code unbiased.

    >>> import torch
    >>> import polyrhythm as pr
    >>> from polyrhythm.compress import feedback
    >>> from polyrhythm.compress.state import CodecState
    >>> state, got = CodecState.alone(count=6), torch.zeros(6)
    >>> codec = pr.parse("allreduce+randomk:0.5").codec
    >>> codec.decode(feedback.encode(codec, torch.arange(1.0, 7.0), state), got)
    >>> got + state.residual
    tensor([1., 2., 3., 4., 5., 6.])
    """

    name: ClassVar[str] = "randomk"
    main: ClassVar[str | None] = "density"
    paper: ClassVar[str] = "Wangni et al. 2018, Gradient Sparsification for Communication-Efficient Learning"
    reduction: ClassVar[Reduction] = Reduction.SUM

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        import torch

        seed = state.shared_stream()
        indexes, cells = _drawn(seed, len(values), self.quota(len(values), state.count))
        drawn = values[indexes.to(values.device)]
        if not self.feedback:
            drawn *= cells.to(values)
        return torch.cat([_seed_code(seed).to(values), drawn])

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        count = len(code) - SEED_SIZE
        if not code.dtype.is_floating_point or not 0 <= count <= len(into):
            raise WireError(f"{len(code)} numbers of {code.dtype} are not a sample of {len(into)}")
        seed = _seed(code[:SEED_SIZE].double().cpu())
        indexes = _drawn(seed, len(into), count)[0].to(into.device)
        into.index_add_(0, indexes, code[SEED_SIZE:].to(into), alpha=scale)

    def for_replies(self) -> Codec:
        # Without scaling by the size of the cells, which would lengthen differences.
        return replace(self, feedback=True)

    def prepare(self, dtype: torch.dtype) -> None:
        """Nothing to compile: drawing takes a few tensor operations."""


def _seed_code(seed: int) -> Tensor:
    """A seed and its checksum as bytes: numbers that survive being summed and divided in 16-bit floats."""
    import torch

    data = seed.to_bytes(8, "little")
    check = binascii.crc_hqx(data, 0)
    return torch.tensor([*data, check >> 8, check & 255]).double()


def _seed(given: Tensor) -> int:
    """The seed in these numbers, which may have been rounded; WireError if it is damaged."""
    import torch

    whole = given.round()
    if bool(((whole >= 0) & (whole < 256) & ((given - whole).abs() < 0.25)).all()):
        seed = int.from_bytes(bytes(int(each) for each in whole[:8]), "little")
        if torch.equal(whole, _seed_code(seed)):
            return seed
    raise WireError("the seed of a random sample is damaged, or the workers were out of step")


def _drawn(seed: int, length: int, count: int) -> tuple[Tensor, Tensor]:
    """A random index in each of `count` cells of nearly equal size, ascending; and the sizes."""
    import numpy as np
    import torch

    if not count:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    bounds = np.arange(count + 1, dtype=np.int64) * length // count
    cells = np.diff(bounds)
    state: Any = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state ^= state >> np.uint64(31)
    inside = (state >> np.uint64(32)) * cells.astype(np.uint64) >> np.uint64(32)
    return torch.from_numpy(bounds[:-1] + inside.astype(np.int64)), torch.from_numpy(cells)
