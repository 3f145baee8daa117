"""SimulatedGroup: the collectives of simulated workers.

The last worker to enter a collective computes the result of all workers, and the cost model says when it is
complete. With `--collective ring` the code of the ring runs instead, message by message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.collectives import coded_ring as hops
from polyrhythm.collectives import direct, ring
from polyrhythm.collectives.arithmetic import elements_sent, elements_sent_to, flat_views, reduce
from polyrhythm.core.errors import PeerLost, PolyrhythmError
from polyrhythm.core.group import Coding, Group, Task, Use, first_number
from polyrhythm.core.peer import Peer
from polyrhythm.worlds.simulated.fibers import Fiber

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.worlds.simulated.node import SimulatedNode
    from polyrhythm.worlds.simulated.world import Simulated


GroupName = tuple[int | str, ...]


class SimulatedGroup(Group):
    """Some workers, by rank. `name` has their ranks and their name; it is empty for the group of all."""

    def __init__(self, node: SimulatedNode, members: Sequence[Peer], name: GroupName = ()) -> None:
        self.node, self.members, self.name = node, members, name
        self.rank = members.index(node.me) if node.me in members else -1
        self.count = len(members)  # does not shrink: a collective that lacks a dead member never completes
        self._nodes = [node.world.nodes[each] for each in members]  # a replacement is another node
        self._first, self._number = first_number(members, str(name)) if name else 0, 0
        self._parts: dict[GroupName, SimulatedGroup] = {}

    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        if not self.node.world.ring:
            return self._enter("all_reduce", flat_views(tensors, op), op)
        number = self._first + self.next()
        return self.node.spawn(ring.all_reduce, self.node, self.members, tensors, op, number)

    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        if self.node.world.ring and len(self.members) > 1:
            rest = [self.begin_all_reduce(*flags, op="mean")] if flags else []
            number = self._first + self.next()
            codes = self.node.spawn(hops.mean, self.node, self.members, coding, vectors, number)
            return _Several([*rest, codes])
        mine = _Collective(self, "gather", coding.send(vectors), str(coding.codec))
        mine.coding, mine.vectors, mine.flags = coding, vectors, flags
        return self.node.world.collectives.enter(mine)

    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        self._enter("broadcast", tensors, str(self.members[root].rank)).join()

    def exchange(self, what: str, outgoing: Sequence[Sequence[Tensor]], use: Use) -> None:
        direct.exchange(self.node, self.members, what, outgoing, use, self._first + self.next())

    def split(self, members: Sequence[Peer], name: str = "") -> SimulatedGroup:
        part = tuple(sorted(members))
        if part == tuple(self.members) and not name:
            return self
        label: GroupName = (*(peer.rank for peer in part), *([name] if name else []))
        if label not in self._parts:
            self._parts[label] = SimulatedGroup(self.node, part, label)
        return self._parts[label]

    def next(self) -> int:
        """The number of the next collective."""
        self._number += 1
        return self._number

    @property
    def lost(self) -> list[str]:
        """The members that have died since the group was made."""
        return [str(each.me) for each in self._nodes if each.crashed]

    def _enter(self, kind: str, tensors: Sequence[Tensor], detail: str) -> _Collective:
        return self.node.world.collectives.enter(_Collective(self, kind, tensors, detail))

    def __str__(self) -> str:
        return f"workers {', '.join(map(str, self.name))}" if self.name else "all workers"


class _Collective(Task):
    """One worker's part in a collective."""

    def __init__(self, group: SimulatedGroup, kind: str, tensors: Sequence[Tensor], detail: str) -> None:
        self.node, self.kind, self.tensors, self.detail = group.node, kind, tensors, detail
        self.group, self.number = group, group.next()
        # Of a gather: the codec, the vectors that get the mean, and tensors that are averaged uncoded.
        self.coding: Coding | None = None
        self.vectors: Sequence[Tensor] = ()
        self.flags: Sequence[Tensor] = ()
        self._done = self._lost = False
        self._waiter: Fiber | None = None

    def lose(self) -> None:
        """Called when a member has died and the collective cannot complete."""
        self._lost = True
        if self._waiter is not None:
            self.node.world.loop.at(self.node.now(), self._waiter.resume, None)

    def finish(self, _: object = None) -> None:
        self._done = True
        if self._waiter is not None:
            self._waiter.resume()

    def join(self) -> None:
        while not self._done:
            if self._lost:
                gone = ", ".join(self.group.lost or self.node.world.coordinator.membership.lost)
                what = f"{self.node.me} waited in {self.kind} for {gone}, which is gone"
                raise PeerLost(what, untouched=True)  # the last to enter would have written the results
            self._waiter = self.node.current()
            self._waiter.block(self.kind, "number", self.number, "with", self.group)


