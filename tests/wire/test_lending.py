"""One-way messages through shared memory: copied on both sides, once, whatever happens to connections."""

import contextlib

import numpy as np
import pytest

from polyrhythm.core.peer import Peer
from polyrhythm.wire import Arenas, Buffer, Transport, TransportOptions
from polyrhythm.wire import lending as wire_lending
from polyrhythm.wire.lending import Lender, borrow
from tests.wire.test_transport import Proxy, values

KEY = bytes(32)
ONE, OTHER = Peer("worker", 1), Peer("worker", 0)
LARGE = 1 << 15  # numbers


@contextlib.contextmanager
def pair(**options):
    arenas = Arenas(2, 1 << 30)
    other = Transport(OTHER, KEY, TransportOptions(arenas=arenas, host="h", arena=0, **options))
    one = Transport(ONE, KEY, TransportOptions(arenas=arenas, host="h", arena=1, **options))
    proxy = Proxy(other.address)
    one.introduce(OTHER, proxy.address)
    try:
        yield one, other, proxy, arenas
    finally:
        one.close()
        other.close()
        proxy.close()
        arenas.close()


def numbers(start, count=LARGE):
    return Buffer("float32", np.arange(start, start + count, dtype=np.float32).data.cast("B"))


def test_a_message_is_a_copy_that_the_socket_does_not_carry():
    with pair() as (one, other, proxy, _):
        sent = [numbers(0), numbers(0, 3), Buffer("int64", memoryview(b"")), numbers(7)]
        expected = [values(each) for each in sent]
        for _ in range(3):  # the block of the first message is used again
            one.send(OTHER, "x", sent, {"n": 1})
            message = other.receive(timeout=10)
            assert [values(each) for each in message.buffers] == expected and message.fields == {"n": 1}
            assert {each.arena for each in message.buffers} == {-1}
        sent[0].view[:4] = b"...."
        message.buffers[3].view[:4] = b"...."
        assert values(message.buffers[0]) == expected[0]
        assert one.traffic.bytes_sent == 3 * sum(each.view.nbytes for each in sent)
        assert len(proxy.seen) < 4000
        assert one._lender._allocated == 1 << 19  # bytes


def test_small_messages_and_those_for_another_host_are_sent_inline():
    with pair() as (one, other, _, __):
        one.send(OTHER, "x", [numbers(0, 64)])
        assert values(other.receive(timeout=10).buffers[0]) == list(range(64))
        assert one._lender._allocated == 0
        with contextlib.closing(Transport(Peer("worker", 2), KEY, TransportOptions(host="elsewhere"))) as far:
            one.introduce(far.me, far.address)
            one.send(far.me, "x", [numbers(5)])
            assert values(far.receive(timeout=10).buffers[0]) == values(numbers(5))
        assert one._lender._allocated == 0


def test_a_repeated_header_neither_delivers_nor_frees_what_came_after_it():
    arenas = Arenas(1, 1 << 30)
    lender = Lender(arenas, 0)
    first = lender.lend(1, [numbers(0)])
    assert values(borrow(arenas, 1, first)[0]) == values(numbers(0))
    second = lender.lend(2, [numbers(9)])
    assert second == first  # the same block
    assert borrow(arenas, 1, first) is None
    assert lender.lend(3, [numbers(1)])[0].offset != second[0].offset
    assert values(borrow(arenas, 2, second)[0]) == values(numbers(9))
    arenas.close()


def test_blocks_that_nobody_copies_are_bounded(monkeypatch):
    monkeypatch.setattr(wire_lending, "_MOST", 1 << 20)
    arenas = Arenas(1, 1 << 30)
    lender = Lender(arenas, 0)
    lent = [lender.lend(number, [numbers(number)]) for number in range(1, 9)]
    assert [each is not None for each in lent] == [True] * 4 + [False] * 4
    assert [values(borrow(arenas, number, lent[number - 1])[0])[0] for number in range(1, 5)] == [1, 2, 3, 4]
    assert lender.lend(9, [numbers(0, 2 * LARGE)]) is not None  # the free blocks make room for a larger one
    assert lender._allocated == 1 << 19
    arenas.close()


@pytest.mark.parametrize("queue", [1, 64])
def test_large_and_small_messages_keep_their_order(queue):
    with pair(queue=queue) as (one, other, _, __):
        for number in range(20):
            one.send(OTHER, "x", [numbers(number, LARGE if number % 2 else 4)])
        got = [values(other.receive(timeout=10).buffers[0])[0] for _ in range(20)]
        assert got == list(range(20))
