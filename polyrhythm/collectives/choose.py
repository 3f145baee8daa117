"""Chooses the all-reduce algorithm that was the fastest in measurements.

`python -m benchmarks collectives` prints the figures. On one host shared memory is the fastest at every size.
Between two hosts, and for short vectors, direct exchange is: it takes two hops. For long vectors between more
hosts the ring is, because each worker sends to one neighbour only; with limited links (`python -m
benchmarks.ring --hosts 4 --rate 1gbit`) workers that all send to one compete for its bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from polyrhythm.core.strategy import Strategy

ALGORITHMS = {
    "auto": "the fastest in measurements",
    "shared": "in shared memory, on one host",
    "hierarchical": "shared memory inside each host, a ring between hosts",
    "ring": "a ring of neighbours, in 2(n-1) steps",
    "direct": "every worker reduces one slice for all others, in two hops",
}

# Three hosts or more use a ring if its chunks have at least this many bytes, and direct exchange otherwise.
RING_CHUNK = 1 << 18


def check(algorithm: str) -> None:
    """Raises UsageError if there is no such algorithm."""
    if algorithm not in ALGORITHMS:
        raise UsageError(f"there is no collective {algorithm!r}; there are {', '.join(ALGORITHMS)}")


def check_codec(algorithm: str, strategy: Strategy) -> None:
    """Raises UsageError if the algorithm sums codes, and those of the strategy's codec cannot be summed."""
    from polyrhythm.core.compose import refusal  # with its imports it would double the time of `--help`

    if len(strategy.parts) > 1:
        return _check_levels(algorithm, *strategy.parts)
    if strategy.codec is not None and (why := refusal(strategy, strategy.codec, algorithm)):
        raise UsageError(f"{strategy}: {why}")


def _check_levels(algorithm: str, inside: Strategy, between: Strategy) -> None:
    for each in (inside, between):
        check_codec(algorithm, each)
    codec = between.codec
    if algorithm == "ring" and codec is not None and codec.reduction.gathered:
        # Only the first worker of a site would know the residual of each hop, but the whole site needs it.
        raise UsageError(
            f"{inside} / {between}: the codes of {codec.name} are gathered between sites; leave out "
            "--collective ring"
        )


def choose(algorithm: str, hosts: Sequence[str], nbytes: int) -> str:
    """The algorithm for this many bytes. `hosts`: the host of each worker, or "" if it shares none."""
    together = [host for host in hosts if host and hosts.count(host) > 1]
    one = bool(hosts[0]) and len(set(hosts)) == 1
    if algorithm == "shared" and not one:
        raise UsageError("shared memory needs all workers on one host; use hierarchical, ring or direct")
    if algorithm != "auto":
        return algorithm
    if one:
        return "shared"
    if together:
        return "hierarchical"
    return "ring" if len(hosts) > 2 and nbytes >= len(hosts) * RING_CHUNK else "direct"
