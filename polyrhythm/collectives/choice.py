"""Which all-reduce is the fastest, by what was measured.

`python -m benchmarks collectives` prints the figures behind this table. On one host shared memory wins at
every size. Between hosts two hops are better while a message costs more than its bytes, and between two hosts
always. With more to send it is the ring: each talks to one neighbour, and where links have a limit (`python
-m benchmarks.ring --hosts 4 --rate 1gbit`) those who all send to one get in each other's way.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.errors import UsageError

WAYS = {
    "auto": "whichever is the fastest by what was measured",
    "shared": "in the shared memory of one host",
    "hierarchical": "in shared memory inside each host, by a ring between hosts",
    "ring": "by a ring of neighbours, in 2(n-1) steps",
    "direct": "every worker reduces one slice for all, in two hops",
}

# (workers at least, bytes at least, way), the first that fits; between hosts.
BETWEEN_HOSTS = ((3, 1 << 20, "ring"), (0, 0, "direct"))


def check(way: str) -> None:
    """Refuses what nobody knows."""
    if way not in WAYS:
        raise UsageError(f"there is no collective {way!r}; there are {', '.join(WAYS)}")


def choose(way: str, hosts: Sequence[str], nbytes: int) -> str:
    """The way to reduce so many bytes. `hosts` names the host of every worker; "" shares with nobody."""
    together = [host for host in hosts if host and hosts.count(host) > 1]
    one = len(together) == len(hosts) and len(set(hosts)) == 1
    if way == "shared" and not one:
        raise UsageError("shared memory needs all workers on one host; use hierarchical, ring or direct")
    if way != "auto":
        return way
    if one:
        return "shared"
    if together:
        return "hierarchical"
    return next(name for workers, least, name in BETWEEN_HOSTS if len(hosts) >= workers and nbytes >= least)
