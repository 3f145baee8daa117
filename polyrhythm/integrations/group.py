"""Collectives on a torch.distributed process group: means, and gathers of codes of any length."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


RELEASE = 1.0  # seconds for a thread of Gloo to release the tensors of a collective that is complete


class _Collective:
    """A collective under way on some tensors."""

    def __init__(self, begin: Callable[[], dist.Work | None], *tensors: Tensor) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        self._references = self._count()
        self._work = begin()

    def wait(self) -> None:
        """Waits until the collective is complete and no thread of Gloo refers to its tensors.

        A thread that frees a tensor of Python while the interpreter shuts down aborts the process
        (pytorch/pytorch#190489), and on a busy machine it may get to that long after `Work.wait` returns.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        deadline = time.monotonic() + RELEASE
        while self._count() > self._references and time.monotonic() < deadline:
            time.sleep(0)

    def _count(self) -> int:
        """The references to all tensors, without those of Python."""
        return sum(tensor._use_count() for tensor in self._tensors)  # type: ignore[attr-defined]


class PendingMean:
    """A pending mean of tensors of one dtype over all ranks. The tensors are not changed.

    Each rank divides before the sum, as DDP does, because sums of 16-bit floats overflow early.
    """

    def __init__(self, group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._flat = torch.cat(list(tensors)).div_(group.size()) if tensors else None
        if self._flat is not None:
            flat = self._flat
            self._collective = _Collective(lambda: dist.all_reduce(flat, group=group, async_op=True), flat)

    def wait(self) -> list[Tensor]:
        if self._flat is None:
            return []
        self._collective.wait()
        return list(torch.split(self._flat, self._sizes))

    def wait_into(self, tensors: Sequence[Tensor]) -> None:
        for mean, tensor in zip(self.wait(), tensors, strict=True):
            tensor.copy_(mean)


class PendingGather:
    """A pending gather of the codes of all ranks, in two rounds: first their lengths, then the codes.

    A rank whose gradient is not finite has no codes to send. It announces that in the first round, and then
    there is no second.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, count: int, codes: Sequence[Tensor] | None
    ) -> None:
        self._group = group
        self._device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        self._codes = codes
        sizes = [0, *(code.numel() for code in codes)] if codes is not None else [1, *[0] * count]
        mine = torch.tensor(sizes, device=self._device)
        self._every = self._gather(mine)
        self._sizes: list[list[int]] = []

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Starts to gather a tensor of each rank, all of the same size."""
        every = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._collective = _Collective(
            lambda: dist.all_gather(every, mine, group=self._group, async_op=True), mine, *every
        )
        return every

    def exchange(self) -> None:
        """Starts the second round."""
        self._collective.wait()
        told = [sizes.tolist() for sizes in self._every]
        if self._codes is None or any(wrong for wrong, *_ in told):
            return
        self._sizes = [sizes for _, *sizes in told]
        # All ranks must send the same number of bytes, so shorter codes are padded.
        mine = torch.zeros(max(map(sum, self._sizes)), dtype=torch.uint8, device=self._device)
        if self._codes:
            code = torch.cat([code.to(self._device) for code in self._codes])
            mine[: code.numel()] = code
        self._every = self._gather(mine)

    def wait(self) -> list[list[Tensor]] | None:
        """The codes of each rank, or None if one had none."""
        if not self._sizes:
            return None
        self._collective.wait()
        given = []
        for message, sizes in zip(self._every, self._sizes, strict=True):
            parts = torch.split(message.cpu()[: sum(sizes)], sizes) if sizes else ()
            given.append([part.clone() for part in parts])  # a copy is aligned to its element size
        return given


class TorchGroup:
    """The all-reduces that a `JointReducer` needs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, *tensors: Tensor, op: str = "sum") -> None:
        begin = functools.partial(dist.all_reduce, op=OPS[op], group=self._group, async_op=True)
        pending = [_Collective(functools.partial(begin, tensor), tensor) for tensor in tensors]
        for tensor, collective in zip(tensors, pending, strict=True):
            collective.wait()
            if op == "mean":
                tensor.div_(self._group.size())

    def all(self, mine: bool, device: torch.device) -> bool:
        """True if `mine` is true on all ranks."""
        flag = torch.tensor(float(mine), device=device)
        self.all_reduce(flag, op="min")
        return bool(flag > 0)
