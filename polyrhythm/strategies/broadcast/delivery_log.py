"""DeliveryLog: the pulses of all workers that one worker has, as whole numbers. Logic without I/O.

An origin is one incarnation of one worker, such as "3.0". Its messages are numbered 1, 2, 3, ... A log takes
them in this order, each once. Integers can be added in any order, so two logs that know the same number of
messages of each origin have the same counts, bit for bit.

Messages are kept until all workers have them, so a worker that missed some can get them from any other. A
replacement starts from a snapshot of another worker's log: its counts and the messages that it keeps. If a
worker does not confirm anything for long, consecutive messages of an origin are merged into one that carries
all their numbers. It is never longer than a vector, however many messages it holds. It cannot be taken apart
again: a worker that already has some of its messages needs a snapshot instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from polyrhythm.compress.kernels import selection
from polyrhythm.core.errors import WireError

if TYPE_CHECKING:
    from torch import Tensor

Known = dict[str, int]  # by origin: all of its messages up to this number are known


class Entry(NamedTuple):
    """A kept message, or several merged into one: those with the numbers `first` to `last`."""

    first: int
    last: int
    codes: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(code.nbytes for code in self.codes)


@dataclass
class OriginLog:
    """The kept messages of one origin: a run of numbers without a gap, up to the last one that is known."""

    entries: list[Entry] = field(default_factory=list)
    unmerged: int = 0  # bytes of the messages that are not merged

    def append(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.unmerged += entry.nbytes if entry.first == entry.last else 0

    def find(self, number: int) -> Entry | None:
        """The entry that holds this message; None if it is no longer kept."""
        place = bisect_left(self.entries, number, key=lambda entry: entry.last)
        found = self.entries[place] if place < len(self.entries) else None
        return found if found is not None and found.first <= number else None

    def after(self, number: int) -> list[Entry] | None:
        """All later messages; None if some are no longer kept or are merged with earlier ones."""
        place = bisect_left(self.entries, number + 1, key=lambda entry: entry.last)
        later = self.entries[place:]
        return later if later and later[0].first == number + 1 else None

    def replace(self, entries: Sequence[Entry]) -> None:
        self.entries, self.unmerged = [], 0
        for entry in entries:
            self.append(entry)


@dataclass(frozen=True)
class LogSnapshot:
    """All of a log: its counts, and the messages that it keeps."""

    tensors: Sequence[Tensor]  # the counts, then the codes of the entries
    known: Known
    # By origin: the number before the first entry, then the last number of each entry.
    kept: Mapping[str, Sequence[int]]


class DeliveryLog:
    """Counts of all delivered pulses by parameter, and the last known message by origin."""

    def __init__(self, counts: Sequence[Tensor], tau: float) -> None:
        self.counts, self.tau = tuple(counts), tau
        self.known: Known = {}
        self._logs: dict[str, OriginLog] = {}

    def add(
        self, origin: str, number: int, codes: Sequence[Tensor], first: int | None = None
    ) -> Literal["new", "known", "gap", "partly known"]:
        """Takes a message if it is the next one of its origin; or several merged into one, from `first` on.

        "partly known": some of the merged messages are known already, and they cannot be told apart.
        """
        known, first = self.known.get(origin, 0), number if first is None else first
        if number <= known or first != known + 1:
            return "known" if number <= known else "gap" if first > known else "partly known"
        if len(codes) != len(self.counts):
            raise WireError(f"received {len(codes)} codes for {len(self.counts)} vectors")
        self._count(codes)
        self.known[origin] = number
        self._logs.setdefault(origin, OriginLog()).append(Entry(first, number, tuple(codes)))
        return "new"

    def message(self, origin: str, number: int) -> Entry | None:
        """The entry that holds this message; None if it is no longer kept."""
        return self._logs.get(origin, OriginLog()).find(number)

    def lacks(self, theirs: Mapping[str, int]) -> bool:
        """True if another log knows messages that this one does not."""
        return any(self.known.get(origin, 0) < number for origin, number in theirs.items())

    def missing(self, theirs: Mapping[str, int]) -> list[tuple[str, int]] | None:
        """The messages that another log does not know, by origin and number; None if it needs a snapshot."""
        found = []
        for origin, number in self.known.items():
            known = theirs.get(origin, 0)
            if known < number:
                later = self._logs.get(origin, OriginLog()).after(known)
                if later is None:
                    return None
                found += [(origin, entry.last) for entry in later]
        return found

    def unmerged(self, origin: str) -> int:
        """Bytes of the messages of an origin that are kept one by one."""
        return self._logs.get(origin, OriginLog()).unmerged

    def merge(self, origin: str, cuts: Collection[int] = ()) -> None:
        """Merges the kept messages of an origin, but not across a cut: the last number before it."""
        log = self._logs.get(origin, OriginLog())
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

    def drop(self, origin: str, number: int) -> None:
        """Drops the messages of an origin up to this one: all workers have them."""
        log = self._logs.get(origin)
        if log is not None and log.entries and log.entries[0].last <= number:
            log.replace([entry for entry in log.entries if entry.last > number])

    def kept(self, origin: str) -> tuple[int, int]:
        """The number of kept messages of an origin, and their bytes."""
        entries = self._logs.get(origin, OriginLog()).entries
        count = entries[-1].last - entries[0].first + 1 if entries else 0
        return count, sum(entry.nbytes for entry in entries)

    # --- snapshots ----------------------------------------------------------------------------------

    def snapshot(self) -> LogSnapshot:
        """All of this log."""
        codes = [code for log in self._logs.values() for entry in log.entries for code in entry.codes]
        kept = {
            origin: [log.entries[0].first - 1, *(entry.last for entry in log.entries)]
            for origin, log in self._logs.items()
            if log.entries
        }
        return LogSnapshot([*(vector.clone() for vector in self.counts), *codes], dict(self.known), kept)

    def install(self, snapshot: LogSnapshot) -> bool:
        """Continues from the snapshot of another log, and adds the messages that only this one has.

        False if those messages are no longer kept one by one: nothing changes then.
        """
        only, width, theirs = self.missing(snapshot.known), len(self.counts), snapshot.known
        if only is None:
            return False
        for place, given in zip(self.counts, snapshot.tensors, strict=False):
            place.copy_(given)
        for each in only:
            entry = self.message(*each)
            assert entry is not None
            self._count(entry.codes)
        newer = {origin for origin, number in theirs.items() if number > self.known.get(origin, 0)}
        for origin in newer:
            self._logs[origin] = OriginLog()
        at = width
        for origin, ends in snapshot.kept.items():
            for before, last in pairwise(ends):
                if origin in newer:
                    codes = tuple(snapshot.tensors[at : at + width])
                    self._logs[origin].append(Entry(before + 1, last, codes))
                at += width
        self.known |= {origin: theirs[origin] for origin in newer}
        return True

    def check(self, snapshot: LogSnapshot) -> None:
        """WireError if this is not a snapshot of a log of the same model."""
        width, tensors, kept = len(self.counts), snapshot.tensors, snapshot.kept
        alike = [(given.dtype, given.numel()) for given in tensors[:width]]
        if alike != [(vector.dtype, vector.numel()) for vector in self.counts]:
            raise WireError("received counts of a different model")
        valid = isinstance(kept, dict) and all(
            isinstance(ends, list)
            and all(isinstance(end, int) for end in ends)
            and len(ends) > 1
            and ends[0] >= 0
            and all(end < later for end, later in pairwise(ends))
            and ends[-1] == snapshot.known.get(origin, 0)
            for origin, ends in kept.items()
        )
        if not valid or len(tensors) != width + width * sum(len(ends) - 1 for ends in kept.values()):
            raise WireError("received counts without their messages")

    def digest(self) -> str:
        """The SHA-256 of the counts."""
        return digest(*self.counts)

    def _count(self, codes: Sequence[Tensor]) -> None:
        for code, vector in zip(codes, self.counts, strict=True):
            selection.count(code, vector, self.tau)


def digest(*vectors: Tensor) -> str:
    """The SHA-256 of the bytes of some vectors."""
    import hashlib

    made = hashlib.sha256()
    for vector in vectors:
        made.update(vector.cpu().contiguous().numpy().data)
    return made.hexdigest()
