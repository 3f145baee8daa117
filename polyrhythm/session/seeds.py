"""Random seeds: the script's own, or those of the run.

All nodes start their script with the same generators, seeded from `--seed`, so all build the same model. A
script may seed torch, NumPy or Python's `random` itself, before or after `init()`, and that counts. When a
worker begins to train, with its first batch or backward pass, it gets numbers of its own, generator by
generator: derived from what the script has seeded, or from `--seed` if it has not. Until then all workers
draw the same numbers, so a split of the data after `prepare` is the same on all. Servers have numbers of
their own from `prepare` on.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


def mix(*parts: object) -> int:
    """One seed from several values, the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds the global random number generators of torch, NumPy and Python."""
    seed_torch(seed)
    np.random.seed(_short(seed))
    random.seed(seed)


def seed_torch(seed: int) -> None:
    """Seeds torch's global generators."""
    if torch.accelerator.current_accelerator() is None:
        # torch.manual_seed() would also queue the seed, with a stack trace, for devices that never appear:
        # that takes 150 times as long.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def start_script(seed: int) -> None:
    """Called before the script of a node starts, with the seed of the run."""
    seed_all(mix("model", seed))


def script_seed(seed: int, loaders: Iterable[DataLoader[Any]]) -> int | None:
    """The seed of torch and of the loaders' generators, if the script has set one of them."""
    own = None if _started_by(seed) else torch.initial_seed()
    seeds = [each.initial_seed() for each in map(generator_of, loaders) if each is not None]
    return mix("script", own, *seeds) if own is not None or seeds else None


def generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    """The generator that the script has given to a loader or to its sampler."""
    generator = getattr(loader.sampler, "generator", None) or loader.generator
    return generator if isinstance(generator, torch.Generator) else None


def equally_seeded(one: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """True if two loaders have generators of their own in the same state: they shuffle alike."""
    mine, theirs = generator_of(one), generator_of(other)
    if mine is None or theirs is None or mine is theirs:
        return False
    return torch.equal(mine.get_state(), theirs.get_state())


class Separation:
    """Gives a worker numbers of its own, once."""

    def __init__(self, role: str, seed: int, rank: int) -> None:
        self._arguments = role, seed, rank
        self._done = False

    def begin(self) -> None:
        """The worker begins to train."""
        if not self._done:
            self._done = True
            separate(*self._arguments)

    def skip(self) -> None:
        """The worker continues with numbers that it has saved."""
        self._done = True


def separate(role: str, seed: int, rank: int) -> None:
    """From here on each node draws its own numbers; `seed` is that of the run."""
    untouched = mix("model", seed)
    torch_seed = seed if _started_by(seed) else torch.initial_seed()
    # States can be compared, but not asked whether they were seeded. One that the script has used decides by
    # its next number.
    numpy_seed = seed if _same_numpy(untouched) else ("numpy", int(np.random.randint(1 << 31)))
    python_seed = seed if random.getstate() == _python(untouched) else ("random", random.getrandbits(64))
    seed_torch(mix(role, torch_seed, rank))
    np.random.seed(_short(mix(role, numpy_seed, rank)))
    random.seed(mix(role, python_seed, rank))


def _started_by(seed: int) -> bool:
    """True if torch still has the seed of `start_script`."""
    return torch.initial_seed() == mix("model", seed)


def _same_numpy(seed: int) -> bool:
    now: Any = np.random.get_state()
    then: Any = np.random.RandomState(_short(seed)).get_state()
    return now[2:] == then[2:] and bool(np.array_equal(now[1], then[1]))


def _python(seed: int) -> tuple[Any, ...]:
    return random.Random(seed).getstate()


def _short(seed: int) -> int:
    """NumPy takes 32 bits."""
    return seed & 0xFFFFFFFF
