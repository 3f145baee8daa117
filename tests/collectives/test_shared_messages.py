"""Messages in shared memory: each arrives once, in order and whole, however many are in flight."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polyrhythm.collectives.shared_messages import SharedMessages, board_bytes
from polyrhythm.wire.arena import Arenas

MESSAGES = 300  # more than a ring has slots
DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bool)


@contextmanager
def connected() -> Iterator[list[SharedMessages]]:
    """Three members, which are threads."""
    arenas = Arenas(3, 1 << 26)
    boards = [arenas.allocate(index, board_bytes(3)) for index in range(3)]
    names = {f"member {each}": each for each in range(3)}
    yield [SharedMessages(arenas, names, mine, boards) for mine in range(3)]
    arenas.close()


def content(sender: int, to: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * sender + 1000 * to + number)
    count = int(torch.randint(0, 500, (), generator=generator))
    return torch.randint(0, 2, (count,), generator=generator).to(DTYPES[number % len(DTYPES)])


def all_at_once(work: Callable[[int], Any], count: int) -> None:
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_messages_arrive_once_in_order_and_whole() -> None:
    """From all to all, taken at random times; what is sent may be overwritten at once."""

    def work(rank: int) -> None:
        mine, draw = members[rank], random.Random(rank)
        others = [each for each in range(3) if each != rank]
        sent, got = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
        kept = []
        deadline = time.monotonic() + 60
        while kept or not mine.idle or any(count < MESSAGES for count in (*sent.values(), *got.values())):
            assert time.monotonic() < deadline
            for to in others:
                for _ in range(min(draw.randrange(8), MESSAGES - sent[to])):
                    values = content(rank, to, sent[to])
                    mine.send(to, 7, sent[to], values)
                    values.zero_()
                    sent[to] += 1
            mine.advance()
            for each in mine.arrivals():
                assert (each.channel, each.tag) == (7, got[each.sender])
                got[each.sender] += 1
                kept.append(each)
            draw.shuffle(kept)
            for _ in range(draw.randrange(len(kept) + 1)):
                each = kept.pop()
                expected = content(each.sender, rank, each.tag)
                assert each.values.dtype == expected.dtype and torch.equal(each.values, expected)
                each.take()

    with connected() as members:
        all_at_once(work, 3)


def test_a_message_is_in_flight_until_it_is_taken() -> None:
    """Its memory and its slot are not used again before, and are used again after."""
    with connected() as members:
        check_flight(members[0], members[1])


def check_flight(one: SharedMessages, other: SharedMessages) -> None:
    sent = [one.send(1, 0, 0, torch.full((100,), float(number))) for number in range(100)]
    arrived = other.arrivals()
    assert len(arrived) == 64 and not one.idle  # as many as there are slots
    assert [each.values[0].item() for each in arrived] == [float(number) for number in range(64)]
    arrived[5].take()
    one.advance()
    assert [each.taken for each in sent[:7]] == [False] * 5 + [True, False]
    assert other.arrivals() == []  # the slot of message 0 is the next, and it is in use
    for each in arrived:
        each.take()
    one.advance()
    later = other.arrivals()
    assert [each.values[0].item() for each in later] == [float(number) for number in range(64, 100)]
    for each in later:
        each.take()
    one.advance()
    assert one.idle and all(each.taken for each in sent)
    again = one.send(1, 0, 0, torch.zeros(100))
    assert again.memory.data_ptr() in {each.memory.data_ptr() for each in sent}
