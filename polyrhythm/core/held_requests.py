"""HeldRequests: requests that wait until they can be answered.

No method takes a lock. Where the script's thread and a subscribed handler share the requests, callers hold
`node.lock()`; they may reply inside or after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer


class HeldRequests:
    """Requests that were not answered yet, in order of arrival.

    A sender has one request of each `identity`. A later one replaces it: it is repeated, or comes from the
    sender's replacement.
    """

    def __init__(
        self, node: Node, identity: Callable[[Message], Hashable] = lambda request: request.sequence
    ) -> None:
        self._node, self._identity = node, identity
        self._requests: dict[tuple[Peer, Hashable], Message] = {}

    def __iter__(self) -> Iterator[Message]:
        return iter(tuple(self._requests.values()))

    def add(self, request: Message) -> None:
        """Holds a request."""
        place = request.sender, self._identity(request)
        held = self._requests.get(place)
        if held is None or held.sequence <= request.sequence:
            self._requests[place] = request

    def take(self, ready: Callable[[Message], bool]) -> Iterator[Message]:
        """Removes and yields the requests that are `ready`; the caller answers them. Forgets the dead.

        Each is tested after the caller has handled those before it, since an answer may change who is next.
        """
        self.forget_dead()
        for place, request in list(self._requests.items()):
            if ready(request):
                del self._requests[place]
                yield request

    def forget_dead(self) -> None:
        """Drops the requests of workers that are gone: their memory may belong to others."""
        alive = self._node.members.alive
        self._requests = {place: request for place, request in self._requests.items() if alive(request)}
