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
    """Seeds the random number generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
