"""PowerSGD between workers: one step of power iteration, in two all-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyrhythm.compress.kernels.algebra import orthonormal
from polyrhythm.compress.kernels.low_rank import Matrices, add_products, split
from polyrhythm.compress.reducers.base import AllReduces, JointReducer

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState


@dataclass(frozen=True)
class PowerSGDReducer(JointReducer):
    """All workers find the same P and Q of the mean of their matrices.

    M_i = G_i + E_i;  P = mean of M_i Q, made orthonormal;  Q = mean of M_i^T P;  the result is P Q^T.
    """

    rank: int
    warm: bool

    def mean(self, group: AllReduces, vectors: Sequence[Tensor], states: Sequence[CodecState]) -> None:
        tables = [
            Matrices(_with_residual(values, state), state, self.rank, self.warm)
            for values, state in zip(vectors, states, strict=True)
        ]
        first = _means(group, [[*table.times_q(), *table.rests] for table in tables])
        ps = [
            [orthonormal(p) for p in given[: len(table.places)]]
            for table, given in zip(tables, first, strict=True)
        ]
        own = [table.transposed_times(p) for table, p in zip(tables, ps, strict=True)]
        qs = _means(group, own)
        for values, state, table, given, p, mine, q in zip(
            vectors, states, tables, first, ps, own, qs, strict=True
        ):
            # E_i = M_i - P (M_i^T P)^T, by this worker's own Q: so the residual is never longer than M_i. By
            # the mean Q it would hold all that this worker's gradients have ever differed from the mean.
            if state.residual is not None:
                table.subtract(p, mine)
            table.keep(q)
            add_products(table.places, p, q, given[len(table.places) :], values.zero_())


def _with_residual(values: Tensor, state: CodecState) -> Tensor:
    return values if state.residual is None else state.residual.add_(values)


def _means(group: AllReduces, tables: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The means of these tensors over the group, as new tensors; one all-reduce per dtype and device."""
    import torch

    every = [tensor for tensors in tables for tensor in tensors]
    kinds: dict[object, list[int]] = {}
    for index, tensor in enumerate(every):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    flat = [torch.cat([every[index].reshape(-1) for index in indexes]) for indexes in kinds.values()]
    if flat:
        group.all_reduce(*flat, op="mean")
    for vector, indexes in zip(flat, kinds.values(), strict=True):
        for index, part in zip(indexes, split(vector, [every[i].numel() for i in indexes]), strict=True):
            every[index] = part.view_as(every[index])
    queue = iter(every)
    return [[next(queue) for _ in tensors] for tensors in tables]
