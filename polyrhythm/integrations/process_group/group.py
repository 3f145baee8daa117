"""PolyrhythmGroup: a process group of torch.distributed on polyrhythm's own groups and messages.

Reductions are all-reduces of a `Group`; every other collective is an exchange of tensors in it (see
`core.group`). On one host both go through shared memory, between hosts through encrypted TCP. Sums are taken
in rank order on one host, so all members have the same bits.

torch calls methods of this class by the names of its C++ interface; several were renamed in 2.13, and both
names are defined.
"""

# torch declares each method in several forms, and calls one of them.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.collectives.arithmetic import reduce
from polyrhythm.core.errors import UsageError
from polyrhythm.core.group import Group
from polyrhythm.core.peer import Peer
from polyrhythm.integrations.process_group.flat import check, fill, flat, reducible
from polyrhythm.integrations.process_group.lane import Lane
from polyrhythm.integrations.process_group.point_to_point import PointToPoint, channel_of
from polyrhythm.integrations.process_group.works import AllWork, GroupWork

BACKEND = "polyrhythm"
Rows = Sequence[Sequence[Tensor]]  # tensors by the rank of a member

_OPERATIONS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "product"),
)


class PolyrhythmGroup(dist.ProcessGroup):
    """Some workers of a run, `ranks` in the order of their ranks in this group."""

    def __init__(self, group: Group, ranks: Sequence[int], name: str, messages: PointToPoint) -> None:
        self._peers = [Peer("worker", rank) for rank in ranks]
        super().__init__(self._peers.index(messages.me), len(ranks))  # type: ignore[call-arg]
        self._group, self._messages = group, messages
        self._places = [group.members.index(peer) for peer in self._peers]  # members are sorted
        self._mine, self._me = self._peers.index(messages.me), messages.me
        self._name, self._description, self._channel = name, "", channel_of(name)
        self._lane = Lane(f"process group {name}")
        self._coalesced: list[GroupWork] | None = None

    # --- reductions ---------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        op = _operation(opts)
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        values = [reducible(tensor, op) for tensor in tensors]

        def execute() -> None:
            self._group.all_reduce(*values, op=op)
            for tensor, value in zip(tensors, values, strict=True):
                fill(tensor, value)

        return self._begin("all_reduce", execute, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        op, root = _operation(opts), opts.rootRank
        values = [reducible(tensor, op) for tensor in tensors]

        def use(given: Rows) -> None:
            if self._mine == root:
                for index, tensor in enumerate(tensors):
                    self._reduce_into(tensor, [row[index] for row in given], op, "reduce")

        outgoing = [values if rank in (root, self._mine) else [] for rank in range(len(self._peers))]
        return self._exchange(f"reduce of {op}", outgoing, use, tensors, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> GroupWork:
        op = _operation(opts)
        pieces = [[reducible(each, op) for each in row] for row in inputs]
        outgoing = [[row[rank] for row in pieces] for rank in range(len(self._peers))]

        def use(given: Rows) -> None:
            for index, output in enumerate(outputs):
                self._reduce_into(output, [row[index] for row in given], op, "reduce_scatter")

        return self._exchange(f"reduce-scatter of {op}", outgoing, use, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        return self.reduce_scatter(outputs, [self._equal_parts(each) for each in inputs], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_into(self, output: Tensor, inputs: Sequence[Tensor], op: str, what: str) -> None:
        target = reducible(output, op)
        for peer, each in zip(self._peers, inputs, strict=True):
            check(each, target, what, peer, self._me)
        reduce(inputs, op, [target])
        fill(output, target)

    # --- the same tensors in other places -----------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        root = 0 if opts is None else opts.rootRank
        values = [flat(tensor) for tensor in tensors] if self._mine == root else []

        def use(given: Rows) -> None:
            if self._mine != root:
                self._fill(tensors, given[root], "broadcast", root)

        return self._exchange("broadcast", [values] * len(self._peers), use, tensors, opts)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        values = [flat(tensor) for tensor in inputs]

        def use(given: Rows) -> None:
            for rank, row in enumerate(given):
                self._fill([output[rank] for output in outputs], row, "all_gather", rank)

        results = [tensor for output in outputs for tensor in output]
        return self._exchange("all-gather", [values] * len(self._peers), use, results, opts)

    allgather_coalesced = allgather

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        values = [flat(tensor) for tensor in inputs]

        def use(given: Rows) -> None:
            for index, output in enumerate(outputs):
                whole = flat(output)
                for rank, part in enumerate(whole.chunk(len(self._peers))):
                    self._fill([part], [given[rank][index]], "all_gather", rank)
                fill(output, whole)

        for output, each in zip(outputs, inputs, strict=True):
            if output.numel() != len(self._peers) * each.numel():
                raise UsageError(
                    f"all_gather of {each.numel()} elements from {len(self._peers)} workers into "
                    f"{output.numel()}: the output must have {len(self._peers) * each.numel()}"
                )
        return self._exchange("all-gather", [values] * len(self._peers), use, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        root = 0 if opts is None else opts.rootRank
        values = [flat(tensor) for tensor in inputs]

        def use(given: Rows) -> None:
            for rank, row in enumerate(given if self._mine == root else ()):
                self._fill([output[rank] for output in outputs], row, "gather", rank)

        results = [tensor for output in outputs for tensor in output]
        outgoing = [values if rank == root else [] for rank in range(len(self._peers))]
        return self._exchange("gather", outgoing, use, results, opts)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> GroupWork:
        root = 0 if opts is None else opts.rootRank
        pieces = [[flat(each) for each in row] for row in inputs] if self._mine == root else []
        outgoing = [[row[rank] for row in pieces] for rank in range(len(self._peers))]

        def use(given: Rows) -> None:
            self._fill(outputs, given[root], "scatter", root)

        return self._exchange("scatter", outgoing, use, outputs, opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> GroupWork:
        outgoing = [[flat(tensor)] for tensor in inputs]

        def use(given: Rows) -> None:
            for rank, row in enumerate(given):
                self._fill([outputs[rank]], row, "all_to_all", rank)

        return self._exchange("all-to-all", outgoing, use, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        return self.alltoall(
            self._parts(output, output_split_sizes), self._parts(input, input_split_sizes), opts
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> GroupWork:
        return self._exchange("barrier", [[] for _ in self._peers], lambda given: None, [], opts)

    # --- one to one ---------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> GroupWork:
        return self._noted(self._messages.send(self._channel, self._peers[dst], _only(tensors), tag))

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> GroupWork:
        source = self._peers[src]
        return self._noted(self._messages.receive(self._channel, source, self._peers, _only(tensors), tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> GroupWork:
        return self._noted(self._messages.receive(self._channel, None, self._peers, _only(tensors), tag))

    # --- names, ends, coalescing --------------------------------------------------------------------

    def size(self) -> int:
        return len(self._peers)

    def rank(self) -> int:
        return self._mine

    def name(self) -> str:
        return BACKEND

    getSize, getRank, getBackendName, _get_backend_name = size, rank, name, name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        works, self._coalesced = self._coalesced or [], None
        return AllWork(works)

    def shutdown(self) -> None:
        self._lane.close()

    def abort(self) -> None:
        self._lane.abort()
        self._lane.close()

    # --- inside -------------------------------------------------------------------------------------

    def _begin(
        self, what: str, execute: Callable[[], None], results: Sequence[Tensor], opts: Any
    ) -> GroupWork:
        """Begins a collective; if the caller waits for it anyway, it is executed here."""
        waits = not getattr(opts, "asyncOp", True)
        limited = waits and opts.timeout.total_seconds() > 0  # then it cannot be executed here
        work = (self._lane.run if waits and not limited else self._lane.begin)(what, execute, results)
        if limited:
            work.wait(opts.timeout)
        return self._noted(work)

    def _noted(self, work: GroupWork) -> GroupWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _exchange(
        self,
        what: str,
        outgoing: Rows,
        use: Callable[[Rows], None],
        results: Sequence[Tensor],
        opts: Any,
    ) -> GroupWork:
        """Begins an exchange; rows are by rank in this group, and members may have another order."""
        places = self._places
        rows: list[Sequence[Tensor]] = [()] * len(places)
        for place, row in zip(places, outgoing, strict=True):
            rows[place] = row

        def execute() -> None:
            self._group.exchange(what, rows, lambda given: use([given[place] for place in places]))

        return self._begin(what, execute, results, opts)

    def _fill(self, targets: Sequence[Tensor], values: Sequence[Tensor], what: str, sender: int) -> None:
        for target, each in zip(targets, values, strict=True):
            check(each, target, what, self._peers[sender], self._me)
            fill(target, each)

    def _equal_parts(self, tensor: Tensor) -> Sequence[Tensor]:
        if tensor.numel() % len(self._peers):
            raise UsageError(
                f"reduce_scatter of {tensor.numel()} elements to {len(self._peers)} workers: pad the tensor, "
                "or pass a list of parts"
            )
        found = tensor.detach().contiguous().view(-1)
        return (
            torch.split(found, found.numel() // len(self._peers))
            if len(found)
            else [found] * len(self._peers)
        )

    def _parts(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """The parts of a tensor along its first dimension, one for each member."""
        if sizes:
            return torch.split(tensor.detach(), list(sizes))
        if tensor.shape[0] % len(self._peers):
            raise UsageError(
                f"all_to_all of {tensor.shape[0]} rows between {len(self._peers)} workers: pass split sizes"
            )
        return tensor.detach().chunk(len(self._peers)) if tensor.numel() else [tensor] * len(self._peers)


def _operation(opts: Any) -> str:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known, name in _OPERATIONS:
        if op == known:
            return name
    unknown = str(getattr(op, "op", op)).rpartition(".")[2]
    raise UsageError(f"a process group cannot reduce by {unknown}; use SUM, AVG, MIN, MAX or PRODUCT")


def _only(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise UsageError(f"send and recv take one tensor, not {len(tensors)}")
    return tensors[0]
