"""Workers of one host that step on the same parameters, and do not wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import UpdatesLost
from polyrhythm.core.legacy import Legacy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica
    from polyrhythm.optim.sparse_sgd import Counts

MOST = 1 << 16  # rows of a tensor on which updates are counted
MOST_COMPILED = 1 << 12  # the same where a step is so short that counting more would take half of the time
LINE = 8  # words of a cache line


@dataclass(frozen=True)
class HogWild(Legacy):
    """Workers of one host share the parameters in memory; each steps on them in place, without locks.

    Each reads w, computes the gradient g of its batch, and then w_j <- w_j - eta g_j for each j that g
    touches; meanwhile others do the same. The script's own optimizer steps, in each worker with a state of
    its own. Sparse gradients (`nn.Embedding` and `nn.EmbeddingBag` with sparse=True) touch their rows only.
    Two that write to one place in the same moment may lose an update. How many are lost is counted, on a
    sample of the rows, by integers that are incremented beside them in the same way; the summary tells.
    With `RowSGD`, whose steps are compiled, a step is one row of a batch.

    With `lock` each holds one lock from its forward pass to the end of its step; `RowSGD` has it row by row.
    Nothing is lost then, and nothing is won by more workers; it is there to compare with.

    >>> import polyrhythm as pr
    >>> pr.parse("hogwild:lock=yes").lock
    True
    """

    name: ClassVar[str] = "hogwild"
    sparse: ClassVar[bool] = True
    in_place: ClassVar[bool] = True
    one_host: ClassVar[bool] = True
    lease: ClassVar[int] = 64  # its steps may be so short that asking for more would take most of the time
    paper: ClassVar[str] = "Niu, Recht, Ré, Wright 2011, HOGWILD!: A Lock-Free Approach to Parallelizing SGD"

    lock: bool = False

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def watches_forward(self) -> bool:
        return self.lock

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for device in {each.device.type for group in groups for each in group["params"]} - {"cpu"}:
            raise UsageError(
                f"{self} works on memory that processes share, and the model is on {device}: leave it on the "
                "CPU, or use another strategy, such as async"
            )

    def start(self, node: Node, replica: Replica) -> None:
        import torch

        from polyrhythm.optim.sparse_sgd import RowSGD

        check_rows(self, replica.model, replica.optimizer)
        layout = replica.layout
        w = [
            node.memory.shared(f"parameters {part}", count, dtype)
            for part, ((dtype, _), count) in enumerate(zip(layout.kinds, layout.counts, strict=True))
        ]
        begun = node.memory.shared("workers that have begun", 1, torch.int64)
        if not begun.item():  # otherwise it takes the place of one that died
            if node.rank == 0:
                for place, mine in zip(w, replica.parameters, strict=True):
                    place.copy_(mine)
            workers = torch.ones(1, dtype=torch.int64)
            node.group().all_reduce(workers)  # now it is there, and all have seen that it had not begun
            begun.copy_(workers)
        replica.move(w)
        tally = replica.notes["tally"] = Tally(node, replica, int(begun))
        lock = node.memory.lock("step") if self.lock else None
        if isinstance(replica.optimizer, RowSGD):
            compiled = lock is not None and lock.mutex is not None
            replica.optimizer.share(node.rank, tally.of(0), lock if compiled else None)
            lock = None if compiled else lock  # for each row is enough
        replica.notes["lock"] = lock

    def before_forward(self, node: Node, replica: Replica) -> None:
        if replica.notes["lock"] is not None:
            replica.notes["lock"].take()

    def step(self, node: Node, replica: Replica) -> None:
        check_gradients(self, replica)
        self.before_forward(node, replica)  # it has the lock, unless the gradient came from elsewhere
        replica.apply()
        replica.notes["tally"].count(replica)
        self._release(replica)

    def finish(self, node: Node, replica: Replica) -> None:
        self._release(replica)  # should the last forward pass have led to no step

    def _release(self, replica: Replica) -> None:
        if replica.notes["lock"] is not None:
            replica.notes["lock"].release()

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        made, lost = replica.notes["tally"].result()
        node.log(UpdatesLost(made, lost, lost / max(made, 1)))
        return replica.parameters


class Tally:
    """Counts updates where they are made: integers in shared memory that nobody locks either.

    Each step increments those of the rows that it touches, right after it has touched them, as the step does:
    read, add, write. Each worker also counts, for itself, how often it does so. What is missing in the end
    was lost. Of a tensor with many rows only some are counted, the same at every step and for every worker.
    """

    def __init__(self, node: Node, replica: Replica, workers: int) -> None:
        import torch

        from polyrhythm.optim.sparse_sgd import RowSGD

        # Of each parameter, where its counts begin and end, and of how many rows (a power of 2) one counts.
        self._places: list[tuple[int, int, int]] = []
        self._by_loop = isinstance(replica.optimizer, RowSGD)  # which counts what it does by itself
        most = MOST_COMPILED if self._by_loop else MOST
        stop = 0
        for piece in replica.layout.pieces:
            rows = piece.shape[0] if piece.shape else 1
            shift = max(0, (rows - 1).bit_length() - (most - 1).bit_length())
            start, stop = stop, stop + -(-rows // (1 << shift))
            self._places.append((start, stop, shift))
        self._counts = node.memory.shared("counts", stop, torch.int64).numpy()
        # A line of the cache for each worker; one that takes another's place goes on with its number.
        self._made = node.memory.shared("made", LINE * workers, torch.int64).numpy()
        self._mine = LINE * node.rank

    def count(self, replica: Replica) -> None:
        import numpy as np

        if self._by_loop:  # and whatever `backward()` may have left in `.grad` is not stepped on
            return
        made = self._mine
        for parameter, (start, stop, shift) in zip(replica.layout.parameters, self._places, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            counts = self._counts[start:stop]
            if gradient.is_sparse:
                rows = gradient._indices().numpy()[0]
                if shift:
                    rows = rows[rows & ((1 << shift) - 1) == 0] >> shift
                self._made[made] += len(rows)
                np.add.at(counts, rows, 1)
            else:
                self._made[made] += stop - start
                counts += 1

    def of(self, number: int) -> Counts:
        """Where a compiled loop counts the updates of one parameter by itself."""
        from polyrhythm.optim.sparse_sgd import Counts

        start, stop, shift = self._places[number]
        return Counts(self._counts[start:stop], shift, self._made[self._mine : self._mine + 1])

    def result(self) -> tuple[int, int]:
        """How many updates were counted by those who made them, and how many of these are missing."""
        made = int(self._made.sum())
        return made, made - int(self._counts.sum())


def check_rows(strategy: Legacy, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses optimizers that would make of a sparse gradient an update of all rows, or cannot have one."""
    import torch

    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    weights = {
        id(module.weight): f"{name or 'the model'} ({type(module).__name__} with sparse=True)"
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.sparse and module.weight.requires_grad
    }
    _refuse(strategy, optimizer, weights)


