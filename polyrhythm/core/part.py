"""Part: a node among some of the workers, whatever its world. What is not about them is its node's own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from polyrhythm.core.message import Field, Message, Reply
from polyrhythm.core.node import Lock, Node, Task
from polyrhythm.core.peer import Peer

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def first_number(workers: Sequence[Peer]) -> int:
    """Where the numbers of the collectives of a part begin, so that no other part's messages have them."""
    return zlib.crc32(repr([peer.rank for peer in workers]).encode()) << 40


class Part(Node):
    """What `Node.among` gives. Worlds add the collectives."""

    def __init__(self, whole: Node, workers: Sequence[Peer], rank: int | None = None) -> None:
        self.whole = whole
        self.me, self.seed, self.sites = whole.me, whole.seed, whole.sites
        self._workers = tuple(workers)
        self._rank = self._workers.index(whole.me) if rank is None else rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def workers(self) -> Sequence[Peer]:
        return self._workers

    @property
    def lost(self) -> Collection[Peer]:
        return self.whole.lost

    @property
    def servers(self) -> Sequence[Peer]:
        return self.whole.servers

    @property
    def over(self) -> bool:
        return self.whole.over

    def among(self, workers: Sequence[Peer]) -> Node:
        return self.whole.among(workers)

    def alive(self, message: Message) -> bool:
        return self.whole.alive(message)

    def now(self) -> float:
        return self.whole.now()

    def send(self, to: Peer, kind: str, *tensors: Tensor, **fields: Field) -> None:
        self.whole.send(to, kind, *tensors, **fields)

    def ask(
        self, to: Peer, kind: str, *tensors: Tensor, into: Sequence[Tensor] = (), **fields: Field
    ) -> Reply:
        return self.whole.ask(to, kind, *tensors, into=into, **fields)

    def receive(self, *kinds: str) -> Message | None:
        return self.whole.receive(*kinds)

    def expect(self, sender: Peer, kind: str, into: Sequence[Tensor]) -> Callable[[], None]:
        return self.whole.expect(sender, kind, into)

    def listen(self, hear: Callable[[Message | None], None], *kinds: str) -> None:
        self.whole.listen(hear, *kinds)

    def exclusive(self) -> AbstractContextManager[None]:
        return self.whole.exclusive()

    def answer(self, message: Message, *tensors: Tensor, **fields: Field) -> None:
        self.whole.answer(message, *tensors, **fields)

    def spawn(self, function: Callable[..., None], *args: Any) -> Task:
        return self.whole.spawn(function, *args)

    def empty(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return self.whole.empty(count, dtype, device)

    def shared(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        return self.whole.shared(name, count, dtype)

    def lock(self, name: str) -> Lock:
        return self.whole.lock(name)

    def log(self, event: str, /, **fields: Any) -> None:
        self.whole.log(event, **fields)

    def totals(self, *, steps: int, samples: int, compute_s: float, wait_s: float) -> None:
        self.whole.totals(steps=steps, samples=samples, compute_s=compute_s, wait_s=wait_s)
