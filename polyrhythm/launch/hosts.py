"""The other hosts of a run: who they are and which workers they run, as logic without I/O.

A launcher on another host (`launch/joiner.py`) talks to the coordinator as a peer of role `HOST`:

    it asks   enlist {version, workers, address}  and is told its ranks and the run's terms, or an error
    it hears  fork {rank, life}                   start this worker
              released {rank, life}               nobody uses the memory of this life any longer
              end {message, exit_code}            the run is over
    it says   exit {rank, status}                 the process of this worker has ended
              leave {reason}                      and so have all that are left here

The end of its connection without a word is the end of all its workers too.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyrhythm import __version__
from polyrhythm.errors import UsageError
from polyrhythm.launch.program import Program
from polyrhythm.node import Peer
from polyrhythm.wire.channel import HOST

__all__ = ["HOST", "Guest", "Hosts", "invitation", "listing"]


@dataclass
class Guest:
    """Another host, while it takes part."""

    address: str
    ranks: list[int]


class Hosts:
    """The hosts that have joined, and the ranks that no host has taken yet."""

    def __init__(self, here: int, workers: int) -> None:
        self._here, self._workers = here, workers
        self.free = list(range(here, workers))
        self.guests: dict[Peer, Guest] = {}

    def enlist(self, who: Peer, version: object, workers: object, address: object) -> Guest:
        """Gives a host the lowest free ranks; an error, for people on both hosts, says why it cannot be."""
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
        guest = self.guests[who] = Guest(str(address), self.free[:workers])
        del self.free[:workers]
        return guest

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


def invitation(address: str, program: Program, missing: int, workers: int, key: Path | None) -> str:
    """For whom the run waits, and what to type there."""
    where = address.removeprefix("tcp:")
    if not program.is_script:
        command = f"polyrhythm.join({where!r}, {program.name}, workers={missing}, key={str(key)!r})"
    else:
        words = ["polyrhythm", "join", where, program.name, "--workers", str(missing), "--key", str(key)]
        command = shlex.join([*words, *(["--", *program.arguments] if program.arguments else [])])
    return f"waiting for {missing} of {_count(workers)}; on another host, with a copy of {key}:\n  {command}"


def listing(ranks: Sequence[int]) -> str:
    """Workers by name: "worker 2", "workers 2 and 3"."""
    *most, last = map(str, ranks)
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"


def _count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"
