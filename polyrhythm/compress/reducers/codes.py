"""Means of codes: summed on the way, or gathered by every worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from polyrhythm.compress.reducers.base import Reducer

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Compressor
    from polyrhythm.core.group import Group

FEW = 1 << 12  # bytes of flags that may travel with every code


class SummedCodes(Reducer):
    """Averages codes that are floats with an ordinary all-reduce."""

    def begin(
        self, group: Group, vectors: Sequence[Tensor], compressor: Compressor, *flags: Tensor
    ) -> Callable[[], None]:
        codes = compressor.send(vectors)
        task = group.begin_all_reduce(*codes, *compressor.dense(vectors), *flags, op="mean")

        def join() -> None:
            task.join()
            compressor.combine([codes], vectors)

        return join


class GatheredCodes(Reducer):
    """Every worker gathers the codes of all, decodes and averages them; around a ring, hop by hop."""

    def begin(
        self, group: Group, vectors: Sequence[Tensor], compressor: Compressor, *flags: Tensor
    ) -> Callable[[], None]:
        dense, rest = compressor.dense(vectors), None
        if dense or sum(flag.nbytes for flag in flags) > FEW:
            rest = group.begin_all_reduce(*dense, *flags, op="mean")
            flags = ()
        coded = group.begin_coded_mean(compressor, vectors, *flags)

        def join() -> None:
            coded.join()
            self.decide(vectors, compressor)
            if rest is not None:
                rest.join()

        return join
