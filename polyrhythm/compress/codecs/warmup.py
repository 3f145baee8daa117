"""Warm-up: early gradients change fast, so sparse codecs start with a higher density."""

from __future__ import annotations

FIRST_DENSITY = 0.25
FIRST_TAU = 1 / 64  # of the configured tau


def density_now(density: float, warmup: int, count: int) -> float:
    """The share of entries in message `count`: geometric from 25 % over `warmup` messages, then constant.

    >>> [round(density_now(0.001, 4, count), 4) for count in range(6)]
    [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    """
    return _towards(density, max(density, FIRST_DENSITY), warmup, count)


def tau_now(tau: float, warmup: int, count: int) -> float:
    """The threshold of message `count`: geometric from a 64th over `warmup` messages, then constant.

    >>> [round(tau_now(0.5, 3, count), 4) for count in range(5)]
    [0.0078, 0.0312, 0.125, 0.5, 0.5]
    """
    return _towards(tau, tau * FIRST_TAU, warmup, count)


def _towards(aim: float, first: float, warmup: int, count: int) -> float:
    return aim if count >= warmup else aim * (first / aim) ** (1 - count / warmup)
