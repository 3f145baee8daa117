"""Random seeds that are the same in every process."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def mix(*parts: object) -> int:
    """One seed from several values, the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds the global random number generators of torch, NumPy and Python."""
    if torch.accelerator.current_accelerator() is None:
        # torch.manual_seed() would also queue the seed, with a stack trace, for devices that never appear:
        # that takes 150 times as long.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
