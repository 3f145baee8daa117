"""ProcessMemory: memory that a process shares with other processes of its host."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from polyrhythm.core.errors import UsageError, WaitError
from polyrhythm.core.node import Lock, Memory
from polyrhythm.core.peer import Peer
from polyrhythm.wire.shared_region import SharedRegion

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.worlds.processes.node import ProcessNode


class ProcessMemory(Memory):
    """Memory in the arenas of this host."""

    def __init__(self, node: ProcessNode) -> None:
        self._node = node

    def empty(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return self._allocate(count, dtype, device)

    def temporary(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return self._allocate(count, dtype, device, temporary=True)

    def _allocate(
        self, count: int, dtype: torch.dtype, device: torch.device | str, temporary: bool = False
    ) -> Tensor:
        arenas, arena = self._node.arenas, self._node.arena
        if arenas is None or torch.device(device).type != "cpu" or not count:
            return torch.empty(count, dtype=dtype, device=device)
        nbytes = count * dtype.itemsize
        offset = arenas.allocate(arena, nbytes)
        memory = self._node.view[offset : offset + nbytes]
        if temporary:
            # The storage refers to this view, which so lives as long as any tensor that shares the storage.
            weakref.finalize(memory, arenas.discard, arena, offset).atexit = False
        return torch.frombuffer(memory, dtype=dtype)  # a storage of its own

    def shared(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        region, nbytes = self._region(), count * dtype.itemsize
        return (
            torch.frombuffer(region.memory(name, nbytes), dtype=dtype)
            if count
            else torch.empty(0, dtype=dtype)
        )

    def lock(self, name: str) -> Lock:
        def check_wait(holder: int, waited: float) -> None:
            if waited > self._node.transport.wait or self._node.transport.closed:
                who = "another" if holder < 0 else str(Peer("worker", holder))
                raise WaitError(
                    f"{self._node.me} waited {waited:.1f} s for {who} to release the lock {name!r}"
                )

        return self._region().lock(name, self._node.rank, check_wait)

    def _region(self) -> SharedRegion:
        if self._node.arenas is None or not self._node.one_host:
            raise UsageError(
                "the strategy needs memory that all workers share, but they are on several hosts, use TCP or "
                "have a limited address space; omit --here, --listen and ulimit -v, or use a strategy that "
                "sends messages, such as async"
            )
        return SharedRegion(self._node.arenas)
