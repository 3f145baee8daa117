"""Shared memory by name, and locks that survive the death of their holder."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.wire import Arenas, mutex
from polyrhythm.wire.shared_region import SharedRegion


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    made = Arenas(2, 1 << 36)
    yield made
    made.close()


def forked(function: Callable[[], object]) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        function()
        code = 0
    finally:
        os._exit(code)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_named_shared_memory_is_the_same_in_every_process(arenas: Arenas) -> None:
    """In any order of requests. It is zero at first, and outlives the processes."""

    def child(names: str) -> None:
        region = SharedRegion(arenas)
        for name in names:
            region.memory(name, 100)[ord(names[0]) - ord("a")] = ord(name)

    for names in ("abc", "cab", "bca"):
        os.waitpid(forked(lambda names=names: child(names)), 0)
    region = SharedRegion(arenas)
    for name in "abc":
        assert bytes(region.memory(name, 100)) == bytes([ord(name)] * 3) + bytes(97)
    assert bytes(region.memory("d", 1 << 20)) == bytes(1 << 20)


def test_concurrent_requests_for_named_memory_do_not_overlap(arenas: Arenas) -> None:
    """No two names share memory, and no name has two allocations."""

    def child(rank: int) -> None:
        region = SharedRegion(arenas)
        for number in range(100):
            region.memory(f"of all {(number * 7 + rank) % 100}", 8)[rank] = 1 + number * 0
            region.memory(f"of {rank} {number}", 5)[:] = bytes([rank + 1] * 5)

    children = [forked(lambda rank=rank: child(rank)) for rank in range(4)]
    assert [os.waitpid(each, 0)[1] for each in children] == [0] * 4
    region = SharedRegion(arenas)
    for number in range(100):
        assert bytes(region.memory(f"of all {number}", 8)) == bytes([1] * 4 + [0] * 4)
        for rank in range(4):
            assert bytes(region.memory(f"of {rank} {number}", 5)) == bytes([rank + 1] * 5)


def test_invalid_requests_for_named_memory_are_refused(arenas: Arenas) -> None:
    region = SharedRegion(arenas)
    region.memory("x", 8)
    with pytest.raises(PolyrhythmError, match="shared memory 'x' has 8 bytes, and 9 were requested"):
        region.memory("x", 9)
    with pytest.raises(PolyrhythmError, match="no room for"):
        region.memory("large", 1 << 37)
    for name in ("", "x" * 113, "a\0b"):
        with pytest.raises(PolyrhythmError, match="cannot be the name of shared memory"):
            region.memory(name, 8)
    with pytest.raises(PolyrhythmError, match="names of shared memory are in use"):
        for number in range(600):
            region.memory(str(number), 1)


def test_a_lock_excludes(arenas: Arenas) -> None:
    """Processes that read, wait and write lose no update."""

    def child() -> None:
        region = SharedRegion(arenas)
        lock, word = region.lock("x"), region.memory("word", 8).cast("q")
        for _ in range(200):
            lock.take()
            before = word[0]
            os.sched_yield()
            word[0] = before + 1
            lock.release()

    children = [forked(child) for _ in range(3)]
    for each in children:
        os.waitpid(each, 0)
    assert SharedRegion(arenas).memory("word", 8).cast("q")[0] == 600


def test_death_of_the_holder_releases_a_named_lock(arenas: Arenas) -> None:
    region = SharedRegion(arenas)
    word, lock = region.memory("word", 1), region.lock("x")

    def child() -> None:
        SharedRegion(arenas).lock("x").take()
        word[0] = 1
        time.sleep(60)

    holder = forked(child)
    wait_until(lambda: word[0] == 1)
    os.kill(holder, signal.SIGKILL)
    lock.take()
    assert os.waitpid(holder, 0)[1] == signal.SIGKILL
    lock.take()  # again, without effect
    lock.release()
    lock.release()


def test_named_lock_goes_to_a_waiter_before_its_last_holder(arenas: Arenas) -> None:
    region = SharedRegion(arenas)
    word, lock = region.memory("word", 1), region.lock("x")

    def child() -> None:
        mine = SharedRegion(arenas).lock("x")
        for _ in range(20):
            mine.take()
            word[0] += 1
            mine.release()

    lock.take()
    waiter = forked(child)
    try:
        while (before := word[0]) < 20:
            wait_until(lock.next.locked)  # another process waits for the lock
            lock.release()
            lock.take()
            assert word[0] > before  # once, or more often if this process had to pause
    finally:
        lock.release()
        os.waitpid(waiter, 0)


def test_concurrently_requested_named_lock_is_created_once(arenas: Arenas) -> None:
    """Processes request new locks at once. A lock initialized again while held would exclude nobody."""

    def child() -> None:
        region = SharedRegion(arenas)
        words = region.memory("words", 8 * 50).cast("q")
        for number in range(50):
            for _ in range(10):
                lock = region.lock(str(number))
                lock.take()
                before = words[number]
                os.sched_yield()
                words[number] = before + 1
                lock.release()

    children = [forked(child) for _ in range(3)]
    assert [os.waitpid(each, 0)[1] for each in children] == [0] * 3
    assert SharedRegion(arenas).memory("words", 8 * 50).cast("q").tolist() == [30] * 50


class Late(Exception):
    """Raised to end a wait."""


def times_out(after: float) -> Callable[[int, float], None]:
    def check_wait(holder: int, waited: float) -> None:
        if waited > after:
            raise Late(f"worker {holder}")

    return check_wait


def stopped_with(arenas: Arenas, name: str) -> int:
    """A stopped process that holds a lock, as worker 7."""

    def child() -> None:
        SharedRegion(arenas).lock(name, 7).take()
        os.kill(os.getpid(), signal.SIGSTOP)

    holder = forked(child)
    assert os.WIFSTOPPED(os.waitpid(holder, os.WUNTRACED)[1])
    return holder


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.slow
def test_waiting_for_a_stopped_lock_holder_times_out_and_names_it(arenas: Arenas) -> None:
    """Both as the next in line and behind another; when the holder dies, the lock works again."""
    holder = stopped_with(arenas, "x")
    lock = SharedRegion(arenas).lock("x", 1, times_out(1.2))
    began = time.monotonic()
    for _ in range(2):  # after a timeout it is no longer the next in line
        with pytest.raises(Late, match="worker 7"):
            lock.take()
    assert time.monotonic() - began > 2.4
    other = forked(lambda: SharedRegion(arenas).lock("x", 2).take())
    wait_until(lock.next.locked)  # behind another one
    with pytest.raises(Late, match="worker 7"):
        lock.take()
    end(holder)
    os.waitpid(other, 0)
    lock.take()
    lock.release()


def test_waiting_behind_a_stopped_lock_waiter_names_it(arenas: Arenas) -> None:
    """No process holds the lock then, and yet all wait."""
    lock = SharedRegion(arenas).lock("x", 0)
    lock.take()
    before = forked(lambda: SharedRegion(arenas).lock("x", 7).take())
    wait_until(lambda: lock.next.holder == 7)
    os.kill(before, signal.SIGSTOP)
    os.waitpid(before, os.WUNTRACED)
    lock.release()
    with pytest.raises(Late, match="worker 7"):
        SharedRegion(arenas).lock("x", 1, times_out(0.7)).take()
    end(before)
    lock.take()
    lock.release()


def test_lock_timeout_restarts_when_the_holder_changes(
    arenas: Arenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many quick holders are not one that is stuck: the time counts from the last change of the holder."""
    holder = stopped_with(arenas, "x")
    turns = [3, 3, 4, 4, 4, 5]
    monkeypatch.setattr(mutex, "SLICE", 0.125)
    told: list[tuple[int, float]] = []

    def check_wait(whom: int, waited: float) -> None:
        told.append((whom, waited))
        if not turns:
            raise Late

    with pytest.raises(Late):
        SharedRegion(arenas).lock("x", 9).main.acquire(check_wait, lambda: turns.pop(0))
    assert told == [(3, 0.125), (4, 0.0), (4, 0.125), (4, 0.25), (5, 0.0)]
    end(holder)


