"""ReplyBarrier: delays the replies to a request until all nodes have sent it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from polyrhythm.core.peer import Peer

R = TypeVar("R")


class ReplyBarrier(Generic[R]):
    """Nodes that wait for a reply, which all get together."""

    def __init__(self) -> None:
        self._waiting: dict[Peer, Callable[[R], None]] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._waiting))

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._waiting

    def add(self, peer: Peer, respond: Callable[[R], None]) -> None:
        """Adds a node that waits for its reply."""
        self._waiting[peer] = respond

    def forget(self, peer: Peer) -> None:
        """A node has died: it gets no reply."""
        self._waiting.pop(peer, None)

    def release(self, peer: Peer, reply: R) -> None:
        """Replies to one node; the others still wait."""
        self._waiting.pop(peer)(reply)

    def release_all(self, reply: Callable[[Peer], R]) -> None:
        """Replies to all waiting nodes."""
        waiting, self._waiting = self._waiting, {}
        for peer, respond in waiting.items():
            respond(reply(peer))
