"""Laws of Published: each reader gets each publication once, also if messages are lost and nodes die."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyrhythm.core.errors import PeerLost, UsageError
from polyrhythm.core.group import Task
from polyrhythm.core.message import Message, Reply
from polyrhythm.core.node import Members
from polyrhythm.core.peer import INCARNATION_SHIFT, Peer
from polyrhythm.core.published import LARGE, Fetch, Key, Publication, Published

A, B, C = (Peer("worker", rank) for rank in range(3))
R0, R1, R2 = (Key(0, round_) for round_ in range(3))


class HeldReply(Reply):
    """The reply to a request, and where its tensors go."""

    def __init__(self, into: Sequence[Tensor]) -> None:
        self.into, self.message, self.lost = into, None, False

    message: Message | None

    @property
    def arrived(self) -> bool:
        return self.lost or self.message is not None

    def wait(self) -> Message:
        if self.lost:
            raise PeerLost("gone")
        assert self.message is not None, "this would wait"
        return self.message


class Deferred(Task):
    """Spawned work that is done when it is joined."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.done = work, False

    def join(self) -> None:
        if not self.done:
            self.done = True
            self.work()


class Loopback:
    """A node whose messages wait until the test delivers them."""

    def __init__(self, me: Peer, nodes: dict[Peer, Loopback], incarnation: int = 0) -> None:
        self.me, self.members, self.incarnation, self._nodes = me, Members(), incarnation, nodes
        self.members.workers = [A, B, C]
        self.inbox: list[Message] = []
        self.replied: list[Message] = []
        self.one_host = False  # answers are written to the memory of the reader, and cannot get lost
        self.tasks: list[Deferred] = []
        self.returned: list[Publication] = []
        self._replies: dict[int, HeldReply] = {}
        self._sequence = incarnation << INCARNATION_SHIFT
        self._locked = 0
        self.published = Published(self, "fetch", self.returned.append)  # type: ignore[arg-type]
        nodes[me] = self

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        self._locked += 1
        yield
        self._locked -= 1

    def request(self, to: Peer, kind: str, *tensors: Tensor, into: Any = (), **fields: Any) -> HeldReply:
        self._sequence += 1
        reply = self._replies[self._sequence] = HeldReply(into)
        self._nodes[to].inbox.append(Message(self.me, kind, self._sequence, fields, tensors))
        return reply

    def send(self, to: Peer, kind: str, **fields: Any) -> None:
        self._sequence += 1
        self._nodes[to].inbox.append(Message(self.me, kind, self._sequence, fields))

    def reply(self, message: Message, *tensors: Tensor, **fields: Any) -> bool:
        self.replied.append(message)
        reader = self._nodes[message.sender]
        reply = reader._replies.get(message.sequence)
        if reply is None:  # the reader was replaced
            return False
        for place, tensor in zip(reply.into, tensors, strict=False):
            place.copy_(tensor)
        given = tuple(tensor.clone() for tensor in tensors)
        reply.message = Message(self.me, message.kind, 0, fields, given)
        return self.one_host

    def spawn(self, function: Callable[..., None], *args: Any) -> Deferred:
        self.tasks.append(Deferred(lambda: function(*args)))
        return self.tasks[-1]

    # --- what the tests do --------------------------------------------------------------------------

    def deliver(self) -> None:
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            self.published.on_message(message)
        assert not self._locked

    def hear_of_a_death(self, peer: Peer, incarnation: int = 0) -> None:
        self.members.leave(peer, incarnation, finished=False)
        self.published.on_message(None)


@pytest.fixture
def nodes() -> dict[Peer, Loopback]:
    found: dict[Peer, Loopback] = {}
    for peer in (A, B, C):
        Loopback(peer, found)
    return found


@pytest.fixture
def a(nodes: dict[Peer, Loopback]) -> Loopback:
    """The publisher."""
    return nodes[A]


@pytest.fixture
def b(nodes: dict[Peer, Loopback]) -> Loopback:
    """A reader."""
    return nodes[B]


def vectors(value: float, count: int = 3) -> list[Tensor]:
    return [torch.full((count,), value)]


def value(fetch: Fetch) -> float | None:
    """What was fetched; None if the answer is empty."""
    message = fetch.wait()
    return None if message is None else float(message.tensors[0][0])


def waits(fetch: Fetch) -> bool:
    with pytest.raises(AssertionError, match="this would wait"):
        fetch.wait()
    return True


# --- publish and fetch ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["the request", "the publication"])
def test_a_publication_reaches_its_reader_whichever_comes_first(a: Loopback, b: Loopback, first: str) -> None:
    place = vectors(0)
    if first == "the request":
        fetch = b.published.fetch(A, R0, into=place)
        a.deliver()
        assert waits(fetch)
        a.published.publish(R0, [B], vectors(5), words=7)
    else:
        a.published.publish(R0, [B], vectors(5), words=7)
        fetch = b.published.fetch(A, R0, into=place)
        a.deliver()
    message = fetch.wait()
    assert message is not None and message["words"] == 7 and torch.equal(place[0], vectors(5)[0])


