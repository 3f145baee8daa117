"""The cost model of the simulator: what a step, an update and a message cost on hosts with such links.

Every worker has a host of its own, every host a link of its own to a network that is never the bottleneck.
Hosts may be at sites: then what passes between two sites also passes the link of each, which all hosts of the
site share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log


@dataclass(frozen=True)
class StepTime:
    """A distribution of times: its kind and, in seconds, its parameters (but sigma has no unit)."""

    kind: str
    parameters: tuple[float, ...]

    def sampler(self, stream: random.Random, speed: float) -> Callable[[], float]:
        """Draws from the distribution, divided by the speed. Scaling its parameters once does that."""
        first, *rest = self.parameters
        first /= speed
        match self.kind:
            case "uniform":
                width = rest[0] / speed - first
                return lambda: first + width * stream.random()
            case "exponential":
                return lambda: stream.expovariate(1.0) * first
            case "lognormal":
                middle, sigma = log(first), rest[0]
                return lambda: stream.lognormvariate(middle, sigma)
        return lambda: first


@dataclass(frozen=True)
class Host:
    """A group of equal hosts. Seconds, and bytes per second."""

    name: str = ""
    count: int | None = None
    speed: float = 1.0
    step_time: StepTime = StepTime("constant", (0.010,))
    bandwidth: float = inf
    latency: float = 0.0
    site: str = ""


@dataclass(frozen=True)
class Site:
    """The link of a site. Seconds, and bytes per second."""

    name: str
    bandwidth: float = inf
    latency: float = 0.0


@dataclass(frozen=True)
class Straggler:
    """An episode in which some workers, given by rank or by host, are slower."""

    workers: tuple[int, ...]
    host: str | None
    start: float
    end: float
    slowdown: float


class Costs:
    """What things cost each node of one run. It remembers until when each link is busy, so it is asked
    in the order of virtual time.
    """

    def __init__(
        self,
        workers: list[Host],
        servers: list[Host],
        stragglers: Sequence[Straggler],
        seed: int,
        colocated: bool = False,
        sites: Sequence[Site] = (),
    ) -> None:
        # Strings seed `Random` by their SHA-512, so every process draws the same; `hash` would not do.
        self._steps = [
            host.step_time.sampler(random.Random(f"{seed}/step/{rank}"), host.speed)
            for rank, host in enumerate(workers)
        ]
        self._applies = [
            host.step_time.sampler(random.Random(f"{seed}/apply/{rank}"), host.speed)
            for rank, host in enumerate(servers)
        ]
        self._episodes = [
            [
                (s.start, s.end, s.slowdown)
                for s in stragglers
                if rank in s.workers or (s.host and s.host == host.name)
            ]
            for rank, host in enumerate(workers)
        ]
        # One list of links for both roles: the first server comes after the last worker, or shares the
        # first worker's.
        nodes = workers if colocated else workers + servers
        self._offset = {"worker": 0, "server": 0 if colocated else len(workers)}
        self._bandwidth = [node.bandwidth for node in nodes]
        self._latency = [node.latency for node in nodes]
        self.free = all(node.bandwidth == inf and not node.latency for node in nodes)
        self._up_free = [0.0] * len(nodes)
        self._down_free = [0.0] * len(nodes)
        # A server at no site is as if at one more, with a free link.
        self.sites = _SiteLinks(sites, [node.site for node in nodes]) if sites else None
        self.free = self.free and not sites

    def step_time(self, worker: int, now: float) -> float:
        """How long the step takes that this worker begins now. Each call draws anew."""
        time = self._steps[worker]()
        for start, end, slowdown in self._episodes[worker]:
            if start <= now < end:
                time *= slowdown
        return time

    def apply_time(self, server: int) -> float:
        """How long this server takes for its next update."""
        return self._applies[server]()

    def together(self, source: tuple[str, int], target: tuple[str, int]) -> bool:
        """Whether both are on one host, so that nothing between them touches the network."""
        return source[1] == target[1] and self._offset[source[0]] == self._offset[target[0]]

    def depart(
        self, source: tuple[str, int], target: tuple[str, int], nbytes: int, now: float
    ) -> tuple[float, float]:
        """When the first byte of a message reaches its target, and how long the uplink takes for all of it.

        A message waits until the uplink of its source is free and holds it at that link's own bandwidth; it
        is late by the sum of both latencies.
        """
        a = self._offset[source[0]] + source[1]
        b = self._offset[target[0]] + target[1]
        start = max(now, self._up_free[a])
        span = nbytes / self._bandwidth[a]
        self._up_free[a] = start + span
        return start + self._latency[a] + self._latency[b], span

    def crossing(self, source: tuple[str, int], target: tuple[str, int]) -> tuple[int, int] | None:
        """The sites that a message passes from and to, if they are two."""
        if self.sites is None:
            return None
        a, b = (self.sites.of[self._offset[role] + rank] for role, rank in (source, target))
        return None if a == b else (a, b)

    def land(self, target: tuple[str, int], nbytes: int, head: float, span: float) -> float:
        """When the last byte of a message is in, asked at the time `head` when its first one comes.

        Bytes come no faster than they were sent and than the downlink takes them, and a downlink takes one
        message after the other in the order in which they reach it. Up and down do not disturb each other.
        """
        b = self._offset[target[0]] + target[1]
        bandwidth = self._bandwidth[b]
        if bandwidth == inf or not nbytes:
            return head + span
        free = self._down_free[b] = max(head, self._down_free[b]) + nbytes / bandwidth
        return max(free, head + span)

    def all_reduce(self, ranks: Sequence[int], nbytes: int) -> float:
        """How long these workers take to sum `nbytes` each by direct exchange.

        There are two hops, to whoever reduces a slice and back, and on each every link carries all slices
        but one: 2(n-1)/n of the vector in all.
        """
        n = len(ranks)
        narrowest = min(self._bandwidth[rank] for rank in ranks)
        hosts = 2 * (n - 1) / n * nbytes / narrowest
        if self.sites is None:
            return 2 * self._slowest_pair(ranks) + hosts
        # Twice, each of the k workers at a site has a slice to send to each of those elsewhere, and to get.
        passing = [2 * k * (n - k) * nbytes / n for k in self.sites.counts(ranks)]
        return 2 * self._slowest_pair(ranks) + max(hosts, self.sites.carry(passing, passing))

    def all_gather(self, ranks: Sequence[int], sizes: Sequence[int]) -> float:
        """How long these workers take until each has what every other sends, of so many bytes.

        There is one hop, on which each link carries its own to all others, and all others' to it.
        """
        out = max((len(ranks) - 1) * size / self._bandwidth[r] for r, size in zip(ranks, sizes, strict=True))
        come = max(
            (sum(sizes) - size) / self._bandwidth[rank] for rank, size in zip(ranks, sizes, strict=True)
        )
        if self.sites is None:
            return self._slowest_pair(ranks) + max(out, come)
        here, own = self.sites.counts(ranks), self.sites.counts(ranks, sizes)
        leaving = [size * (len(ranks) - k) for k, size in zip(here, own, strict=True)]
        coming = [k * (sum(sizes) - size) for k, size in zip(here, own, strict=True)]
        return self._slowest_pair(ranks) + max(out, come, self.sites.carry(leaving, coming))

    def broadcast(self, ranks: Sequence[int], root: int, nbytes: int) -> float:
        """How long it takes until all have asked the root, and it has sent `nbytes` to each of them."""
        narrowest = min(self._bandwidth[rank] for rank in ranks)
        sending = (len(ranks) - 1) * nbytes / self._bandwidth[root]
        hosts = max(sending, nbytes / narrowest)
        if self.sites is None:
            return 2 * self._slowest_pair(ranks) + hosts
        here, home = self.sites.counts(ranks), self.sites.of[root]
        leaving = [(len(ranks) - k) * nbytes * (site == home) for site, k in enumerate(here)]
        coming = [k * nbytes * (site != home) for site, k in enumerate(here)]
        return 2 * self._slowest_pair(ranks) + max(hosts, self.sites.carry(leaving, coming))

    def _slowest_pair(self, ranks: Sequence[int]) -> float:
        if self.sites is None:
            return sum(sorted(self._latency[rank] for rank in ranks)[-2:])
        return self.sites.slowest_pair([(rank, self._latency[rank]) for rank in ranks])


class _SiteLinks:
    """The links of sites, each shared by all nodes of its site."""

    def __init__(self, sites: Sequence[Site], names: Sequence[str]) -> None:
        links = [*sites, Site("")]
        known = [site.name for site in links]
        self.of = [known.index(name) for name in names]  # the site of each node
        self.latency = [site.latency for site in links]
        self._bandwidth = [site.bandwidth for site in links]
        self._free = {"up": [0.0] * len(links), "down": [0.0] * len(links)}

    def through(self, site: int, way: str, nbytes: int, head: float, span: float) -> tuple[float, float]:
        """When the first byte of a message that reaches a site's link at `head` is through, and how long it
        takes from then until the last one is. Asked at that time.

        As on a host's downlink: one message after the other, and bytes no faster than they come.
        """
        free, bandwidth = self._free[way], self._bandwidth[site]
        if bandwidth == inf or not nbytes:
            return head, span
        start = max(head, free[site])
        free[site] = start + nbytes / bandwidth
        return start, max(free[site], head + span) - start

    def counts(self, ranks: Sequence[int], each: Sequence[int] | None = None) -> list[int]:
        """How many of these workers are at each site; or what they have there of `each`."""
        found = [0] * len(self.latency)
        for rank, one in zip(ranks, each or [1] * len(ranks), strict=True):
            found[self.of[rank]] += one
        return found

    def carry(self, leaving: Sequence[float], coming: Sequence[float]) -> float:
        """How long the links take for so many bytes of each site, both ways at once."""
        return max(
            max(out, come) / bandwidth
            for out, come, bandwidth in zip(leaving, coming, self._bandwidth, strict=True)
        )

    def slowest_pair(self, workers: Sequence[tuple[int, float]]) -> float:
        """The latency between the two of these, given with those of their own links, that is the largest."""
        own: dict[int, list[float]] = {}
        for rank, latency in workers:
            own.setdefault(self.of[rank], []).append(latency)
        inside = max(sum(sorted(each)[-2:]) for each in own.values())
        outside = sorted(max(each) + self.latency[site] for site, each in own.items())[-2:]
        return max(inside, sum(outside) if len(outside) > 1 else 0.0)
