"""AD-PSGD: workers that average with one other at a time, while both compute."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import WireError
from polyrhythm.core.events import Applied
from polyrhythm.core.peer import Peer
from polyrhythm.core.published import Key
from polyrhythm.core.strategy import Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import blocks, copied, cut
from polyrhythm.strategies.call_numbers import CallNumbers
from polyrhythm.strategies.decentralized.base import Decentralized, DecentralizedWorker
from polyrhythm.strategies.decentralized.topology import graph, parse_topology, regraph
from polyrhythm.strategies.snapshot_barrier import SnapshotBarrier

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group, Task
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.core.published import Fetch
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class ADPSGD(Decentralized):
    r"""Each worker averages with a random neighbor while it computes its gradient; none waits (AD-PSGD).

    $$
    d &= \frac{1}{2} (x_i - x_j), \qquad x_i \leftarrow x_i - d, \qquad x_j \leftarrow x_j + d \\
    x_i &\leftarrow x_i - \eta g_i(\hat{x}_i)
    $$

    $\hat{x}_i$ is $x_i$ as it was when the batch began. The graph is bipartite: workers of one side request
    an average at the end of a step, for the next one; those of the other side reply at once, whatever they
    compute. So no worker waits for one that waits. Edges within a side are not used.

    $d$ is computed once, by the worker that replies: $x_j$ gains what $x_i$ loses, whatever either has done
    meanwhile, so only updates move the sum of all $x$. Staleness counts the averages between the start of a
    gradient and its step.

    All workers call `session.consensus()` and `session.state_dict()` at the same places, and wait there for
    each other. Averages on their way are finished first, so each shows or saves its own $x$.

    - `topology`: which workers are neighbors, as for `gossip`

    >>> import polyrhythm as pr
    >>> pr.parse("adpsgd:ring").topology
    'ring'
    """

    name: ClassVar[str] = "adpsgd"
    main: ClassVar[str | None] = "topology"
    paper: ClassVar[str] = "Lian, Zhang, Zhang, Liu 2018, Asynchronous Decentralized Parallel SGD"

    topology: str = "complete"

    def __post_init__(self) -> None:
        parse_topology(self.topology)

    @property
    def traits(self) -> Traits:
        return Traits(lockstep=False, parameters_held_by_peers=True, survives_loss=True)

    def check(self, plan: Plan) -> None:
        graph(parse_topology(self.topology), plan.workers)

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return AdPsgdWorker(self, node, replica, group)


class AdPsgdWorker(DecentralizedWorker):
    """x is the model's parameters, which stay as they are during a pass, plus the drift.

    An average is a publication for the one worker that requested it: a repeated request gets the same d until
    it is acknowledged. Its key is the incarnation and the step of the worker that requests it.
    """

    kind: ClassVar[str] = "average"
    strategy: ADPSGD

    def __init__(self, strategy: ADPSGD, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.steps = 0  # of this worker, also before it was saved
        self.averages = 0  # that the drift consists of
        self.taken = 0  # averages that the parameters contain since the last step
        self.fetched: Fetch | None = None
        self.barrier = SnapshotBarrier(node, lambda: None, CallNumbers(replica))
        self._joining: Task | None = None  # this worker at the barrier

    @property
    def ranks(self) -> Sequence[int]:
        return sorted({self.node.rank, *(peer.rank for peer in self.node.members.workers)})

    @cached_property
    def drift(self) -> Sequence[Tensor]:
        """What averages have added to x since the parameters were x."""
        return self.replica.buffer(exact=True)

    @cached_property
    def x(self) -> Sequence[Tensor]:
        """What this worker sends to request an average; the reply d replaces it."""
        return self.replica.buffer()

    @property
    def kinds(self) -> tuple[str, ...]:
        return *super().kinds, self.barrier.kind

    def start(self) -> None:
        if not self.node.incarnation:
            # Before it replies to requests: another worker may already be at its first snapshot.
            self.barrier.begin(later=False)
        super().start()
        if self.node.incarnation:
            # Beside the first steps: a snapshot that is being taken does not wait for this worker.
            self._joining = self.node.spawn(self.barrier.begin, True)

    def begin(self) -> None:
        if self.node.incarnation:
            self.published.begin(Key(0, 0))

    def read_parameters(self, start: int, stop: int) -> tuple[Tensor, ...]:
        x = super().read_parameters(start, stop)
        if self.averages:
            for part, drift in zip(x, cut(self.drift, start, stop), strict=True):
                part.add_(drift)
        return x

    def step(self) -> None:
        self.published.start()
        self.steps += 1
        self.join()
        with self.node.lock():
            self.apply_drift()
            self.replica.apply()
        self.node.log(Applied(staleness=self.taken))
        self.taken = 0
        self.request()

    def finish(self) -> None:
        self.join()
        self.join_barrier()
        self.barrier.end()
        self.published.trim()

    def apply_drift(self) -> None:
        """Moves the parameters to x."""
        if self.averages:
            for mine, drift in blocks(self.replica.parameters, self.drift):
                mine.add_(drift)
                drift.zero_()
        self.taken, self.averages = self.taken + self.averages, 0

    # --- the side that requests ---------------------------------------------------------------------

    def request(self) -> None:
        """Requests the average for the next step."""
        neighbor = self.neighbor()
        if neighbor is None:
            return
        with self.node.lock():
            copied(self.replica.parameters, self.x)
            if self.averages:
                for x, drift in blocks(self.x, self.drift):
                    x.add_(drift)
        key = Key(self.node.incarnation, self.steps)
        self.fetched = self.published.fetch(neighbor, key, *self.x, into=self.x)

    def join(self) -> None:
        """Takes in the average that was requested: x_i <- x_i - d. A neighbor that died keeps its part."""
        if self.fetched is not None and self.fetched.wait() is not None:
            with self.node.lock():
                for mine, d in blocks(self.replica.parameters, self.x):
                    mine.sub_(d)
            self.taken += 1
            self.fetched.acknowledge()
        self.fetched = None

    def neighbor(self) -> Peer | None:
        """A random neighbor for this step; None for workers that only reply."""
        near = requests(self.strategy.topology, tuple(self.ranks), self.node.seed)[self.node.rank]
        if not near:
            return None
        seed = repr((self.node.seed, self.node.rank, self.steps)).encode()
        drawn = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
        return Peer("worker", near[drawn % len(near)])

    # --- the side that replies -----------------------------------------------------------------------

    def on_message(self, message: Message | None) -> None:
        if message is not None and message.kind == self.kind and _shape(message.tensors) != self._shape:
            raise WireError(
                f"{message.sender} requested an average of different parameters than {self.node.me} has: all "
                "workers must have the same model"
            )
        if message is None or message.kind == self.barrier.kind:
            self.barrier.on_message(message)
        if message is None or message.kind != self.barrier.kind:
            super().on_message(message)
            self.average_requested()

    def average_requested(self) -> None:
        """Averages with the workers that have requested it: x_j <- x_j + d."""
        with self.node.lock():
            for request in self.published.waiting():
                average = self.published.spare_buffers(self.replica.parameters)
                theirs = [part.to(d.device) for part, d in zip(request.tensors, average, strict=True)]
                for d, x_i, mine, drift in blocks(average, theirs, self.replica.parameters, self.drift):
                    d.copy_(x_i).sub_(mine).sub_(drift).mul_(0.5)
                    drift.add_(d)
                self.averages += 1
                self.published.publish_for(request, average)

    @cached_property
    def _shape(self) -> list[tuple[object, int]]:
        return _shape(self.replica.parameters)

    # --- the mean, and saved state ------------------------------------------------------------------

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        if not final:
            self.join_barrier()
        if final or not self.barrier.come(join=True):
            return super().consensus(final)
        self.join()  # once all have done this, x stays as it is on all workers
        mean: list[Sequence[Tensor]] = []
        self.barrier.take(lambda: None, read=lambda: mean.append(super(AdPsgdWorker, self).consensus()))
        return mean[0]

    def join_barrier(self) -> None:
        """Blocks until a replacement takes part in snapshots."""
        if self._joining is not None:
            self._joining.join()
            self._joining = None

    def state_dict(self) -> State:
        self.join_barrier()
        if not self.barrier.come():  # a replacement that runs through past epochs
            return {}
        self.join()  # once all workers are at the barrier, no average is in flight
        state: State = {}

        def save() -> None:
            self.apply_drift()
            state.update(DecentralizedWorker.state_dict(self), steps=self.steps, taken=self.taken)
            state["snapshot"] = self.barrier.numbers[0]

        self.barrier.take(save)
        return state

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.steps, self.taken = state["steps"], state["taken"]
        self.published.begin(Key(0, 0), f"snapshot {state['snapshot']}")
        self.average_requested()  # workers that have loaded their states before this one


@lru_cache(maxsize=16)
def requests(topology: str, ranks: tuple[int, ...], seed: int) -> Mapping[int, Sequence[int]]:
    """The workers from which each of these may request an average: none, if it is on the side that replies.

    The sides alternate along a depth-first walk through the graph. So each edge of the walk leads from one
    side to the other, and the edges between the sides connect all workers.
    """
    near = regraph(parse_topology(topology), ranks, seed)
    side: dict[int, int] = {}
    ahead = [(ranks[0], 0)]
    while ahead:
        rank, turn = ahead.pop()
        if rank not in side:
            side[rank] = turn
            ahead += [(other, 1 - turn) for other in reversed(near[rank]) if other not in side]
    return {rank: () if side[rank] else tuple(other for other in near[rank] if side[other]) for rank in ranks}


def _shape(vectors: Sequence[Tensor]) -> list[tuple[object, int]]:
    return [(vector.dtype, vector.numel()) for vector in vectors]
