"""The other hosts of a run and the workers that each runs, as logic without I/O.

A launcher on another host (`launch/joiner.py`) talks to the coordinator as a peer of role `HOST`:

    it requests  enlist {version, workers, address, site}  the reply has its ranks and the plan, or an error
    it receives  fork {rank, incarnation}             start this worker
                 kill {rank, incarnation}             end this worker; its exit is not reported
                 released {rank, incarnation}         no node uses the memory of this incarnation any longer
                 end {message, exit_code}             the run is over
    it sends     exit {rank, incarnation, status}     the process of this worker has ended
                 leave {reason}                       all workers that are left here have ended

If its connection ends without a message, all its workers have ended too.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyrhythm import __version__
from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.launch.program import Program
from polyrhythm.wire.channel import HOST

__all__ = ["HOST", "HostRegistry", "RemoteHost", "invitation", "listing"]


@dataclass
class RemoteHost:
    """Another host that takes part in the run."""

    address: str
    ranks: list[int]


class HostRegistry:
    """The hosts that have joined, and the ranks that no host has taken yet."""

    def __init__(self, plan: Plan) -> None:
        self._here, self._workers, self._sites = plan.local_workers, plan.workers, plan.sites
        self.free = list(range(self._here, self._workers))
        self.joined: dict[Peer, RemoteHost] = {}

    def enlist(
        self, who: Peer, version: object, workers: object, address: object, site: object = ""
    ) -> RemoteHost:
        """Gives a host the lowest free ranks, those of its site if it names one.

        Raises UsageError, shown on both hosts, if it cannot join.
        """
        if version != __version__:
            raise UsageError(f"the run uses polyrhythm {__version__}, and this host has {version}")
        if not isinstance(workers, int) or workers < 1:
            raise UsageError(f"workers is {workers}; there must be 1 or more")
        if not self.free:
            raise UsageError(f"the run has all of its {_count(self._workers)}; no more can join")
        if workers > len(self.free):
            raise UsageError(
                f"{_count(workers)} cannot join where {len(self.free)} of {self._workers} are missing"
            )
        free = self._free_at(str(site or ""), workers)
        host = self.joined[who] = RemoteHost(str(address), free[:workers])
        self.free = [rank for rank in self.free if rank not in host.ranks]
        return host

    @property
    def missing(self) -> dict[str, int]:
        """The number of workers that each site still lacks; without sites all are at the site ""."""
        if not self._sites:
            return {"": len(self.free)}
        found = {site: sum(rank in ranks for rank in self.free) for site, ranks in self._sites.items()}
        return {site: count for site, count in found.items() if count}

    def _free_at(self, site: str, workers: int) -> list[int]:
        """The free ranks that a host with so many workers may have."""
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
        """The host that runs this node; None if it is this one."""
        if peer.role != "worker":
            return None
        return next((who for who, host in self.joined.items() if peer.rank in host.ranks), None)

    def host_left(self, peer: Peer) -> bool:
        """True if this worker's host has left the run."""
        return peer.role == "worker" and peer.rank >= self._here and self.home(peer) is None

    def leave(self, who: Peer) -> RemoteHost | None:
        """Removes a host; returns it, or None if it was removed before."""
        return self.joined.pop(who, None)

    def vacate(self, host: RemoteHost) -> None:
        """Frees the ranks of a host that left before the run began, for another host."""
        self.free = sorted([*self.free, *host.ranks])


def invitation(address: str, program: Program, plan: Plan, missing: Mapping[str, int]) -> str:
    """The workers that the run waits for, and the commands that start them, one for each site."""
    where, key, commands = address.removeprefix("tcp:"), str(plan.key), []
    for site, count in missing.items():
        if not program.is_script:
            place = f", site={site!r}" if site else ""
            call = f"polyrhythm.join({where!r}, {program.name}, workers={count}, key={key!r}{place})"
            commands.append(call)
            continue
        words = ["polyrhythm", "join", where, program.name, "--workers", str(count), "--key", key]
        words += ["--site", site] if site else []
        commands.append(shlex.join([*words, *(["--", *program.arguments] if program.arguments else [])]))
    shown = "\n  ".join(commands)
    lacks = f"waiting for {sum(missing.values())} of {_count(plan.workers)}"
    return f"{lacks}; on another host, with a copy of {key}:\n  {shown}"


def listing(ranks: Sequence[int]) -> str:
    """Names workers: "worker 2", "workers 2 and 3"."""
    *most, last = map(str, ranks)
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"


def _count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"
