"""ScopedNode: a node as one of several parts of a session sees it.

Each part of a model that has its own optimizer is trained by its own strategy worker (see `session.part`).
Their messages must not mix, so the kinds of messages, and the names of shared memory and locks, carry the
number of the part: "push" of part 1 is "push@1". Those of part 0 have no suffix.

Groups need no scope: all workers begin the collectives of all parts in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import Event
from polyrhythm.core.group import Group, Task
from polyrhythm.core.mesh import Axis
from polyrhythm.core.message import Field, Message, Reply
from polyrhythm.core.node import Lock, Memory, Node
from polyrhythm.core.peer import Peer

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ScopedNode(Node):
    """A node whose messages, shared memory and locks are those of one part."""

    def __init__(self, node: Node, part: int) -> None:
        self._node, self._suffix = node, f"@{part}" if part else ""
        self.me, self.seed, self.members, self.mesh = node.me, node.seed, node.members, node.mesh
        self.incarnation, self.cohort, self.stopping = node.incarnation, node.cohort, node.stopping
        self.memory = ScopedMemory(node.memory, self._suffix)

    @property
    def everyone(self) -> Group:
        return self._node.everyone

    def group(self, *axes: Axis) -> Group:
        return self._node.group(*axes)

    def now(self) -> float:
        return self._node.now()

    def send(self, to: Peer, kind: str, *tensors: Tensor, **fields: Field) -> None:
        self._node.send(to, kind + self._suffix, *tensors, **fields)

    def request(
        self, to: Peer, kind: str, *tensors: Tensor, into: Sequence[Tensor] = (), **fields: Field
    ) -> Reply:
        return self._node.request(to, kind + self._suffix, *tensors, into=into, **fields)

    def reply(self, message: Message, *tensors: Tensor, **fields: Field) -> bool:
        return self._node.reply(message, *tensors, **fields)

    def receive(self, *kinds: str) -> Message | None:
        return self._unscoped(self._node.receive(*self._scoped(kinds)))

    def subscribe(self, on_message: Callable[[Message | None], None], *kinds: str) -> None:
        self._node.subscribe(lambda message: on_message(self._unscoped(message)), *self._scoped(kinds))

    def serve(self, function: Callable[[], None]) -> Task:
        return self._node.serve(function)

    def lock(self) -> AbstractContextManager[None]:
        return self._node.lock()

    def expect(self, sender: Peer, kind: str, into: Sequence[Tensor]) -> Callable[[], None]:
        return self._node.expect(sender, kind + self._suffix, into)

    def spawn(self, function: Callable[..., None], *args: Any) -> Task:
        return self._node.spawn(function, *args)

    def whole_norm(self, norm: float) -> float:
        return self._node.whole_norm(norm)

    def log(self, event: Event) -> None:
        self._node.log(event)

    def totals(self, *, steps: int, samples: int, compute_s: float, wait_s: float) -> None:
        self._node.totals(steps=steps, samples=samples, compute_s=compute_s, wait_s=wait_s)

    def _scoped(self, kinds: Sequence[str]) -> list[str]:
        if not kinds:
            raise UsageError(
                "with several optimizers a strategy must name the kinds of messages that it receives: "
                "receive('push', 'pull'), not receive()"
            )
        return [kind + self._suffix for kind in kinds]

    def _unscoped(self, message: Message | None) -> Message | None:
        if message is not None:
            message.kind = message.kind.removesuffix(self._suffix)
        return message


class ScopedMemory(Memory):
    """Memory whose shared tensors and locks are those of one part."""

    def __init__(self, memory: Memory, suffix: str) -> None:
        self._memory, self._suffix = memory, suffix

    def empty(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return self._memory.empty(count, dtype, device)

    def temporary(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return self._memory.temporary(count, dtype, device)

    def shared(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        return self._memory.shared(name + self._suffix, count, dtype)

    def lock(self, name: str) -> Lock:
        return self._memory.lock(name + self._suffix)
