"""ReplicaCheck: finds replicas that must be equal and are not, and says where they differ first.

Every so many steps, and at the end, each worker sends a summary of its parameters, and the settings of its
optimizer, to the coordinator, which compares them. No worker waits for another.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.core.requests import CompareReplica, ReplicaDifference, ShowNote, TensorSummary
from polyrhythm.core.worker import Worker
from polyrhythm.model.replica import Replica
from polyrhythm.session.context import WorldContext
from polyrhythm.session.seeds import mix

EVERY = 100  # steps, unless the plan says otherwise
_OWN_MODEL = (
    "; parameters that a worker has averaged over time, or kept as its best, belong in a model of their own, "
    "saved by session.save()"
)
COLUMNS = 4096  # of the matrix as which a projection sees a tensor


class ReplicaCheck:
    """Compares one replica with those of the other workers, under strategies in lockstep.

    The settings of the optimizer are always compared, and the parameters where they must be equal
    (`Worker.replicas_equal`). Under a strategy with rounds a check waits for the end of a round.
    """

    def __init__(
        self,
        context: WorldContext,
        worker: Worker,
        replica: Replica,
        every: int,
        part: int,
        batches: Callable[[], int],
    ) -> None:
        self._context, self._worker, self._replica = context, worker, replica
        self._every, self._part, self._batches = every, part, batches
        self._compares_parameters = worker.replicas_equal  # at the start no round has begun
        self._next = 1  # the step to check next: the first one shows different arguments of scripts

    def after_step(self) -> None:
        """Called after each step."""
        if self._replica.steps < self._next:
            return
        if self._worker.replicas_equal or not self._compares_parameters:
            self._next = (self._replica.steps // self._every + 1) * self._every
            self.compare()

    def compare(self, over: bool = False) -> None:
        """Compares now. Called by all workers after the same step, and when their scripts are `over`."""
        replica = self._replica
        tensors = [replica.layout.view(replica.parameters, piece) for piece in replica.layout.pieces]
        settings = [{name: repr(value) for name, value in group.items()} for group in replica.settings()]
        found = self._context.request(
            CompareReplica(
                self._part,
                replica.steps,
                summaries(tensors) if self._worker.replicas_equal else [],
                settings,
                over,
                self._batches(),
            )
        )
        if not found.other:
            return
        if found.rounding or found.batches is not None:
            self._context.request(ShowNote(self._describe(found)))
        else:
            raise UsageError(self._describe(found, over))

    def _describe(self, found: ReplicaDifference, over: bool = False) -> str:
        step, me = self._replica.steps, self._context.me
        if found.batches is not None:
            return (
                f"after step {step} {me} has got {self._batches()} batches and {found.other} "
                f"{found.batches}: a worker that skips a batch takes fewer steps than the others, which ends "
                "the run with an error; skip it on all workers, by a value that is equal on all, such as "
                "session.mean(loss)"
            )
        if found.setting:
            mine = self._replica.settings()[found.group][found.setting]
            return (
                f"after step {step} parameter group {found.group} has {found.setting}={mine!r} on {me} and "
                f"{found.theirs} on {found.other}: the scripts have different arguments, or a scheduler "
                "decides by a value of one worker, such as its loss; pass ReduceLROnPlateau to "
                "session.prepare(), which gives all workers the mean, or decide by a value that is equal on "
                "all workers"
            )
        name = self._replica.layout.pieces[found.tensor].name
        more = f" and {found.count - 1} more" if found.count > 1 else ""
        where = f"after step {step} {name}{more} on {me} and {found.other}"
        if found.rounding:
            return (
                f"{where} differ by no more than rounding: the machines or their versions of torch compute "
                "differently, and replicas drift apart slowly"
            )
        return (
            f"{where} differ, but under {self._worker.strategy} all replicas are equal there: the script "
            "changes parameters outside optimizer.step() or averaged gradients, as by noise, or takes a "
            "branch that depends on the rank" + (_OWN_MODEL if over else "")
        )


def replica_check(
    context: WorldContext, worker: Worker, replica: Replica, part: int, batches: Callable[[], int]
) -> ReplicaCheck | None:
    """The check of one part; None where workers go at their own pace, and in a replacement of a dead worker,
    whose schedulers begin again. `batches`: how many the script has got."""
    plan, traits = context.plan, worker.strategy.traits
    if plan.check_replicas == 0 or plan.workers == 1 or context.node.incarnation or not traits.lockstep:
        return None
    every = EVERY if plan.check_replicas is None else plan.check_replicas
    return ReplicaCheck(context, worker, replica, every, part, batches)


def summaries(tensors: Sequence[Tensor]) -> list[TensorSummary]:
    """A checksum of the bits of each tensor, a projection and its norm."""
    return [
        TensorSummary(
            zlib.crc32(each.view(torch.uint8).numpy().data),
            _projection(values),
            float(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))),
        )
        for each in (tensor.detach().reshape(-1).cpu() for tensor in tensors)
        for values in [torch.view_as_real(each).reshape(-1) if each.is_complex() else each]
    ]


def _projection(values: Tensor) -> float:
    """The sum of the values with weights that are products of two factors, one by row and one by column."""
    exact = values.to(torch.promote_types(values.dtype, torch.float32))
    rows = len(exact) // COLUMNS
    by_column, by_row = _factors("columns", COLUMNS, exact.dtype), _factors("rows", rows + 1, torch.float64)
    sums = [exact[: rows * COLUMNS].view(rows, COLUMNS) @ by_column]
    rest = exact[rows * COLUMNS :]
    sums.append((rest @ by_column[: len(rest)]).reshape(1))
    return float(torch.cat(sums).double() @ by_row)


@functools.cache
def _factors(name: str, count: int, dtype: torch.dtype) -> Tensor:
    """Pseudo-random factors of size 1/2 to 3/2, of either sign."""
    generator = torch.Generator().manual_seed(mix("projection", name))
    sizes = torch.rand(count, generator=generator, dtype=torch.float64) + 0.5
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return (sizes * signs).to(dtype)
