"""The other hosts of a run: who they are and which workers they run, as logic without I/O.

A launcher on another host (`launch/joiner.py`) talks to the coordinator as a peer of role `HOST`:

    it asks   enlist {version, workers, address, site}  and is told its ranks and the run's terms, or an error
    it hears  fork {rank, life}                   start this worker
              released {rank, life}               nobody uses the memory of this life any longer
              end {message, exit_code}            the run is over
    it says   exit {rank, status}                 the process of this worker has ended
              leave {reason}                      and so have all that are left here

The end of its connection without a word is the end of all its workers too.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyrhythm import __version__
from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.launch.program import Program
from polyrhythm.wire.channel import HOST

__all__ = ["HOST", "Guest", "Hosts", "invitation", "listing"]


@dataclass
class Guest:
    """Another host, while it takes part."""

    address: str
    ranks: list[int]


class Hosts:
    """The hosts that have joined, and the ranks that no host has taken yet."""

    def __init__(self, here: int, workers: int, sites: Mapping[str, Sequence[int]] | None = None) -> None:
        self._here, self._workers = here, workers
        self._sites = sites or {}  # the ranks of each, if the run has sites
        self.free = list(range(here, workers))
        self.guests: dict[Peer, Guest] = {}

    def enlist(
        self, who: Peer, version: object, workers: object, address: object, site: object = ""
    ) -> Guest:
        """Gives a host the lowest free ranks, those of its site if it names one; an error, for people on both
        hosts, says why it cannot be."""
        if version != __version__:
            raise UsageError(f"the run is of polyrhythm {__version__}, and this host has {version}")
        if not isinstance(workers, int) or workers < 1:
            raise UsageError(f"workers is {workers}; there must be 1 or more")
        if not self.free:
            raise UsageError(f"the run has all of its {_count(self._workers)}; no more can join")
        if workers > len(self.free):
            raise UsageError(
                f"{_count(workers)} cannot join where {len(self.free)} of {self._workers} are missing"
            )
        free = self._free_at(str(site or ""), workers)
        guest = self.guests[who] = Guest(str(address), free[:workers])
        self.free = [rank for rank in self.free if rank not in guest.ranks]
        return guest

    @property
    def missing(self) -> dict[str, int]:
        """How many workers each site still lacks; without sites all are at one without a name."""
        if not self._sites:
            return {"": len(self.free)}
        found = {site: sum(rank in ranks for rank in self.free) for site, ranks in self._sites.items()}
        return {site: count for site, count in found.items() if count}

    def _free_at(self, site: str, workers: int) -> list[int]:
        """The free ranks that a host may have which brings so many workers."""
        missing = self.missing
        named = ", ".join(f"{name} ({count})" for name, count in missing.items())
        if not site:
            if len(missing) > 1 and workers < len(self.free):
                raise UsageError(f"the run has sites; say with --site at which this host is: {named}")
            return self.free
        if site not in self._sites:
            known = (
                f"it has: {', '.join(self._sites)}" if self._sites else "it has no sites: leave --site out"
            )
            raise UsageError(f"the run has no site {site!r}; {known}")
        if workers > missing.get(site, 0):
            raise UsageError(
                f"{_count(workers)} cannot join at {site}, where {missing.get(site, 0)} are missing; "
                f"the run lacks: {named}"
            )
        return [rank for rank in self.free if rank in self._sites[site]]

    def home(self, peer: Peer) -> Peer | None:
        """The host that runs this node, if another does."""
        if peer.role != "worker":
            return None
        return next((who for who, guest in self.guests.items() if peer.rank in guest.ranks), None)

    def homeless(self, peer: Peer) -> bool:
        """Whether this worker's host has left the run."""
        return peer.role == "worker" and peer.rank >= self._here and self.home(peer) is None

    def leave(self, who: Peer) -> Guest | None:
        """A host has left; what it was, if that is news."""
        return self.guests.pop(who, None)

    def vacate(self, guest: Guest) -> None:
        """Before the run begins, others may come in the place of a host that left."""
        self.free = sorted([*self.free, *guest.ranks])


def invitation(
    address: str, program: Program, missing: Mapping[str, int], workers: int, key: Path | None
) -> str:
    """For whom the run waits, and what to type there: at each site that lacks some."""
    where, commands = address.removeprefix("tcp:"), []
    for site, count in missing.items():
        if not program.is_script:
            place = f", site={site!r}" if site else ""
            call = f"polyrhythm.join({where!r}, {program.name}, workers={count}, key={str(key)!r}{place})"
            commands.append(call)
            continue
        words = ["polyrhythm", "join", where, program.name, "--workers", str(count), "--key", str(key)]
        words += ["--site", site] if site else []
        commands.append(shlex.join([*words, *(["--", *program.arguments] if program.arguments else [])]))
    shown = "\n  ".join(commands)
    lacks = f"waiting for {sum(missing.values())} of {_count(workers)}"
    return f"{lacks}; on another host, with a copy of {key}:\n  {shown}"


def listing(ranks: Sequence[int]) -> str:
    """Workers by name: "worker 2", "workers 2 and 3"."""
    *most, last = map(str, ranks)
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"


def _count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"
