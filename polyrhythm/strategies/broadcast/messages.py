"""The messages of the reliable broadcast: what waits to be sent, and what can be read from a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from polyrhythm.core.errors import WireError
from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog, Known, LogSnapshot

if TYPE_CHECKING:
    from polyrhythm.core.message import Message


class Outgoing(NamedTuple):
    """A message that waits to be sent: pulses by origin and number, or another kind without either."""

    kind: str
    origin: str = ""
    number: int = 0


KNOWN = Outgoing("known")  # what this worker knows: the receiver sends what is missing
CONFIRM = Outgoing("confirm")  # what all workers on this side of an edge have
SNAPSHOT = Outgoing("snapshot")  # the whole log


def read_pulses(message: Message) -> tuple[str, int, int]:
    """The origin of a message of pulses, and its first and last number; they differ if it is merged."""
    origin, number = message.fields.get("origin"), message.fields.get("number")
    if not isinstance(origin, str) or not isinstance(number, int):
        raise WireError(f"{message.sender} sent pulses without an origin and a number")
    first = message.fields.get("first", number)
    if not isinstance(first, int) or not 0 < first <= number:
        raise WireError(f"{message.sender} sent pulses from {first!r} to {number}")
    return origin, first, number


def read_known(message: Message) -> Known:
    """The last message of each origin that the sender knows."""
    known = message.fields.get("known")
    if not isinstance(known, dict) or not all(isinstance(each, int) and each >= 0 for each in known.values()):
        raise WireError(f"{message.sender} sent {message.kind!r} that does not say which messages it knows")
    return known


def read_snapshot(message: Message, log: DeliveryLog, start: int = 0) -> LogSnapshot:
    """The snapshot in a message, which begins at a place among its tensors."""
    kept: Any = message.fields.get("kept")
    snapshot = LogSnapshot(message.tensors[start:], read_known(message), kept)
    try:
        log.check(snapshot)
    except WireError as error:
        raise WireError(f"{message.sender} sent {message.kind!r}: {error}") from None
    return snapshot