class _Several(Task):
    """Several tasks as one."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def join(self) -> None:
        for task in self._tasks:
            task.join()


class OpenCollectives:
    """The collectives that some workers have entered and others have not."""

    def __init__(self, world: Simulated) -> None:
        self._world = world
        # By group and number, then by rank.
        self._open: dict[tuple[GroupName, int], dict[int, _Collective]] = {}
        self._abandoned = False  # the run has failed
        self._free: dict[GroupName, float] = {}  # when the last collective of each group ends

    def enter(self, mine: _Collective) -> _Collective:
        """Enters a collective; the last member to enter completes it."""
        if mine.group.lost or self._abandoned:
            mine.lose()
            return mine
        which = mine.group.name, mine.number
        parts = self._open.setdefault(which, {})
        parts[mine.node.rank] = mine
        if len(parts) == mine.group.count:
            del self._open[which]
            self._complete(parts, mine.group.name)
        return mine

    def lose(self, abandon: bool = False) -> None:
        """Called when a worker has died: waits in its groups end with an error; with `abandon` all do."""
        self._abandoned |= abandon
        for which, parts in list(self._open.items()):
            if self._abandoned or next(iter(parts.values())).group.lost:
                del self._open[which]  # a replacement of the group begins with the same numbers
                for part in parts.values():
                    part.lose()

    def _complete(self, parts: dict[int, _Collective], group: GroupName) -> None:
        ranks = sorted(parts)
        first = parts[ranks[0]]
        for rank, part in sorted(parts.items()):
            if (part.kind, part.detail) != (first.kind, first.detail):
                raise PolyrhythmError(
                    f"worker {rank} is in {part.kind} ({part.detail}) where worker {ranks[0]} is in "
                    f"{first.kind} ({first.detail}): all workers must take the same collectives in the same "
                    "order"
                )
        world, nbytes = self._world, sum(tensor.nbytes for tensor in first.tensors)
        if first.kind == "all_reduce":
            for vectors in zip(*(parts[rank].tensors for rank in ranks), strict=True):
                if len(ranks) > 1:
                    reduce(vectors, first.detail, vectors)
                self._count(vectors, ranks)
            cost = world.costs.all_reduce(ranks, nbytes)
        elif first.kind == "gather":
            cost = self._gather(parts, ranks)
        else:
            self._broadcast(parts, ranks, int(first.detail))
            cost = world.costs.broadcast(ranks, int(first.detail), nbytes)
        # The collectives of a group share its links, so they run one after the other. Those of different
        # groups do not delay each other: groups inside two sites have separate links, and the traffic between
        # sites is slow compared with that inside.
        free = max(world.loop.now, self._free.get(group, 0.0)) + (cost if len(ranks) > 1 else 0)
        self._free[group] = free
        for rank in ranks:
            world.loop.at(free, parts[rank].finish, None)

    def _gather(self, parts: dict[int, _Collective], ranks: Sequence[int]) -> float:
        """Averages the codes of all workers, once for all of them. Returns the duration."""
        first = parts[ranks[0]]
        assert first.coding is not None
        first.coding.combine([parts[rank].tensors for rank in ranks], first.vectors)
        for flags in zip(*(parts[rank].flags for rank in ranks), strict=True):
            reduce(flags, "mean", flags)
        sizes = [sum(each.nbytes for each in (*parts[rank].tensors, *parts[rank].flags)) for rank in ranks]
        for rank, size in zip(ranks, sizes, strict=True):
            if rank != ranks[0]:
                first.coding.adopt(first.vectors, parts[rank].vectors)
            self._sent(rank, (len(ranks) - 1) * size, len(self._elsewhere(rank, ranks)) * size)
        return self._world.costs.all_gather(ranks, sizes)

    def _broadcast(self, parts: dict[int, _Collective], ranks: Sequence[int], root: int) -> None:
        for rank in ranks:
            if rank != root:
                for place, value in zip(parts[rank].tensors, parts[root].tensors, strict=True):
                    place.copy_(value)
                    self._sent(root, value.nbytes, len(self._elsewhere(root, [rank])) * value.nbytes)

    def _count(self, vectors: Sequence[Tensor], ranks: Sequence[int]) -> None:
        """Counts the bytes that each worker would have sent."""
        count, size = vectors[0].numel(), vectors[0].element_size()
        for index, rank in enumerate(ranks):
            between = elements_sent_to(count, len(ranks), index, self._elsewhere(rank, ranks))
            self._sent(rank, elements_sent(count, len(ranks), index) * size, between * size)

    def _sent(self, rank: int, nbytes: int, between: int) -> None:
        node = self._world.nodes[Peer("worker", rank)]
        node.bytes_sent += nbytes
        node.bytes_between += between

    def _elsewhere(self, rank: int, ranks: Sequence[int]) -> Sequence[int]:
        """The positions in `ranks` of the workers that are at another site than this one."""
        if self._world.costs.sites is None:
            return ()
        site = self._world.costs.sites.of
        return [place for place, other in enumerate(ranks) if site[other] != site[rank]]
