"""NormExchange: the norm of an update over all servers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrhythm.core.node import Node


class NormExchange:
    """Adds up the norms of the parts of an update that the servers hold."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._squares: dict[int, dict[int, float]] = {}  # by version and server

    def total(self, version: int, own: float, on_membership: Callable[[], None]) -> float:
        """The norm of the update that follows this version, from the norm of this server's part.

        Waits for all servers. Calls `on_membership` if a worker joins or leaves meanwhile.
        """
        node = self._node
        squares = self._squares.setdefault(version, {})
        squares[node.rank] = own**2
        for server in node.members.servers:
            if server != node.me:
                node.request(server, "norm", version=version, square=squares[node.rank])
        while any(server.rank not in squares for server in node.members.servers):
            message = node.receive("norm")
            if message is None:
                on_membership()
            else:
                node.reply(message)
                self._squares.setdefault(message["version"], {})[message.sender.rank] = message["square"]
        del self._squares[version]
        return math.sqrt(sum(squares[rank] for rank in sorted(squares)))
