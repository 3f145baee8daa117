"""Membership: the nodes of a run, their deaths and replacements. Logic without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import Location, Prepared

Incarnation = tuple[Peer, int]  # one of the successive processes of a rank


class Membership:
    """The nodes of a run, from the first that joins to the last that leaves."""

    def __init__(self) -> None:
        self.members: dict[Peer, Location] = {}  # the nodes in the run, and their addresses
        self.workers: list[Peer] = []  # the workers among them, by rank
        self.gone: dict[Peer, str] = {}  # nodes that have left for good, and why
        self.expected: set[Peer] = set()  # workers whose replacement will join
        self.loading: set[Peer] = set()  # replacements that have joined, and were not announced yet
        self.incarnations: Counter[Peer] = Counter()  # the current incarnation of a peer
        self.replaced: Counter[str] = Counter()  # how many replacements of a peer have joined
        self.dead: list[Incarnation] = []
        self._deaths: dict[Peer, Counter[str]] = {}  # the causes of death, and how often
        self._holders: dict[Incarnation, set[Peer]] = {}  # nodes that may still use a dead worker's memory
        self._layouts: dict[str, dict[Peer, str]] = {}  # the layout hash of each node, by part of the model
        self._outlines: dict[str, list[str]] = {}  # that of the first node, by part of the model
        self.model_size = 1  # how many workers hold one model together

    @property
    def no_workers_left(self) -> bool:
        """True if no worker is in the run and none will join."""
        return not self.expected and not self.workers

    @property
    def originals(self) -> list[Peer]:
        """The workers in the run that replace no other."""
        return [peer for peer in self.workers if not self.incarnations[peer]]

    @property
    def leaders(self) -> list[Peer]:
        """The workers that request data: the first of those that hold one model together."""
        workers = self.workers
        return workers if self.model_size == 1 else [peer for peer in workers if self.leads(peer)]

    def leads(self, peer: Peer) -> bool:
        """True if a worker requests data, for itself and the others that hold the same model."""
        return peer.role == "worker" and peer.rank % self.model_size == 0

    def copies(self, peer: Peer) -> list[Peer]:
        """The workers in the run that hold the same part of a model, and replace no other."""
        return [each for each in self.originals if (each.rank - peer.rank) % self.model_size == 0]

    def model_of(self, peer: Peer) -> list[Peer]:
        """A node, and after it the workers, in the run or expected, that hold one model together with it."""
        if peer.role != "worker" or self.model_size == 1:
            return [peer]
        first = peer.rank - peer.rank % self.model_size
        model = {Peer("worker", rank) for rank in range(first, first + self.model_size)} - {peer}
        return [peer, *sorted(model & {*self.workers, *self.expected})]

    def current(self, peer: Peer) -> Incarnation:
        """The current incarnation of a peer."""
        return peer, self.incarnations[peer]

    def announced_to(self, peer: Peer) -> dict[Peer, Location]:
        """This node and those that it may send requests to: not other models that still load their data."""
        hidden = self.loading.difference(self.model_of(peer)) if self.loading else ()
        return {each: at for each, at in sorted(self.members.items()) if each not in hidden}

    def others(self, peer: Peer) -> list[Peer]:
        """The leaders of the other models in the run."""
        model = peer.rank // self.model_size
        return [each for each in self.leaders if each.rank // self.model_size != model]

    # --- joining and leaving ------------------------------------------------------------------------

    def join(self, peer: Peer, location: Location, late: bool = False) -> None:
        """A node has joined; `late` if training has begun: the others are not told before it has prepared."""
        self.members[peer] = location
        if late:
            self.loading.add(peer)
        self.incarnations.setdefault(peer, 0)  # looking up a missing key of a Counter is slow
        self._sort_workers()
        self.expected.discard(peer)

    def prepare(self, peer: Peer, request: Prepared) -> str:
        """A node has built its part of the model. Returns an error, or an empty string.

        All nodes with the same part must have the same layout of parameters.
        """
        part, layout = request.part, request.layout
        layouts = self._layouts.setdefault(part, {})
        outline = self._outlines.setdefault(part, request.outline)
        first = next(iter(layouts), peer)  # may be this peer itself, before it was replaced
        if layouts.setdefault(first, layout) != layout:
            of = f" of {part}" if part else ""
            where = _difference(peer, request.outline, first, outline)
            return (
                f"{peer} and {first} have different models{of}: {where}; every node must build the same "
                "model and optimizer"
            )
        layouts[peer] = layout
        return ""

    def announce(self, peer: Peer) -> None:
        """A replacement has prepared, and the others are told of it."""
        self.loading.discard(peer)
        self.replaced[str(peer)] += 1

    @property
    def prepared(self) -> int:
        """How many nodes have built their part of the model."""
        return sum(map(len, self._layouts.values()))

    def leave(self, peer: Peer, reason: str) -> list[Incarnation]:
        """A member has left. Returns the dead workers whose memory is no longer in use."""
        del self.members[peer]
        self.loading.discard(peer)
        self._sort_workers()
        self.gone[peer] = reason
        return [dead for dead in list(self._holders) if self.release(peer, dead)]

    def _sort_workers(self) -> None:
        self.workers = sorted(each for each in self.members if each.role == "worker")

    def count_death(self, peer: Peer, reason: str) -> None:
        """A node has died; it stays a member until `leave`."""
        self._deaths.setdefault(peer, Counter())[reason] += 1

    def mark_dead(self, peer: Peer) -> None:
        """The current incarnation of a worker is dead, and the others continue."""
        self.dead.append(self.current(peer))
        self.expected.discard(peer)

    def expect(self, peer: Peer) -> None:
        """The next incarnation of a worker will join."""
        self.gone.pop(peer, None)
        self.incarnations[peer] += 1

    @property
    def lost_for_good(self) -> list[str]:
        """The workers that have died and will not be replaced."""
        return [str(peer) for peer in sorted({dead for dead, _ in self.dead} & self.gone.keys())]

    # --- memory of the dead -------------------------------------------------------------------------

    def hold(self, dead: Incarnation, workers_too: bool) -> bool:
        """Servers, and workers if `workers_too`, may still use a dead worker's memory. False if none may."""
        holders = {each for each in self.members if workers_too or each.role == "server"}
        if holders:
            self._holders[dead] = holders
        return bool(holders)

    def release(self, holder: Peer, dead: Incarnation) -> bool:
        """A node no longer uses the memory of a dead worker. True if it was the last one."""
        holders = self._holders.get(dead)
        if holders is None:
            return False
        holders.discard(holder)
        if holders:
            return False
        del self._holders[dead]
        return True

    # --- for the summary ----------------------------------------------------------------------------

    @property
    def deaths(self) -> int:
        """How many nodes have died."""
        return sum(deaths.total() for deaths in self._deaths.values())

    def summary(self) -> dict[str, Any]:
        """The deaths and replacements."""
        joined, replaced = self.replaced.total(), dict(self.replaced)
        return {"lost": self.lost, "joined": joined, "replaced": replaced}

    @property
    def lost(self) -> dict[str, str]:
        """The nodes that have died, why, and how often if more than once."""
        return {
            str(peer): "; ".join(
                reason if count == 1 else f"{reason} {count} times" for reason, count in deaths.items()
            )
            for peer, deaths in self._deaths.items()
        }


def _difference(one: Peer, mine: Sequence[str], other: Peer, theirs: Sequence[str]) -> str:
    """The first parameter that two nodes do not have in common."""
    for a, b in zip_longest(mine, theirs, fillvalue="no parameter"):
        if a != b:
            return f"the first difference is {a} on {one} and {b} on {other}"
    return f"they differ after the first {len(mine)} parameters"
