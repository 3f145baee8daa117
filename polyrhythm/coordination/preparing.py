"""Preparing: the nodes that have built their models and wait for the others. Logic without I/O."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.coordination.reply_barrier import ReplyBarrier
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import Prepared, PreparedReply

FIRST = Peer("worker", 0)


class Preparing:
    """Their pending replies, and what the scripts of workers have seeded. Worker 0 decides for all."""

    def __init__(self) -> None:
        self._waiting: ReplyBarrier[PreparedReply] = ReplyBarrier()
        self._seeds: dict[Peer, int | None] = {}
        self._settings: dict[Peer, list[dict[str, str]]] = {}

    def add(self, peer: Peer, request: Prepared, respond: Callable[[PreparedReply], None]) -> None:
        """A node has built its model. What a worker's replacement has does not count."""
        self._waiting.add(peer, respond)
        if peer.role == "worker":
            self._seeds.setdefault(peer, request.seed)
            self._settings.setdefault(peer, request.settings)

    def release(self) -> None:
        """Replies to all waiting nodes."""
        differ = len({*self._seeds.values()}) > 1
        reply = PreparedReply(self._seeds.get(FIRST), differ, self._different_settings())
        self._waiting.release_all(lambda peer: reply)

    def _different_settings(self) -> str:
        """The first setting of a worker that is not that of worker 0, in words; "" if there is none."""
        expected = self._settings.get(FIRST, [])
        for peer, settings in sorted(self._settings.items()):
            for group, (mine, first) in enumerate(zip(settings, expected, strict=False)):
                for name in mine:
                    if mine[name] != first.get(name, mine[name]):
                        return (
                            f"parameter group {group} has {name}={mine[name]} on {peer} and {first[name]} on "
                            f"{FIRST}"
                        )
        return ""