def test_a_request_gets_its_own_round_and_its_own_part(nodes: dict[Peer, Loopback], a: Loopback) -> None:
    """Two readers, two rounds, requested out of order."""
    fetches = {
        (reader, key): nodes[reader].published.fetch(A, key, have=0) for key in (R1, R0) for reader in (C, B)
    }
    a.deliver()
    for number, (reader, key) in enumerate([(B, R0), (C, R0), (C, R1), (B, R1)]):
        a.published.publish(key, [reader], vectors(number))
        assert value(fetches[reader, key]) == number
    assert all(map(value, [fetches[B, R1], fetches[C, R1], fetches[C, R0]]))


def test_nothing_is_sent_that_was_not_requested(a: Loopback) -> None:
    a.published.publish(R0, [B, C], vectors(1))
    assert not a.replied


def test_a_closed_publisher_answers_at_once(a: Loopback, b: Loopback) -> None:
    held = b.published.fetch(A, R1)
    a.deliver()
    a.published.publish(R0, [B], vectors(3))
    a.published.close()
    assert value(held) is None
    earlier, later = b.published.fetch(A, R0, have=0), b.published.fetch(A, R2, have=0)
    a.deliver()
    assert value(earlier) == 3 and value(later) is None


def test_an_answer_that_is_made_for_a_request_is_kept_like_others(a: Loopback, b: Loopback) -> None:
    fetch = b.published.fetch(A, Key(0, 7), *vectors(2))
    request = a.inbox[0]
    a.deliver()
    assert a.published.waiting() == [request] and float(request.tensors[0][0]) == 2
    a.published.publish_for(request, vectors(4))
    assert value(fetch) == 4 and not a.published.waiting()
    a.published.on_message(request)
    assert value(fetch) == 4 and len(a.replied) == 2


# --- lost answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [False, True])
def test_a_repeated_request_gets_the_same_answer_until_it_is_acknowledged(
    a: Loopback, b: Loopback, large: bool
) -> None:
    tensors = a.published.spare_buffers(vectors(0, LARGE if large else 3))
    tensors[0].fill_(5)
    a.published.publish(R0, [B], tensors)
    fetch = b.published.fetch(A, R0)
    request = a.inbox[0]
    a.deliver()
    for _ in range(2):  # the reply is lost with its connection
        for task in a.tasks:
            task.join()
        assert value(fetch) == 5
        b._replies[request.sequence].message = None
        a.published.on_message(request)
    fetch.acknowledge()
    a.deliver()
    a.published.on_message(request)
    assert value(fetch) is None
    if large:  # memory is not reused while the last answer is still being written
        assert a.published.spare_buffers(tensors) is not tensors
        a.tasks[-1].join()
    assert a.published.spare_buffers(tensors) is tensors


@pytest.mark.parametrize("large", [False, True])
def test_on_one_host_an_answer_that_is_written_needs_no_acknowledgment(
    a: Loopback, b: Loopback, large: bool
) -> None:
    """Its memory is free at once: to publish the next round, or for the system."""
    a.one_host = True
    tensors = a.published.spare_buffers(vectors(0, LARGE if large else 3))
    b.published.fetch(A, Key(0, 0), into=vectors(7, LARGE if large else 3))
    a.deliver()
    a.published.publish(Key(0, 0), [B], tensors)
    if large:  # a task writes it
        a.published.trim()
        assert a.published.buffers
        a.tasks[0].join()
    assert a.published.spare_buffers(tensors) is tensors
    gone = weakref.ref(tensors[0])
    a.published.trim()
    del tensors
    a.tasks.clear()
    assert not a.published.buffers and gone() is None


def test_a_repeated_request_that_is_held_is_answered_once(a: Loopback, b: Loopback) -> None:
    fetch = b.published.fetch(A, R0)
    request = a.inbox[0]
    a.deliver()
    a.published.on_message(request)
    a.published.publish(R0, [B], vectors(5))
    assert value(fetch) == 5 and a.replied == [request]


def test_an_acknowledgment_is_of_its_own_kind(a: Loopback, b: Loopback) -> None:
    """Another `Published` of the same node has the same keys, and keeps its publications."""
    a.published.publish(R0, [B], vectors(5))
    other = Published(a, "other")  # type: ignore[arg-type]
    assert not set(other.kinds) & set(a.published.kinds)
    fetch = b.published.fetch(A, R0)
    a.deliver()
    fetch.acknowledge()
    assert a.inbox[0].kind in a.published.kinds
    a.deliver()
    assert not a.published._deliveries


