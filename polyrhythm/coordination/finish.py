"""Finish: the end of a run whose workers hold the parameters. Logic without I/O.

A worker that has taken its last step stays until all have, because others may still request its parameters.
Then one worker sends the result, and the others reply to its requests until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from polyrhythm.coordination.reply_barrier import ReplyBarrier
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import Farewell


class Finish:
    """The workers that have taken their last step, and their pending replies."""

    def __init__(self) -> None:
        self.done: set[Peer] = set()  # have taken their last step
        self._waiting: ReplyBarrier[None] = ReplyBarrier()  # wait until all have
        self._leaving: ReplyBarrier[Farewell] = ReplyBarrier()  # wait until the result has arrived
        self._result_sender: Peer | None = None  # sends the result

    def wait(self, peer: Peer, respond: Callable[[None], None]) -> None:
        """A worker has taken its last step and waits for the others."""
        self.done.add(peer)
        self._waiting.add(peer, respond)

    def leave(self, peer: Peer, respond: Callable[[Farewell], None]) -> None:
        """A worker wants to leave."""
        self.done.add(peer)
        self._leaving.add(peer, respond)

    def lose(self, peer: Peer) -> bool:
        """A worker has died. True if it had taken its last step."""
        done = peer in self.done
        self.done.discard(peer)
        self._waiting.forget(peer)
        self._leaving.forget(peer)
        if peer == self._result_sender:
            self._result_sender = None
        return done

    def advance(self, workers: Sequence[Peer], leaders: Sequence[Peer]) -> None:
        """Replies to the waiting workers, if all workers of the run are done.

        Of those that hold one model together, the leader leaves for all.
        """
        if not workers or {*workers} - self.done:
            return
        self._waiting.release_all(lambda peer: None)
        if self._result_sender is None and leaders and all(each in self._leaving for each in leaders):
            self._result_sender = leaders[0]
            self._leaving.release(leaders[0], Farewell(last=True))

    def end(self) -> Iterator[Peer]:
        """The result has arrived: lets the others leave, one after the other."""
        for peer in self._leaving:
            self._leaving.release(peer, Farewell(last=False))
            yield peer
