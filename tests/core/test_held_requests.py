"""Laws of HeldRequests: each request is taken once, in order, when it is ready and its sender is alive."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from polyrhythm.core.held_requests import HeldRequests
from polyrhythm.core.message import Message
from polyrhythm.core.node import Members
from polyrhythm.core.peer import INCARNATION_SHIFT, Peer

A, B = Peer("worker", 0), Peer("worker", 1)


@pytest.fixture
def members() -> Members:
    return Members()


@pytest.fixture
def held(members: Members) -> HeldRequests:
    return HeldRequests(SimpleNamespace(members=members))  # type: ignore[arg-type]


def request(sender: Peer, number: int, incarnation: int = 0) -> Message:
    return Message(sender, "ask", (incarnation << INCARNATION_SHIFT) + number, {"number": number})


def test_requests_are_held_until_ready_and_taken_once_in_order(held: HeldRequests) -> None:
    requests = [request(A, 3), request(B, 1), request(A, 2), request(B, 2)]
    for each in requests:
        held.add(each)
    assert list(held.take(lambda each: False)) == [] and list(held) == requests
    assert list(held.take(lambda each: each["number"] >= 2)) == [requests[0], *requests[2:]]
    assert list(held) == [requests[1]]
    assert list(held.take(lambda each: True)) == [requests[1]]
    assert list(held.take(lambda each: True)) == []


def test_requests_of_the_dead_are_forgotten_and_those_of_a_replacement_kept(
    held: HeldRequests, members: Members
) -> None:
    dead, other, replacement = request(A, 1), request(B, 1), request(A, 1, incarnation=1)
    for each in (dead, other, replacement):
        held.add(each)
    members.leave(A, 0, finished=False)
    held.forget_dead()
    assert list(held) == [other, replacement]
    members.leave(B, 0, finished=True)
    assert list(held.take(lambda each: True)) == [replacement]


def test_a_request_is_tested_after_the_answers_to_those_before(held: HeldRequests) -> None:
    """One answer may use up what two requests wait for."""
    for number in (1, 2):
        held.add(request(A, number))
    stock = ["only one"]
    for each in held.take(lambda each: bool(stock)):
        stock.pop()
        assert each == request(A, 1)
    assert not stock and list(held) == [request(A, 2)]


def test_a_request_that_comes_while_others_are_answered_is_held(held: HeldRequests) -> None:
    held.add(request(A, 1))
    for _ in held.take(lambda each: True):
        held.add(request(B, 1))
    assert list(held) == [request(B, 1)]


def test_of_requests_with_one_identity_the_latest_is_held(members: Members) -> None:
    """Also if that of a dead worker arrives after that of its replacement."""
    held = HeldRequests(SimpleNamespace(members=members), lambda each: each["number"])  # type: ignore[arg-type]
    first, replacement = request(A, 7), request(A, 7, incarnation=1)
    for each in (first, request(B, 7), first, replacement, first):
        held.add(each)
    assert list(held) == [replacement, request(B, 7)]