def test_a_request_acknowledges_the_rounds_that_it_has(nodes: dict[Peer, Loopback], a: Loopback) -> None:
    """Of this reader, and no other; memory is reused when all have it."""
    rooms = []
    for key in (R0, R1, R2):
        rooms.append(a.published.spare_buffers(vectors(0)))
        a.published.publish(key, [B, C], rooms[-1])
    assert len({id(room) for room in rooms}) == 3
    nodes[B].published.fetch(A, R2)
    nodes[C].published.fetch(A, R2, have=1)
    a.deliver()
    assert a.published.spare_buffers(vectors(0)) is rooms[0]
    assert set(a.published._deliveries) == {(B, R2), (C, R1), (C, R2)}
    nodes[C].published.fetch(A, Key(0, 3))
    a.deliver()
    a.published.publish(Key(0, 3), [C], a.published.spare_buffers(vectors(0)))
    assert a.published.spare_buffers(vectors(0)) is rooms[1] and len(a.published.buffers) == 3


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=20, max_size=200))
def test_no_loss_and_no_order_of_events_changes_what_readers_get(events: list[int]) -> None:
    """Two readers fetch five rounds; requests, replies and acknowledgments are delayed, repeated and lost."""
    nodes: dict[Peer, Loopback] = {}
    publisher, *readers = (Loopback(peer, nodes) for peer in (A, B, C))
    seen: dict[Peer, list[float]] = {B: [], C: []}
    open_: dict[Peer, tuple[Fetch, Message]] = {}
    published = 0
    for event in [*events, *([0, 1, 2, 3, 4] * 40)]:
        reader = readers[event % 2]
        if event == 0 and published < 5:
            room = publisher.published.spare_buffers(vectors(0))
            room[0].fill_(published)
            publisher.published.publish(Key(0, published), [B, C], room)
            published += 1
        elif event in (1, 2) and reader.me not in open_ and len(seen[reader.me]) < 5:
            fetch = reader.published.fetch(A, Key(0, len(seen[reader.me])))
            open_[reader.me] = fetch, publisher.inbox[-1]
        elif event in (3, 4):
            publisher.deliver()
            if reader.me in open_ and reader._replies[open_[reader.me][1].sequence].message:
                fetch, _ = open_.pop(reader.me)
                seen[reader.me] += [value(fetch)]
                if event == 3:
                    fetch.acknowledge()
        elif event >= 5 and reader.me in open_:
            _, request = open_[reader.me]
            if request not in publisher.inbox:  # the reply is lost, and the request is sent again
                reader._replies[request.sequence].message = None
                publisher.published.on_message(request)
    assert seen == {B: [0, 1, 2, 3, 4], C: [0, 1, 2, 3, 4]}
    assert len(publisher.published.buffers) <= 5


# --- deaths -----------------------------------------------------------------------------------------


def test_a_held_request_of_a_dead_worker_is_never_answered(nodes: dict[Peer, Loopback], a: Loopback) -> None:
    """Its memory may belong to another worker by then."""
    nodes[B].published.fetch(A, R0)
    survivor = nodes[C].published.fetch(A, R0)
    a.deliver()
    a.hear_of_a_death(B)
    a.published.publish(R0, [C], vectors(5))
    a.published.begin(Key(1, 0))
    a.published.close()
    assert value(survivor) == 5 and {message.sender for message in a.replied} == {C}


def test_an_answer_on_its_way_to_a_dead_worker_is_waited_for(a: Loopback, b: Loopback) -> None:
    """Afterwards nothing writes to its memory. What it may have received is not returned."""
    a.published.publish(R0, [B], vectors(5, LARGE))
    b.published.fetch(A, R0)
    a.deliver()
    assert [task.done for task in a.tasks] == [False]
    a.hear_of_a_death(B)
    assert [task.done for task in a.tasks] == [True] and not a.returned and not a.published._deliveries


def test_an_answer_that_a_dead_worker_does_not_need_is_waited_for_too(a: Loopback, b: Loopback) -> None:
    """It may have been dropped before this worker heard of the death."""
    a.published.publish(R0, [B], vectors(5, LARGE))
    b.published.fetch(A, R0)
    a.deliver()
    a.published.drop(B)
    a.hear_of_a_death(C)
    assert not a.tasks[0].done
    a.hear_of_a_death(B)
    assert a.tasks[0].done


def test_a_large_publication_is_forgotten_once_it_is_written(a: Loopback, b: Loopback) -> None:
    """Also if its reader has acknowledged it before the writer has noticed that it is done."""
    for round_ in range(3):
        a.published.publish(Key(0, round_), [B], vectors(5, LARGE))
        b.published.fetch(A, Key(0, round_))
        a.deliver()
        a.published.drop(B)
        a.tasks[round_].join()
        assert not a.published._deliveries and not a.published._released