def test_ctrl_c_interrupts_waiting_for_a_named_lock(arenas: Arenas) -> None:
    holder = stopped_with(arenas, "x")
    word = SharedRegion(arenas).memory("word", 1)

    def child() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        lock = SharedRegion(arenas).lock("x")
        word[0] = 1
        try:
            lock.take()
        except KeyboardInterrupt:
            word[0] = 2

    waiter = forked(child)
    wait_until(lambda: word[0] == 1 and SharedRegion(arenas).lock("x").next.locked())
    os.kill(waiter, signal.SIGINT)
    wait_until(lambda: word[0] == 2)
    os.waitpid(waiter, 0)
    assert not SharedRegion(arenas).lock("x").next.locked()
    end(holder)


@pytest.mark.slow
def test_named_lock_survives_kills_at_any_point(arenas: Arenas) -> None:
    """While waiting, holding or releasing: after every kill the lock can be taken."""
    lock = SharedRegion(arenas).lock("x", 0, times_out(20))
    taken = SharedRegion(arenas).memory("taken", 2)

    def child(number: int) -> None:
        mine = SharedRegion(arenas).lock("x", 1)
        while True:
            mine.take()
            taken[number] = 1
            mine.release()

    for turn in range(20):
        taken[:] = bytes(2)
        children = [forked(partial(child, number)) for number in range(2)]
        wait_until(lambda: bytes(taken) == b"\1\1")
        time.sleep(turn * 1e-4)  # so that the kills fall on different points
        for each in children:
            os.kill(each, signal.SIGKILL)
        lock.take()
        lock.release()
        for each in children:
            os.waitpid(each, 0)


def test_a_named_lock_is_released_only_by_the_thread_that_took_it(arenas: Arenas) -> None:
    lock = SharedRegion(arenas).lock("x")
    lock.take()
    failed: list[str] = []

    def other() -> None:
        try:
            lock.release()
        except PolyrhythmError as error:
            failed.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert failed == ["only the thread that took a lock can release it: Operation not permitted"]
