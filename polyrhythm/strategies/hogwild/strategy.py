"""Workers of one host that step on the same parameters without waiting for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import UpdatesLost
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import cloned, copied
from polyrhythm.strategies.call_numbers import CallNumbers
from polyrhythm.strategies.hogwild.checks import GradientCheck, check_devices, check_modules
from polyrhythm.strategies.hogwild.tally import CountsUpdates, Tally
from polyrhythm.strategies.snapshot_barrier import SnapshotBarrier

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Lock, Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class HogWild(Strategy):
    r"""Workers on one host update shared parameters in place, without locks (HogWild!).

    $$
    w_j \leftarrow w_j - \eta g_j \quad \text{for each } j \text{ with } g_j \ne 0
    $$

    Meanwhile the other workers do the same. The script's own optimizer steps, on each worker with a state of
    its own. Sparse gradients (`nn.Embedding` and `nn.EmbeddingBag` with sparse=True) touch their rows only.
    If two workers write to one place at the same moment, an update may be lost. Lost updates are counted on a
    sample of the rows, by integers that are incremented beside them in the same way; the summary has them.
    With `SparseSGD`, whose steps are compiled, a step is one row of a batch.

    To save its state all workers call `session.state_dict()` at the same place, and wait there for each
    other: the shared parameters are saved while no worker steps. A replacement skips the places where the
    others saved before it joined.

    - `lock`: each worker holds one lock from its forward pass to the end of its step (`SparseSGD`: for each
      row). Nothing is lost then, and more workers gain nothing; it is there to compare with.

    >>> import polyrhythm as pr
    >>> pr.parse("hogwild:lock=yes").traits.one_host
    True
    """

    name: ClassVar[str] = "hogwild"
    paper: ClassVar[str] = "Niu, Recht, Ré, Wright 2011, HOGWILD!: A Lock-Free Approach to Parallelizing SGD"

    lock: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=False,
            sparse_gradients=True,
            steps_in_place=True,
            one_host=True,
            one_optimizer=self.lock,
            max_lease=64,  # steps may be so short that requesting more batches would take most of the time
        )

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        check_devices(self, replica.optimizer.param_groups)
        check_modules(self, replica.model, replica.optimizer)
        return (LockedHogWildWorker if self.lock else HogWildWorker)(self, node, replica, group)


class HogWildWorker(Worker):
    """Steps on shared parameters."""

    strategy: HogWild
    tally: Tally
    checkpoints: Tensor  # by rank: the fingerprint of the checkpoint that each worker has loaded; 0 is none

    def __init__(self, strategy: HogWild, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.check_gradients = GradientCheck(strategy, replica)
        # All parameters are in shared memory already.
        self.barrier = SnapshotBarrier(node, lambda: None, CallNumbers(replica))

    def start(self) -> None:
        import torch

        node, replica, layout = self.node, self.replica, self.replica.layout
        shared = [
            node.memory.shared(f"parameters {part}", count, dtype)
            for part, ((dtype, _), count) in enumerate(zip(layout.kinds, layout.counts, strict=True))
        ]
        started = node.memory.shared("workers that have started", 1, torch.int64)
        if not started.item():  # otherwise this worker is a replacement
            if node.rank == 0:
                copied(replica.parameters, shared)
            # After this the parameters are there, and all workers have seen that none had started.
            workers = torch.ones(1, dtype=torch.int64)
            self.group.all_reduce(workers)
            started.copy_(workers)
        replica.move(shared)
        self.tally = Tally(node, replica, int(started))
        self.checkpoints = node.memory.shared("checkpoints", int(started), torch.int64)
        self.share_loop(None)
        if not node.incarnation:
            # Before it replies to requests: another worker may already be at its first snapshot.
            self.barrier.begin(later=False)
        node.subscribe(self.barrier.on_message, SnapshotBarrier.kind)
        if node.incarnation:
            self.barrier.begin(later=True)

    def share_loop(self, lock: Lock | None) -> bool:
        """Has a compiled loop count its updates, and take the lock for each row; False if there is none."""
        if not isinstance(self.replica.optimizer, CountsUpdates):
            return False
        self.replica.optimizer.share(self.node.rank, self.tally.counters(0), lock)
        return True

    def step(self) -> None:
        if not self.checkpoints[self.node.rank]:
            self._check_checkpoints()  # others may have loaded one
        self.check_gradients()
        self.replica.apply()
        self.tally.count(self.replica)

    def finish(self) -> None:
        self.barrier.end()

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        if final:
            counted, lost = self.tally.result()
            self.node.log(UpdatesLost(counted, lost, lost / max(counted, 1)))
        elif self.barrier.come(join=True):
            shown = self.replica.consensus_vectors()
            self.barrier.take(lambda: copied(self.replica.parameters, shown))
            return shown
        return self.replica.parameters

    def state_dict(self) -> State:
        state = State()
        if not self.barrier.come():  # a replacement runs through epochs that are over
            return state

        def save() -> None:
            # The script's copy of the model is no snapshot: others may step while it is made.
            counted, lost = self.tally.result()
            state.update(parameters=cloned(self.replica.parameters), counted=counted, lost=lost)

        self.barrier.take(save)
        return state

    def load_state_dict(self, state: State) -> None:
        import torch

        if not state:
            raise UsageError(
                "this state holds no parameters: it was saved by a worker that had just joined. A run cannot "
                "continue from it; leave session.load_state_dict() out, and training starts from the saved "
                "model"
            )
        if self.replica.steps:
            raise UsageError("session.load_state_dict() must be called before the first step")
        self.checkpoints[self.node.rank] = _fingerprint(state)
        if self.node.rank == 0:
            copied(state["parameters"], self.replica.parameters)
            self.tally.resume(state["counted"], state["lost"])
        self.group.all_reduce(torch.zeros(1))  # no worker steps before all have loaded
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        """UsageError if workers resumed from different checkpoints."""
        mine = int(self.checkpoints[self.node.rank])
        for rank, other in enumerate(self.checkpoints.tolist()):
            if other != mine:
                raise UsageError(
                    f"worker {rank} resumed from a different checkpoint than {self.node.me}: either each "
                    "worker loads the state that it saved itself, all of the same step, or none does"
                )


class LockedHogWildWorker(HogWildWorker):
    """Holds one lock from its forward pass to the end of its step."""

    lock: Lock | None = None  # None if the compiled loop of `SparseSGD` takes it for each row

    def start(self) -> None:
        super().start()
        lock = self.node.memory.lock("step")
        if lock.mutex is None or not self.share_loop(lock):
            self.lock = lock

    def before_forward(self) -> None:
        if self.lock is not None:
            self.lock.take()

    def step(self) -> None:
        self.before_forward()  # this worker has the lock already, unless the gradient came from elsewhere
        super().step()
        self.release()

    def finish(self) -> None:
        self.release()  # in case that the last forward pass led to no step
        super().finish()

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        self.release()  # others must be able to reach the barrier
        return super().consensus(final)

    def state_dict(self) -> State:
        self.release()
        return super().state_dict()

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()


def _fingerprint(state: State) -> int:
    """A number above 0 that tells two checkpoints apart."""
    import hashlib

    import torch

    digest = hashlib.blake2b(digest_size=7)
    for part in state["parameters"]:
        digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return 1 + int.from_bytes(digest.digest(), "little")
