"""Ledger: what a worker knows of everybody's pulses, as whole numbers; logic without I/O.

An origin is one life of one worker, such as "3.0". Its messages are numbered 1, 2, 3, ... and count in this
order, each once. Whole numbers can be added up in any order, so two ledgers that know as many messages of
each origin have the same counts, bit for bit.

Messages are kept until all have them, so that whoever has missed some can get them from anybody. One that
comes late begins with the counts of another, and with what that one keeps. Should somebody not say for long
what it has, messages that follow each other are merged into one, which has the numbers of all of them: it is
never longer than a vector, however many they are. It cannot be taken apart again: who has some of them needs
all counts instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from polyrhythm.compress.kernels import selection
from polyrhythm.core.errors import WireError

if TYPE_CHECKING:
    from torch import Tensor

Have = dict[str, int]  # by origin: up to which of its messages all are known


class Entry(NamedTuple):
    """A message that is kept, or several in one: of the numbers `first` to `last`."""

    first: int
    last: int
    codes: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(code.nbytes for code in self.codes)


@dataclass
class Log:
    """What is kept of one origin: all messages up to the last one that is known, without a gap."""

    entries: list[Entry] = field(default_factory=list)
    loose: int = 0  # bytes of those that are not merged

    def put(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.loose += entry.nbytes if entry.first == entry.last else 0

    def find(self, number: int) -> Entry | None:
        """The entry that has this message, if it is still kept."""
        place = bisect_left(self.entries, number, key=lambda entry: entry.last)
        found = self.entries[place] if place < len(self.entries) else None
        return found if found is not None and found.first <= number else None

    def after(self, number: int) -> list[Entry] | None:
        """All from the next one on; None if they are not kept, or are merged with what came before."""
        place = bisect_left(self.entries, number + 1, key=lambda entry: entry.last)
        rest = self.entries[place:]
        return rest if rest and rest[0].first == number + 1 else None

    def replace(self, entries: Sequence[Entry]) -> None:
        self.entries, self.loose = [], 0
        for entry in entries:
            self.put(entry)


class DeliveryLog:
    """The pulses that have come, by parameter, and how far they are known, by origin."""

    def __init__(self, counts: Sequence[Tensor], tau: float) -> None:
        self.counts, self.tau = tuple(counts), tau
        self.have: Have = {}
        self._logs: dict[str, Log] = {}

    def add(
        self, origin: str, number: int, codes: Sequence[Tensor], first: int | None = None
    ) -> Literal["new", "known", "gap", "part"]:
        """Takes a message in, if it is the next one of its origin; or several in one, from `first` on.

        "part": some of these are known, and they cannot be told apart.
        """
        known, first = self.have.get(origin, 0), number if first is None else first
        if number <= known or first != known + 1:
            return "known" if number <= known else "gap" if first > known else "part"
        if len(codes) != len(self.counts):
            raise WireError(f"{len(codes)} codes came for {len(self.counts)} vectors")
        self._count(codes)
        self.have[origin] = number
        self._logs.setdefault(origin, Log()).put(Entry(first, number, tuple(codes)))
        return "new"

    def message(self, origin: str, number: int) -> Entry | None:
        """The message of this number, or those that it is merged with, if it is still kept."""
        return self._logs.get(origin, Log()).find(number)

    def lacks(self, theirs: Mapping[str, int]) -> bool:
        """Whether another knows what this one does not."""
        return any(self.have.get(origin, 0) < number for origin, number in theirs.items())

    def missing(self, theirs: Mapping[str, int]) -> list[tuple[str, int]] | None:
        """What another does not know, by origin and number; None if not all of it is kept by itself."""
        found = []
        for origin, number in self.have.items():
            known = theirs.get(origin, 0)
            if known < number:
                rest = self._logs.get(origin, Log()).after(known)
                if rest is None:
                    return None
                found += [(origin, entry.last) for entry in rest]
        return found

    def loose(self, origin: str) -> int:
        """Bytes of the messages of an origin that are kept one by one."""
        return self._logs.get(origin, Log()).loose

    def merge(self, origin: str, cuts: Collection[int] = ()) -> None:
        """Merges what is kept of an origin; not across a cut, which is the last number before it."""
        log = self._logs.get(origin, Log())
        runs: list[list[Entry]] = []
        for entry in log.entries:
            if runs and entry.first - 1 not in cuts:
                runs[-1].append(entry)
            else:
                runs.append([entry])
        log.replace([self._merged(run) for run in runs])

    def _merged(self, run: Sequence[Entry]) -> Entry:
        if len(run) == 1:
            return run[0]
        parts = zip(*(entry.codes for entry in run), strict=True)
        codes = [
            selection.merged(part, vector.numel(), self.tau)
            for part, vector in zip(parts, self.counts, strict=True)
        ]
        return Entry(run[0].first, run[-1].last, tuple(codes))

    def whole(self) -> tuple[list[Tensor], dict[str, Any]]:
        """All of it, as tensors and fields of a message."""
        codes = [code for log in self._logs.values() for entry in log.entries for code in entry.codes]
        kept = {
            origin: [log.entries[0].first - 1, *(entry.last for entry in log.entries)]
            for origin, log in self._logs.items()
            if log.entries
        }
        return [*(vector.clone() for vector in self.counts), *codes], {"have": dict(self.have), "kept": kept}

    def take(self, tensors: Sequence[Tensor], theirs: Mapping[str, int], kept: Mapping[str, Any]) -> bool:
        """Goes on from the `whole` of another, and adds what only this one has; False if it cannot."""
        only, wide = self.missing(theirs), len(self.counts)
        if only is None:
            return False
        for place, given in zip(self.counts, tensors, strict=False):
            place.copy_(given)
        for each in only:
            entry = self.message(*each)
            assert entry is not None
            self._count(entry.codes)
        at = wide
        newer = {origin for origin, number in theirs.items() if number > self.have.get(origin, 0)}
        for origin in newer:
            self._logs[origin] = Log()
        for origin, ends in kept.items():
            for before, last in pairwise(ends):
                if origin in newer:
                    self._logs[origin].put(Entry(before + 1, last, tuple(tensors[at : at + wide])))
                at += wide
        self.have |= {origin: theirs[origin] for origin in newer}
        return True

    def check_whole(self, tensors: Sequence[Tensor], theirs: Mapping[str, int], kept: Any) -> None:
        """WireError if this is no `whole` of another."""
        wide = len(self.counts)
        alike = [(given.dtype, given.numel()) for given in tensors[:wide]]
        if alike != [(vector.dtype, vector.numel()) for vector in self.counts]:
            raise WireError("counts came of another model")
        known = isinstance(kept, dict) and all(
            isinstance(ends, list)
            and all(isinstance(end, int) for end in ends)
            and len(ends) > 1
            and ends[0] >= 0
            and all(end < later for end, later in pairwise(ends))
            and ends[-1] == theirs.get(origin, 0)
            for origin, ends in kept.items()
        )
        if not known or len(tensors) != wide + wide * sum(len(ends) - 1 for ends in kept.values()):
            raise WireError("counts came without the messages that belong to them")

    def settled(self, origin: str, number: int) -> None:
        """All have the messages of an origin up to this one: they are kept no longer."""
        log = self._logs.get(origin)
        if log is not None and log.entries and log.entries[0].last <= number:
            log.replace([entry for entry in log.entries if entry.last > number])

    def kept(self, origin: str) -> tuple[int, int]:
        """How many messages of an origin are kept, and their bytes."""
        entries = self._logs.get(origin, Log()).entries
        count = entries[-1].last - entries[0].first + 1 if entries else 0
        return count, sum(entry.nbytes for entry in entries)

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
