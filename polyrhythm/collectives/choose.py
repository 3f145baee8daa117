"""Which all-reduce is the fastest, by what was measured.

`python -m benchmarks collectives` prints the figures behind this table. On one host shared memory wins at
every size. Between hosts two hops are better while a message costs more than its bytes, and between two hosts
always. With more to send it is the ring: each talks to one neighbour, and where links have a limit (`python
-m benchmarks.ring --hosts 4 --rate 1gbit`) those who all send to one get in each other's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.core.compose import refusal
from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from polyrhythm.core.strategy import Strategy

WAYS = {
    "auto": "whichever is the fastest by what was measured",
    "shared": "in the shared memory of one host",
    "hierarchical": "in shared memory inside each host, by a ring between hosts",
    "ring": "by a ring of neighbours, in 2(n-1) steps",
    "direct": "every worker reduces one slice for all, in two hops",
}

# Between three hosts and more, a ring from so many bytes per step and worker on; below that, and between two,
# the direct exchange.
RING_CHUNK = 1 << 18


def check(way: str) -> None:
    """Refuses what nobody knows."""
    if way not in WAYS:
        raise UsageError(f"there is no collective {way!r}; there are {', '.join(WAYS)}")


def check_codec(way: str, strategy: Strategy) -> None:
    """Raises UsageError if this way sums what the strategy's codec sends, and that cannot be summed."""
    if len(strategy.parts) > 1:
        return _check_levels(way, *strategy.parts)
    if strategy.codec is not None and (why := refusal(strategy, strategy.codec, way)):
        raise UsageError(f"{strategy}: {why}")


def _check_levels(way: str, inside: Strategy, between: Strategy) -> None:
    for each in (inside, between):
        check_codec(way, each)
    codec = between.codec
    if way == "ring" and codec is not None and codec.reduction.gathered:
        # Only the first worker of a site would know what each hop leaves out, and all of its site must.
        raise UsageError(
            f"{inside} / {between}: between sites what {codec.name} sends is gathered; leave out "
            "--collective ring"
        )


def choose(way: str, hosts: Sequence[str], nbytes: int) -> str:
    """The way to reduce so many bytes. `hosts` names the host of every worker; "" shares with nobody."""
    together = [host for host in hosts if host and hosts.count(host) > 1]
    one = bool(hosts[0]) and len(set(hosts)) == 1
    if way == "shared" and not one:
        raise UsageError("shared memory needs all workers on one host; use hierarchical, ring or direct")
    if way != "auto":
        return way
    if one:
        return "shared"
    if together:
        return "hierarchical"
    return "ring" if len(hosts) > 2 and nbytes >= len(hosts) * RING_CHUNK else "direct"
