"""Message: what a node receives, and the reply that it waits for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyrhythm.core.peer import INCARNATION_SHIFT, Peer

if TYPE_CHECKING:
    from torch import Tensor

Scalar = int | float | str | bool | None


Field = Scalar | list[Any] | dict[str, Any]


@dataclass
class Message:
    """What a node receives: who sent it, what kind it is, small typed fields and tensors."""

    sender: Peer
    kind: str
    sequence: int
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    @property
    def incarnation(self) -> int:
        """Which life of its sender sent it: 0, or how many it has lost."""
        return self.sequence >> INCARNATION_SHIFT


class Reply(ABC):
    """An answer that is on its way."""

    @abstractmethod
    def wait(self) -> Message:
        """Blocks until the answer is here and `into` is filled. Ends with `PeerLost` if it never will be."""
