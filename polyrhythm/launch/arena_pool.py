"""ArenaPool: the shared-memory arenas of a host and their assignment to nodes."""

from __future__ import annotations

from polyrhythm.core.address_space import address_space
from polyrhythm.core.peer import Peer
from polyrhythm.wire.arena import Arenas

ARENA = 1 << 38  # bytes of address space per node; only used pages take memory


LIMITED = (
    "the address space of processes is limited (ulimit -v), and shared memory would need much of it: nodes "
    "send each other tensors through sockets"
)


class ArenaPool:
    """Assigns an arena to each incarnation of a node.

    A dead worker's arena stays assigned while servers may read or write there, so replacements start in spare
    arenas. Any thread may release; one thread takes. The last arena is shared by all nodes.
    """

    def __init__(self, first: int, spare: int) -> None:
        self.arenas = Arenas(first + spare + 1, ARENA)
        self._first, self._spare = list(range(first)), list(range(first, first + spare))
        self._taken: dict[tuple[Peer, int], int] = {}

    @property
    def shared(self) -> Arenas | None:
        """The arenas for nodes to map; None if a limit of their address space forbids it."""
        room = address_space()
        return self.arenas if room is None or room > self.arenas.count * self.arenas.size else None

    def take(self, peer: Peer, incarnation: int) -> int | None:
        """Assigns an arena to this incarnation; None if all are taken."""
        free = self._spare if incarnation else self._first
        if not free:
            return None
        arena = self._taken[peer, incarnation] = free.pop(0)
        return arena

    def release(self, peer: Peer, incarnation: int) -> None:
        """Frees the arena of an incarnation that no node uses any longer, if it had one on this host."""
        arena = self._taken.pop((peer, incarnation), None)
        if arena is not None:
            self.arenas.clear(arena)
            self._spare.append(arena)
