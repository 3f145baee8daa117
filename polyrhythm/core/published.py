"""Published: a worker publishes, and others fetch when they need it.

Theory of operation
-------------------

Workers without a server exchange by one pattern. A worker *publishes* tensors under a key for certain
*readers*. Each reader *fetches* them with a request that names the key. Nothing is sent that was not
requested, so no worker receives into memory that it has not set aside.

Keys are (cohort, round). Rounds are counted within a cohort, the set of workers that share an epoch. The
publisher and the reader count them alike, so that no message has to announce a publication.

A request and its publication may come in either order:

    request first       it is held until the publication is made
    publication first   it is kept, and the request gets its reply at once
    neither will come   the reply is empty: the key is of an earlier cohort or round, or nothing more is
                        published

A publication is kept until each of its readers has *acknowledged* it. A reply that was sent may be lost
with its connection. The reader then sends its request again and gets the same reply, so a publication
reaches each reader exactly once. There are two ways to acknowledge:

    - Every request carries `have`: the reader has all rounds before this one. That costs no message, and is
      enough where readers return every round or so.
    - `Fetch.acknowledge` sends a message, where a reader may not return for long.

On one host a reply is written to the memory of its reader, where it cannot get lost: that acknowledges it
too. The published tensors belong to the publication until then. Memory of publications that are done is
reused (`spare_buffers`).

When a worker dies (`on_message(None)`):

    - Its held requests are dropped. It may have been replaced by now, and its memory may be another's.
    - Publications that only it has not acknowledged are done. One that it never requested was certainly not
      received, and is returned to its publisher (`returned`).
    - Replies that are being written to its memory are waited for. Once a node has processed a death, nothing
      of it writes there: a replacement relies on that. So replies are sent inside `node.lock()`, and
      large ones by tasks that are known before the lock is released.

When a cohort begins (`begin`), requests for the rounds before it get an empty reply. Requests for later
cohorts stay held: another worker may have begun already.

A run that resumes from a saved state begins at a later round, and all workers must have loaded states of the
same step. So requests carry the `origin`, from where their sender continues. A worker compares it with its
own once it has taken a step; before that it may still load its state.

Owners subscribe to `kinds` and pass each message, and each membership change, to `on_message`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError
from polyrhythm.core.held_requests import HeldRequests

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Task
    from polyrhythm.core.message import Field, Message, Reply
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer

LARGE = 1 << 20  # bytes: more than a connection takes at once, so a slow reader would hold up the others


class Key(NamedTuple):
    """Names a publication. A later one has a greater key."""

    cohort: int
    round: int


@dataclass(eq=False)
class Publication:
    """Tensors that others fetch, and a few fields that travel with them."""

    tensors: Sequence[Tensor]
    fields: dict[str, Field]


@dataclass(eq=False)
class Delivery:
    """A publication for one reader, until that has acknowledged it."""

    publication: Publication
    reader: Peer
    incarnation: int  # of the reader
    replied: bool = False  # a reply was sent; it is not known whether it arrived
    writing: int = 0  # number of replies being written
    tasks: list[Task] = field(default_factory=list)  # the tasks that write them

    def join_writes(self) -> None:
        """Blocks until no reply is being written."""
        for task in list(self.tasks):
            with contextlib.suppress(PolyrhythmError):  # the connection broke, or the reader died
                task.join()


class Fetch:
    """A publication of another worker that was requested. Its tensors are written to `into`, if given."""

    def __init__(
        self, node: Node, publisher: Peer, key: Key, into: Sequence[Tensor], reply: Reply, acknowledgment: str
    ) -> None:
        self.publisher, self.key, self.into = publisher, key, into
        self._node, self._reply, self._acknowledgment = node, reply, acknowledgment

    @property
    def arrived(self) -> bool:
        """True if `wait` does not block."""
        return self._reply.arrived

    def wait(self) -> Message | None:
        """Blocks until it is here. None if it will never be: its publisher died, or the reply is empty."""
        try:
            message = self._reply.wait()
        except PeerLost:
            return None
        return None if "nothing" in message.fields else message

    def acknowledge(self) -> None:
        """Tells the publisher that it need not keep the publication any longer."""
        with contextlib.suppress(PeerLost):
            self._node.send(
                self.publisher, self._acknowledgment, cohort=self.key.cohort, round=self.key.round
            )


class Published:
    """A worker's publications, and the requests of others for those that it has not made yet.

    `kind` is that of the requests. `returned` is called, inside `node.lock()`, with each publication of the
    present cohort that a reader cannot have received because it died.
    """

    def __init__(
        self, node: Node, kind: str, returned: Callable[[Publication], None] = lambda publication: None
    ) -> None:
        self.node, self.kind, self._returned = node, kind, returned
        self.first = Key(0, 0)  # nothing before it is published
        self.origin: str | None = "the start"  # from where this worker continues; None: it follows the others
        self.buffers: list[Sequence[Tensor]] = []  # memory that was published from
        self.on_this_host: set[Peer] = set()  # readers that were seen to be
        self._begun = self._closed = False
        self._deliveries: dict[tuple[Peer, Key], Delivery] = {}
        self._latest: dict[Peer, Key] = {}  # that was published for each reader
        self._held = HeldRequests(node, key_of)
        self._released: list[Delivery] = []  # done, but a repeated reply is still being written

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of messages that `on_message` takes."""
        return self.kind, f"{self.kind} got"

    # --- the publisher: called by the script's thread -----------------------------------------------

    def publish(self, key: Key, readers: Iterable[Peer], tensors: Sequence[Tensor], **fields: Field) -> None:
        """Lets these readers fetch the tensors, which must not change until all have acknowledged them."""
        with self.node.lock():
            self.start()
            publication, lost = Publication(tensors, fields), self.node.members.lost
            for reader in readers:
                self._latest[reader] = key
                self._deliveries[reader, key] = Delivery(publication, reader, lost.get(reader, -1) + 1)
            self._reply_to_held()

    def publish_for(self, request: Message, tensors: Sequence[Tensor]) -> None:
        """Publishes tensors for the sender of a held request only."""
        reader, key = request.sender, key_of(request)
        with self.node.lock():
            self._latest[reader] = key
            self._deliveries[reader, key] = Delivery(Publication(tensors, {}), reader, request.incarnation)
            self._reply_to_held()

    def waiting(self) -> list[Message]:
        """Held requests of workers that continue from where this one does."""
        with self.node.lock():
            return [request for request in self._held if self._same_origin(request)]

    def spare_buffers(self, like: Sequence[Tensor]) -> Sequence[Tensor]:
        """Memory to publish from: that of a publication that is done, or new."""
        import torch

        used = self._used()
        for buffers in self.buffers:
            if id(buffers) not in used:
                return buffers
        self.buffers.append([torch.empty_like(part) for part in like])
        return self.buffers[-1]

    def trim(self) -> None:
        """Frees the memory of publications that are done."""
        used = self._used()
        self.buffers = [buffers for buffers in self.buffers if id(buffers) in used]

    def join_writes(self) -> None:
        """Blocks until no reply is being written: what was requested on this host is then acknowledged."""
        with self.node.lock():
            deliveries = list(self._deliveries.values())
        for delivery in deliveries:
            delivery.join_writes()

    def _used(self) -> set[int]:
        """The ids of the buffers that are still read."""
        with self.node.lock():
            read = (*self._deliveries.values(), *self._released)
            return {id(delivery.publication.tensors) for delivery in read}

    def start(self) -> None:
        """Called before the first step, or when a state was loaded: from here on the origin is certain."""
        with self.node.lock():
            if not self._begun:
                self._begun = True
                for request in self._held:
                    self._check(request)

    def begin(self, first: Key, origin: str | None = None) -> None:
        """Begins a cohort, or resumes at a later round: no earlier key is published from here on."""
        with self.node.lock():
            self.first, self.origin = first, origin
            self._reply_to_held()
            if origin is not None:
                self.start()

    def forget(self, before: Key) -> None:
        """Drops publications with an earlier key."""
        with self.node.lock():
            for reader, key in list(self._deliveries):
                if key < before:
                    self._release(reader, key)

    def drop(self, reader: Peer) -> None:
        """Drops all publications for a worker that will not fetch them."""
        with self.node.lock():
            for other, key in list(self._deliveries):
                if other == reader:
                    self._release(reader, key)

    def close(self) -> None:
        """Nothing more will be published."""
        with self.node.lock():
            self._closed = True
            self._reply_to_held()

    # --- the reader ---------------------------------------------------------------------------------

    def fetch(
        self,
        publisher: Peer,
        key: Key,
        *tensors: Tensor,
        into: Sequence[Tensor] = (),
        have: int | None = None,
    ) -> Fetch:
        """Requests a publication; `tensors` travel with the request.

        All earlier rounds of that publisher have arrived, or those before `have`.
        """
        reply = self.node.request(
            publisher, self.kind, *tensors, into=into, cohort=key.cohort, round=key.round,
            have=key.round if have is None else have, origin=self.origin if self._begun else None,
        )  # fmt: skip
        return Fetch(self.node, publisher, key, into, reply, self.kinds[1])

    # --- the publisher: called for each message -----------------------------------------------------

    def on_message(self, message: Message | None) -> None:
        """Takes a request or an acknowledgment; None if a worker joined or left."""
        undelivered: list[Delivery] = []
        with self.node.lock():
            if message is None:
                undelivered = self._forget_the_dead()
            elif message.kind == self.kind:
                self._on_request(message)
            else:
                self._release(message.sender, key_of(message))
        for delivery in undelivered:
            delivery.join_writes()

    def _on_request(self, message: Message) -> None:
        key = key_of(message)
        if self._begun:
            self._check(message)
        for reader, earlier in list(self._deliveries):
            if reader == message.sender and earlier < Key(key.cohort, message["have"]):
                self._release(reader, earlier)
        self._held.add(message)
        self._reply_to_held()

    def _forget_the_dead(self) -> list[Delivery]:
        """Returns the deliveries whose readers died: replies may still be written to their memory."""
        lost = self.node.members.lost
        self._reply_to_held()
        undelivered = [each for each in self._released if each.incarnation <= lost.get(each.reader, -1)]
        for (reader, key), delivery in list(self._deliveries.items()):
            if delivery.incarnation <= lost.get(reader, -1):
                del self._deliveries[reader, key]
                undelivered.append(delivery)
                if not delivery.replied and key.cohort == self.first.cohort:
                    self._returned(delivery.publication)
        return undelivered

    def _reply_to_held(self) -> None:
        """Replies to the held requests that need not wait any longer, and drops those of the dead."""
        for request in self._held.take(self._can_reply):
            self._reply_to(request)

    def _can_reply(self, request: Message) -> bool:
        """True if the requested publication exists, or never will."""
        reader, key = request.sender, key_of(request)
        return (reader, key) in self._deliveries or not self._may_come(reader, key)

    def _reply_to(self, request: Message) -> None:
        """Replies to a request that `_can_reply`."""
        reader, key = request.sender, key_of(request)
        delivery = self._deliveries.get((reader, key))
        if delivery is None:
            self.node.reply(request, nothing=True)
            return
        delivery.replied = True
        if sum(tensor.nbytes for tensor in delivery.publication.tensors) > LARGE:
            delivery.writing += 1
            delivery.tasks.append(self.node.spawn(self._write, request, delivery))
        elif self._reply(request, delivery.publication):
            self._release(reader, key)

    def _write(self, request: Message, delivery: Delivery) -> None:
        arrived = False
        try:
            arrived = self._reply(request, delivery.publication)
        finally:
            with self.node.lock():
                delivery.writing -= 1
                if not delivery.writing:
                    delivery.tasks.clear()  # they refer to the delivery, and so to its tensors
                    self._released = [each for each in self._released if each is not delivery]
                if arrived and self._deliveries.get((request.sender, key_of(request))) is delivery:
                    self._release(request.sender, key_of(request))

    def _reply(self, request: Message, publication: Publication) -> bool:
        arrived = self.node.reply(request, *publication.tensors, **publication.fields)
        if arrived:
            self.on_this_host.add(request.sender)
        return arrived

    def _may_come(self, reader: Peer, key: Key) -> bool:
        """True if this worker may still publish something under this key for this reader."""
        latest = self._latest.get(reader)
        return not self._closed and key >= self.first and (latest is None or key > latest)

    def _release(self, reader: Peer, key: Key) -> None:
        """The reader has it, or does not need it."""
        delivery = self._deliveries.pop((reader, key), None)
        if delivery is not None and delivery.writing:
            self._released.append(delivery)

    def _same_origin(self, request: Message) -> bool:
        theirs = request["origin"]
        return theirs is None or self.origin is None or theirs == self.origin

    def _check(self, request: Message) -> None:
        if key_of(request) >= self.first and not self._same_origin(request):
            raise UsageError(
                f"{request.sender} continues from {request['origin']} and another worker from {self.origin}: "
                "either each worker loads the state that it saved itself, all of the same step, or none does"
            )


def key_of(message: Message) -> Key:
    """The key that a request or an acknowledgment names."""
    return Key(message["cohort"], message["round"])