def check_gradients(strategy: Legacy, replica: Replica) -> None:
    """The same for those that no module told of, as of `F.embedding(..., sparse=True)`: at the first step
    that has them, before it is taken."""
    seen = replica.notes.setdefault("sparse", set())
    found = {
        id(parameter): piece.name
        for parameter, piece in zip(replica.layout.parameters, replica.layout.pieces, strict=True)
        if parameter.grad is not None and parameter.grad.is_sparse and id(parameter) not in seen
    }
    if found:
        _refuse(strategy, replica.optimizer, found)
        seen.update(found)


def _refuse(strategy: Legacy, optimizer: Optimizer, sparse: Mapping[int, str]) -> None:
    """Raises UsageError if one of these parameters, by their ids, has an optimizer that is not for them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            wrong = _densifies(optimizer, group)
            if id(parameter) in sparse and wrong:
                raise UsageError(
                    f"{strategy}: {sparse[id(parameter)]} has sparse gradients, and {wrong} would make of "
                    "each an update of all rows: use SGD without momentum and weight decay, Adagrad or "
                    "SparseAdam for it, or leave sparse=True out"
                )


def _densifies(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """What about an optimizer is not for sparse gradients; "" if all is well."""
    import torch

    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        return ""
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        settings = [f"{key}={group[key]:g}" for key in ("momentum", "weight_decay") if group.get(key)]
        return f"{name} with {' and '.join(settings)}" if settings else ""
    # One that is not of torch is its writer's business.
    return name if type(optimizer).__module__.startswith("torch.optim") else ""