def test_a_failed_answer_to_a_dead_worker_is_no_error(a: Loopback, b: Loopback) -> None:
    def fail() -> None:
        raise PeerLost("its connection broke")

    a.published.publish(R0, [B], vectors(5, LARGE))
    b.published.fetch(A, R0)
    a.deliver()
    a.tasks[0].work = fail
    a.hear_of_a_death(B)
    assert a.tasks[0].done


def test_a_publication_that_a_dead_worker_did_not_request_is_returned_once(a: Loopback) -> None:
    a.published.publish(R0, [B, C], vectors(5), grains=3)
    for _ in range(2):
        a.hear_of_a_death(B)
    (returned,) = a.returned
    assert returned.fields == {"grains": 3} and set(a.published._deliveries) == {(C, R0)}


def test_a_replacement_is_another_reader(nodes: dict[Peer, Loopback], a: Loopback) -> None:
    """What is published for it stays when a late notice tells of the death of its predecessor again."""
    a.hear_of_a_death(B)
    replacement = Loopback(B, nodes, incarnation=1)
    a.published.publish(R0, [B], vectors(5))
    fetch = replacement.published.fetch(A, R1)
    a.deliver()
    a.hear_of_a_death(C)
    a.published.publish(R1, [B], vectors(6))
    assert value(fetch) == 6 and [each.tensors for each in a.returned] == []


def test_a_request_of_a_dead_publisher_is_answered_with_nothing(b: Loopback) -> None:
    fetch = b.published.fetch(A, R0)
    b._replies[1].lost = True
    assert fetch.wait() is None


# --- cohorts ----------------------------------------------------------------------------------------


def test_a_new_cohort_answers_requests_for_rounds_that_never_come(
    nodes: dict[Peer, Loopback], a: Loopback
) -> None:
    old, new = nodes[B].published.fetch(A, R2), nodes[C].published.fetch(A, Key(1, 0))
    a.deliver()
    a.published.begin(Key(1, 0))
    assert value(old) is None and waits(new)
    late = nodes[B].published.fetch(A, Key(0, 5))
    a.deliver()
    assert value(late) is None
    a.published.publish(Key(1, 0), [C], vectors(8))
    assert value(new) == 8


def test_publications_of_the_last_cohort_stay_until_they_are_forgotten(a: Loopback, b: Loopback) -> None:
    """A reader may still be about to fetch them; if it dies they are of no use to the new cohort."""
    a.published.publish(R0, [B, C], vectors(5))
    a.published.begin(Key(1, 0))
    fetch = b.published.fetch(A, R0)
    a.deliver()
    assert value(fetch) == 5
    a.hear_of_a_death(C)
    assert not a.returned
    a.published.forget(Key(1, 0))
    again = b.published.fetch(A, R0)
    a.deliver()
    assert value(again) is None


def test_publications_for_a_reader_that_left_the_cohort_are_dropped(a: Loopback) -> None:
    a.published.publish(R0, [B, C], vectors(5))
    a.published.drop(B)
    assert set(a.published._deliveries) == {(C, R0)} and not a.returned


# --- resumed runs -----------------------------------------------------------------------------------

MISMATCH = "worker 1 continues from round 4 and another worker from the start: either each worker loads"


@pytest.mark.parametrize("begun", [False, True])
def test_workers_that_continue_from_different_states_are_refused(
    a: Loopback, b: Loopback, begun: bool
) -> None:
    """At once if this worker has taken a step; otherwise when it does, as it may still load its state."""
    b.published.begin(Key(0, 4), "round 4")
    b.published.fetch(A, Key(0, 4))
    if begun:
        a.published.start()
        with pytest.raises(UsageError, match=MISMATCH):
            a.deliver()
        return
    a.deliver()
    assert not a.published.waiting()
    with pytest.raises(UsageError, match=MISMATCH):
        a.published.publish(R0, [B], vectors(1))


def test_workers_that_load_the_same_state_one_after_the_other_agree(a: Loopback, b: Loopback) -> None:
    early = b.published.fetch(A, R0)  # before it loads
    b.published.begin(Key(0, 4), "round 4")
    fetch = b.published.fetch(A, Key(0, 4))
    a.deliver()
    a.published.begin(Key(0, 4), "round 4")
    assert value(early) is None and waits(fetch) and len(a.published.waiting()) == 1
    a.published.publish(Key(0, 4), [B], vectors(9))
    assert value(fetch) == 9


def test_a_late_joiner_follows_the_others(a: Loopback, b: Loopback) -> None:
    """It loads no state, and is not asked where it continues from."""
    a.published.begin(Key(0, 4), "round 4")
    b.published.begin(Key(0, 0))
    b.published.start()
    fetch = b.published.fetch(A, Key(0, 6))
    a.deliver()
    a.published.publish(Key(0, 6), [B], vectors(2))
    assert value(fetch) == 2
