"""ReplicaComparison: finds the first difference between replicas that must be equal. Logic without I/O."""

from __future__ import annotations

from collections.abc import Collection

from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import CompareReplica, ReplicaDifference, TensorSummary

ROUNDING = 1e-4  # machines of different kinds may round differently: a smaller difference is told once


class ReplicaComparison:
    """Compares the reports of all workers on each step with the first one that arrived."""

    def __init__(self) -> None:
        # By part, by step, and whether the run was over: the script may act after its last step.
        self._first: dict[tuple[int, int, bool], tuple[Peer, CompareReplica]] = {}
        self._reached: dict[
            tuple[int, Peer], tuple[int, bool]
        ] = {}  # the last report of each worker, by part
        self._told = False  # a difference as small as rounding has been told
        self._skipped = False  # that workers have got different numbers of batches has been told

    def compare(self, peer: Peer, report: CompareReplica, workers: Collection[Peer]) -> ReplicaDifference:
        """The first difference between a worker's replica and that of another in the same step, if any.

        `workers`: those that report. The first report on a step is kept until all of them have come as far.
        """
        other, first = self._first.setdefault((report.part, report.step, report.over), (peer, report))
        self._reached[report.part, peer] = report.step, report.over
        passed = min(self._reached.get((report.part, each), (-1, False)) for each in {peer, *workers})
        for part, step, over in list(self._first):
            if part == report.part and (step, over) <= passed:
                del self._first[part, step, over]
        for group, (mine, theirs) in enumerate(zip(report.settings, first.settings, strict=False)):
            for name in mine:
                if mine[name] != theirs.get(name, mine[name]):
                    return ReplicaDifference(str(other), group=group, setting=name, theirs=theirs[name])
        pairs = list(zip(report.tensors, first.tensors, strict=False))
        unequal = [index for index, (mine, theirs) in enumerate(pairs) if mine.checksum != theirs.checksum]
        sizes = {index: difference(*pairs[index]) for index in unequal}
        large = [index for index in unequal if not sizes[index] < ROUNDING]  # or NaN
        if not unequal or (self._told and not large):
            return self._compare_batches(other, first, report)
        self._told = True
        tensor = (large or unequal)[0]
        return ReplicaDifference(str(other), tensor=tensor, count=len(unequal), rounding=not large)

    def _compare_batches(
        self, other: Peer, first: CompareReplica, report: CompareReplica
    ) -> ReplicaDifference:
        """Tells once if a worker has got more batches for as many steps."""
        if self._skipped or report.over or report.batches == first.batches:
            return ReplicaDifference()
        self._skipped = True
        return ReplicaDifference(str(other), batches=first.batches)

    @property
    def kept(self) -> int:
        """How many reports are kept."""
        return len(self._first)


def difference(one: TensorSummary, other: TensorSummary) -> float:
    """About how far two tensors are apart, relative to their size.

    Elements that differ change the projection by about the norm of what they differ by, in whatever order
    they lie.
    """
    change = max(abs(one.projection - other.projection), abs(one.norm - other.norm))
    return change / max(one.norm, other.norm) if change else 0.0
