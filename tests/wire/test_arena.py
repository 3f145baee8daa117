"""Arenas: shared by fork, sparse, and freed memory is reused."""

import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.wire import Arenas


def test_a_forked_process_shares_the_memory():
    arenas = Arenas(2, 1 << 36)
    at = arenas.allocate(1, 5)
    if not (child := os.fork()):
        arenas.view(1)[at : at + 5] = b"hello"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(arenas.view(1)[at : at + 5]) == b"hello"
    arenas.close()


def test_only_touched_pages_exist():
    arenas = Arenas(1, 1 << 36)
    arenas.view(0)[1 << 35] = 1
    assert os.fstat(arenas._files[0]).st_blocks * 512 <= 4 << 20
    arenas.close()


def test_a_cleared_arena_takes_no_memory():
    arenas = Arenas(2, 1 << 36)
    for index in range(2):
        arenas.view(index)[: 1 << 20] = bytes([1]) * (1 << 20)
    arenas.clear(0)
    assert [os.fstat(file).st_blocks > 0 for file in arenas._files] == [False, True]
    assert arenas.view(0)[0] == 0 and arenas.view(1)[0] == 1
    arenas.close()


def test_the_files_cannot_change_their_size():
    arenas = Arenas(1, 1 << 20)
    for size in (1 << 19, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(arenas._files[0], size)
    arenas.close()


def test_closed_arenas_leave_no_descriptors_and_keep_views_valid():
    before = set(os.listdir("/proc/self/fd"))
    arenas = Arenas(3, 1 << 20)
    piece = arenas.view(0)[:10]
    arenas.view(1)
    arenas.close()
    arenas.close()
    piece[:] = b"still here"
    del piece
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_full_arena_says_so():
    arenas = Arenas(1, 4096)
    arenas.allocate(0, 4000)
    with pytest.raises(PolyrhythmError, match="no room for 100"):
        arenas.allocate(0, 100)
    arenas.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20000)), max_size=60))
def test_blocks_are_aligned_apart_and_reused(actions):
    arenas = Arenas(1, 1 << 22)
    live: dict[int, int] = {}
    for release, number in actions:
        if release and live:
            at = sorted(live)[number % len(live)]
            arenas.free(0, at)
            del live[at]
        else:
            at = arenas.allocate(0, number)
            assert at % (mmap.PAGESIZE if number >= mmap.PAGESIZE else 64) == 0
            assert at + number <= arenas.size
            assert all(at + max(number, 1) <= other or other + size <= at for other, size in live.items())
            live[at] = max(number, 1)
    for at in list(live):
        arenas.free(0, at)
    assert arenas._gaps[0] == [(0, arenas.size)]
    arenas.close()


def test_discarded_memory_goes_back_to_the_system_and_is_used_again():
    arenas = Arenas(1, 1 << 30)
    kept, at = arenas.allocate(0, 100), arenas.allocate(0, 1 << 20)
    arenas.view(0)[kept : kept + 100] = b"x" * 100
    arenas.view(0)[at : at + (1 << 20)] = b"y" * (1 << 20)
    arenas.discard(0, at)
    assert os.fstat(arenas._files[0]).st_blocks * 512 < 1 << 20
    assert bytes(arenas.view(0)[kept : kept + 100]) == b"x" * 100
    assert arenas.allocate(0, 1 << 20) == at
    arenas.close()
    arenas.discard(0, at)  # a tensor may be gone later than its arena
