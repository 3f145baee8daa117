"""The bound of `python -m benchmarks codecs` means something: this code holds it, worse ones do not."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from benchmarks.codecs import _entropy, _evenly
from polyrhythm.compress.kernels import entropy

SIZE = 17 << 16


def drawn() -> np.ndarray:
    """As a network's gradient: some blocks of 2^16 parameters are fifty times as dense as others."""
    draws = np.random.default_rng(0)
    density = np.repeat(np.geomspace(0.002, 0.1, 17), 1 << 16)
    return np.flatnonzero(draws.random(SIZE) < density)


def rice(gaps: np.ndarray, k: int) -> int:
    return int(((gaps >> k) + 1 + k).sum())


def test_only_per_block_rice_codes_stay_within_3_percent_of_entropy() -> None:
    """One parameter for all blocks, or a parameter that is one off, or Elias' gamma."""
    indexes = drawn()
    bound = 1.03 * _entropy(indexes, SIZE)
    code = entropy.pack_pulses(SIZE, indexes, np.ones(len(indexes), np.int32), 1.0)
    assert 8 * len(code) - len(indexes) < bound
    gaps = np.diff(indexes, prepend=-1) - 1
    assert min(rice(gaps, k) for k in range(20)) > bound
    inside = [gaps[indexes >> 16 == block] for block in range(17)]
    assert sum(min(rice(each, k) for k in range(20)) for each in inside) < bound
    best = [min(range(20), key=lambda k, each=each: rice(each, k)) for each in inside]
    assert sum(rice(each, k + 1) for each, k in zip(inside, best, strict=True)) > bound
    assert float((2 * np.floor(np.log2(gaps + 1)) + 1).sum()) > bound


def test_evenly_spread_indexes_keep_the_count_of_each_block() -> None:
    indexes = drawn()
    even = _evenly(indexes, SIZE, np.random.default_rng(1))
    assert np.array_equal(np.bincount(even >> 16), np.bincount(indexes >> 16))
    assert (np.diff(even) > 0).all() and not np.array_equal(even, indexes)
    assert _entropy(even, SIZE) == _entropy(indexes, SIZE)
