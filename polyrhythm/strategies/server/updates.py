"""An update on its way: as a worker pushes it, and as a server collects it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from polyrhythm.core.message import Message
from polyrhythm.core.peer import Peer

if TYPE_CHECKING:
    from polyrhythm.core.message import Field
    from polyrhythm.core.worker import State
    from polyrhythm.model.vectors import Vectors

T = TypeVar("T")
Settings = Sequence[dict[str, Any]]  # the hyper-parameters of each parameter group
Name = tuple[int, int, int]  # worker, incarnation, step


@dataclass(frozen=True)
class PushRequest:
    """An update that a worker pushes, and the reply that it expects."""

    update: Vectors
    settings: Settings = ()
    absent: Sequence[int] = ()  # the parameters without a gradient
    fetch: bool = True  # the reply has the resulting parameters,
    into: Vectors | None = None  # which are written here; None: to the worker's parameters
    versions: Mapping[int, int] | None = None  # that it was computed on, by server; None: those it has now
    decoded: Vectors = ()  # a place for the update as the servers decode it
    extras: Mapping[str, Field] = field(default_factory=dict)  # more fields of the message


@dataclass
class PushedUpdate:
    """One worker's update, as a server collects it."""

    message: Message  # to reply to
    staleness: int
    nbytes: int
    absent: Sequence[int]
    update: Vectors = ()  # lent by the worker until the reply

    @classmethod
    def of(cls, message: Message, version: int) -> PushedUpdate:
        """The update in a message that arrives at this version, not decoded yet."""
        nbytes = sum(part.nbytes for part in message.tensors)
        return cls(message, version - message["version"], nbytes, message["absent"])

    @property
    def worker(self) -> int:
        return self.message.sender.rank

    @property
    def name(self) -> Name:
        """Identifies it on every server; sequence numbers differ between them."""
        return self.worker, self.message.incarnation, self.message["step"]

    @property
    def version(self) -> int:
        """The version of the parameters that it was computed on."""
        return int(self.message["version"])

    @property
    def settings(self) -> Settings:
        settings: Settings = self.message["groups"]
        return settings

    @property
    def norm(self) -> float:
        """Its norm over all servers, where the worker tells it."""
        return float(self.message["norm"])

    def state_dict(self) -> State:
        """All but the update itself."""
        fields = {name: self.message[name] for name in ("step", "version", "groups", "norm", "fetch")}
        return {
            "worker": self.worker,
            "staleness": self.staleness,
            "nbytes": self.nbytes,
            "absent": list(self.absent),
            "fields": fields,
        }

    @classmethod
    def restored(cls, state: State) -> PushedUpdate:
        """What `state_dict` returned. It counts as older than all that arrives from now on."""
        message = Message(Peer("worker", state["worker"]), "push", 0, state["fields"])
        return cls(message, state["staleness"], state["nbytes"], state["absent"])


def norm(vectors: Vectors) -> float:
    """The Euclidean norm of all vectors together."""
    import torch

    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in vectors))


def turned(items: list[T], rank: int) -> list[T]:
    """The items from another one on at every node: else all would send to the first at the same time."""
    first = rank % len(items)
    return items[first:] + items[:first]
