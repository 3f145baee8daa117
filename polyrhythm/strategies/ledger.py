"""Ledger: what a worker knows of everybody's pulses, as whole numbers; logic without I/O.

An origin is one life of one worker, such as "3.0". Its messages are numbered 1, 2, 3, ... and count in this
order, each once. Whole numbers can be added up in any order, so two ledgers that know as many messages of
each origin have the same counts, bit for bit.

Messages are kept until all have them, so that whoever has missed some can get them from anybody. One that
comes late begins with the counts of another, and with what that one keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from polyrhythm.codecs import selection
from polyrhythm.errors import WireError

if TYPE_CHECKING:
    from torch import Tensor

Have = dict[str, int]  # by origin: up to which of its messages all are known


class Ledger:
    """The pulses that have come, by parameter, and how far they are known, by origin."""

    def __init__(self, counts: Sequence[Tensor], tau: float) -> None:
        self.counts, self.tau = tuple(counts), tau
        self.have: Have = {}
        self._logs: dict[str, deque[tuple[Tensor, ...]]] = {}

    def add(self, origin: str, number: int, codes: Sequence[Tensor]) -> Literal["new", "known", "gap"]:
        """Takes a message in, if it is the next one of its origin."""
        known = self.have.get(origin, 0)
        if number != known + 1:
            return "known" if number <= known else "gap"
        if len(codes) != len(self.counts):
            raise WireError(f"{len(codes)} codes came for {len(self.counts)} vectors")
        self._count(codes)
        self.have[origin] = number
        self._logs.setdefault(origin, deque()).append(tuple(codes))
        return "new"

    def message(self, origin: str, number: int) -> tuple[Tensor, ...] | None:
        """A message, if it is still kept."""
        log = self._logs.get(origin, ())
        place = len(log) - 1 - (self.have.get(origin, 0) - number)
        return log[place] if 0 <= place < len(log) else None

    def lacks(self, theirs: Mapping[str, int]) -> bool:
        """Whether another knows what this one does not."""
        return any(self.have.get(origin, 0) < number for origin, number in theirs.items())

    def missing(self, theirs: Mapping[str, int]) -> list[tuple[str, int]] | None:
        """What another does not know, by origin and number; None if not all of it is kept."""
        found = []
        for origin, number in self.have.items():
            known = min(theirs.get(origin, 0), number)
            if number - known > len(self._logs.get(origin, ())):
                return None
            found += [(origin, each) for each in range(known + 1, number + 1)]
        return found

    def whole(self) -> tuple[list[Tensor], dict[str, Any]]:
        """All of it, as tensors and fields of a message."""
        codes = [code for log in self._logs.values() for each in log for code in each]
        kept = {origin: len(log) for origin, log in self._logs.items()}
        return [*(vector.clone() for vector in self.counts), *codes], {"have": dict(self.have), "kept": kept}

    def take(self, tensors: Sequence[Tensor], theirs: Mapping[str, int], kept: Mapping[str, int]) -> bool:
        """Goes on from the `whole` of another, and adds what only this one has; False if it cannot."""
        only, wide = self.missing(theirs), len(self.counts)
        if only is None:
            return False
        for place, given in zip(self.counts, tensors, strict=False):
            place.copy_(given)
        for each in only:
            codes = self.message(*each)
            assert codes is not None
            self._count(codes)
        at = wide
        for origin, count in kept.items():
            end = at + wide * count
            log = [tuple(tensors[first : first + wide]) for first in range(at, end, wide)]
            if theirs.get(origin, 0) > self.have.get(origin, 0):
                self._logs[origin] = deque(log)
            at = end
        self.have |= {origin: max(number, self.have.get(origin, 0)) for origin, number in theirs.items()}
        return True

    def check_whole(self, tensors: Sequence[Tensor], theirs: Mapping[str, int], kept: Any) -> None:
        """WireError if this is no `whole` of another."""
        wide = len(self.counts)
        alike = [(given.dtype, given.numel()) for given in tensors[:wide]]
        if alike != [(vector.dtype, vector.numel()) for vector in self.counts]:
            raise WireError("counts came of another model")
        known = isinstance(kept, dict) and all(
            isinstance(count, int) and 0 <= count <= theirs.get(origin, 0) for origin, count in kept.items()
        )
        if not known or len(tensors) != wide + wide * sum(kept.values()):
            raise WireError("counts came without the messages that belong to them")

    def settled(self, origin: str, number: int) -> None:
        """All have the messages of an origin up to this one: they are kept no longer."""
        log = self._logs.get(origin, deque())
        for _ in range(min(len(log), len(log) - (self.have.get(origin, 0) - number))):
            log.popleft()

    def kept(self, origin: str) -> tuple[int, int]:
        """How many messages of an origin are kept, and their bytes."""
        log = self._logs.get(origin, ())
        return len(log), sum(code.nbytes for codes in log for code in codes)

    def digest(self) -> str:
        """What tells whether two are the same, bit for bit."""
        return digest(*self.counts)

    def _count(self, codes: Sequence[Tensor]) -> None:
        for code, vector in zip(codes, self.counts, strict=True):
            selection.count(code, vector, self.tau)


def digest(*vectors: Tensor) -> str:
    """What tells whether vectors are the same, bit for bit."""
    import hashlib

    made = hashlib.sha256()
    for vector in vectors:
        made.update(vector.cpu().contiguous().numpy().data)
    return made.hexdigest()
