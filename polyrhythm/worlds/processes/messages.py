"""Messages and replies of a process, made from what the wire has received."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyrhythm.core.errors import PeerLost
from polyrhythm.core.message import Message, Reply
from polyrhythm.wire.buffers import Buffer
from polyrhythm.wire.frame import DTYPES
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.requests import Pending

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {name: getattr(torch, name) for name in DTYPES}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class ReceivedMessage(Message):
    """A message with what is needed to reply to it."""

    origin: Incoming


class ProcessReply(Reply):
    def __init__(self, pending: Pending, staged: list[tuple[Tensor, Tensor]]) -> None:
        self._pending, self._staged = pending, staged

    @property
    def arrived(self) -> bool:
        return self._pending.done

    def wait(self) -> Message:
        message = message_of(self._pending.wait())
        for target, host in self._staged:
            target.copy_(host)
        return message


class FailedReply(Reply):
    """The reply to a request that could not be sent because the peer is lost."""

    def __init__(self, error: PeerLost) -> None:
        self._error = error

    arrived = True

    def wait(self) -> Message:
        raise self._error


def message_of(incoming: Incoming) -> ReceivedMessage:
    message = ReceivedMessage(
        incoming.sender, incoming.kind, incoming.sequence, incoming.fields,
        tuple(_tensor(buffer) for buffer in incoming.buffers),
    )  # fmt: skip
    message.origin = incoming
    return message


def _tensor(buffer: Buffer) -> Tensor:
    if not len(buffer.view):
        return torch.empty(0, dtype=_DTYPES[buffer.dtype])
    return torch.frombuffer(buffer.view, dtype=_DTYPES[buffer.dtype])
