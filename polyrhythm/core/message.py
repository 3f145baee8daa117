"""Message and Reply: received messages, and replies to requests."""

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
    """A received message: its sender, its kind, small typed fields and tensors."""

    sender: Peer
    kind: str
    sequence: int
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    @property
    def incarnation(self) -> int:
        """The sender's incarnation: how many predecessors of that rank have died."""
        return self.sequence >> INCARNATION_SHIFT


class Reply(ABC):
    """The reply to a request, once it arrives."""

    @property
    @abstractmethod
    def arrived(self) -> bool:
        """True if `wait` does not block."""

    @abstractmethod
    def wait(self) -> Message:
        """Blocks until the reply is here and `into` is filled. Raises `PeerLost` if it never will be."""
