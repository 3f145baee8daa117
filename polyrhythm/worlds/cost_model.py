"""The cost model of the simulator: the duration of steps, updates and messages.

Every worker has its own host, and every host its own link to a network that is never the bottleneck. Hosts
may be at sites: messages between two sites also pass the links of both sites, which all their hosts share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log


@dataclass(frozen=True)
class StepTime:
    """A distribution of durations: its kind and its parameters in seconds (sigma has no unit)."""

    kind: str
    parameters: tuple[float, ...]

    def sampler(self, stream: random.Random, speed: float) -> Callable[[], float]:
        """A function that draws from the distribution, divided by the speed."""
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
    """A group of equal hosts, in seconds and bytes per second."""

    name: str = ""
    count: int | None = None
    speed: float = 1.0
    step_time: StepTime = StepTime("constant", (0.010,))
    bandwidth: float = inf
    latency: float = 0.0
    site: str = ""


@dataclass(frozen=True)
class Site:
    """The link of a site, in seconds and bytes per second."""

    name: str
    bandwidth: float = inf
    latency: float = 0.0


@dataclass(frozen=True)
class Straggler:
    """A period in which some workers, given by rank or by host, are slower."""

    workers: tuple[int, ...]
    host: str | None
    start: float
    end: float
    slowdown: float


class CostModel:
    """The costs of each node of one run.

    It keeps the time until which each link is busy, so it must be called in the order of virtual time.
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
        # `Random` seeds strings by SHA-512, so every process draws the same numbers, unlike with `hash`.
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
        # One list of links for both roles: servers come after the workers, or share the workers' links.
        nodes = workers if colocated else workers + servers
        self._offset = {"worker": 0, "server": 0 if colocated else len(workers)}
        self._bandwidth = [node.bandwidth for node in nodes]
        self._latency = [node.latency for node in nodes]
        self.free = all(node.bandwidth == inf and not node.latency for node in nodes)
        self._up_free = [0.0] * len(nodes)
        self._down_free = [0.0] * len(nodes)
        # Servers without a site are at one more site, with a free link.
        self.sites = _SiteLinks(sites, [node.site for node in nodes]) if sites else None
        self.free = self.free and not sites

    def step_time(self, worker: int, now: float) -> float:
        """The duration of the step that this worker begins now. Each call draws another."""
        time = self._steps[worker]()
        for start, end, slowdown in self._episodes[worker]:
            if start <= now < end:
                time *= slowdown
        return time

    def apply_time(self, server: int) -> float:
        """The duration of this server's next update."""
        return self._applies[server]()

    def same_host(self, source: tuple[str, int], target: tuple[str, int]) -> bool:
        """True if both are on one host, so that their messages do not use the network."""
        return source[1] == target[1] and self._offset[source[0]] == self._offset[target[0]]

    def start_transfer(
        self, source: tuple[str, int], target: tuple[str, int], nbytes: int, now: float
    ) -> tuple[float, float]:
        """When the first byte of a message arrives, and how long the uplink is busy with the message.

        A message waits until the uplink of its source is free, and then occupies it at that link's own
        bandwidth. Both latencies are added.
        """
        a = self._offset[source[0]] + source[1]
        b = self._offset[target[0]] + target[1]
        start = max(now, self._up_free[a])
        span = nbytes / self._bandwidth[a]
        self._up_free[a] = start + span
        return start + self._latency[a] + self._latency[b], span

    def sites_crossed(self, source: tuple[str, int], target: tuple[str, int]) -> tuple[int, int] | None:
        """The sites of source and target if they differ, otherwise None."""
        if self.sites is None:
            return None
        a, b = (self.sites.of[self._offset[role] + rank] for role, rank in (source, target))
        return None if a == b else (a, b)

    def end_transfer(self, target: tuple[str, int], nbytes: int, head: float, span: float) -> float:
        """The time at which the last byte of a message arrives. Call it at the time `head` of the first one.

        Bytes arrive no faster than they were sent and than the downlink carries them. A downlink carries one
        message after the other, in the order of arrival. Uplink and downlink are independent.
        """
        b = self._offset[target[0]] + target[1]
        bandwidth = self._bandwidth[b]
        if bandwidth == inf or not nbytes:
            return head + span
        free = self._down_free[b] = max(head, self._down_free[b]) + nbytes / bandwidth
        return max(free, head + span)

    def all_reduce(self, ranks: Sequence[int], nbytes: int) -> float:
        """The duration of an all-reduce of `nbytes` between these workers, by direct exchange.

        There are two hops, to the worker that reduces a slice and back. On each hop every link carries all
        slices except one: 2(n-1)/n of the vector in total.
        """
        n = len(ranks)
        narrowest = min(self._bandwidth[rank] for rank in ranks)
        hosts = 2 * (n - 1) / n * nbytes / narrowest
        if self.sites is None:
            return 2 * self._slowest_pair(ranks) + hosts
        # On each hop, each of the k workers at a site exchanges a slice with each worker at another site.
        passing = [2 * k * (n - k) * nbytes / n for k in self.sites.counts(ranks)]
        return 2 * self._slowest_pair(ranks) + max(hosts, self.sites.transfer_time(passing, passing))

    def all_gather(self, ranks: Sequence[int], sizes: Sequence[int]) -> float:
        """The duration of an all-gather in which the workers send so many bytes each.

        There is one hop, on which each link carries its own bytes to all others, and those of all others.
        """
        out = max((len(ranks) - 1) * size / self._bandwidth[r] for r, size in zip(ranks, sizes, strict=True))
        incoming = max(
            (sum(sizes) - size) / self._bandwidth[rank] for rank, size in zip(ranks, sizes, strict=True)
        )
        if self.sites is None:
            return self._slowest_pair(ranks) + max(out, incoming)
        here, own = self.sites.counts(ranks), self.sites.counts(ranks, sizes)
        leaving = [size * (len(ranks) - k) for k, size in zip(here, own, strict=True)]
        coming = [k * (sum(sizes) - size) for k, size in zip(here, own, strict=True)]
        return self._slowest_pair(ranks) + max(out, incoming, self.sites.transfer_time(leaving, coming))

    def broadcast(self, ranks: Sequence[int], root: int, nbytes: int) -> float:
        """The duration of a broadcast: all workers request `nbytes` from the root."""
        narrowest = min(self._bandwidth[rank] for rank in ranks)
        sending = (len(ranks) - 1) * nbytes / self._bandwidth[root]
        hosts = max(sending, nbytes / narrowest)
        if self.sites is None:
            return 2 * self._slowest_pair(ranks) + hosts
        here, home = self.sites.counts(ranks), self.sites.of[root]
        leaving = [(len(ranks) - k) * nbytes * (site == home) for site, k in enumerate(here)]
        coming = [k * nbytes * (site != home) for site, k in enumerate(here)]
        return 2 * self._slowest_pair(ranks) + max(hosts, self.sites.transfer_time(leaving, coming))

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

    def forward(self, site: int, way: str, nbytes: int, head: float, span: float) -> tuple[float, float]:
        """The times at which a message that reaches a site's link at `head` leaves it: of its first byte, and
        from then to its last. Call it at the time `head`.

        As on a host's downlink, one message follows the other, and bytes leave no faster than they arrive.
        """
        free, bandwidth = self._free[way], self._bandwidth[site]
        if bandwidth == inf or not nbytes:
            return head, span
        start = max(head, free[site])
        free[site] = start + nbytes / bandwidth
        return start, max(free[site], head + span) - start

    def counts(self, ranks: Sequence[int], each: Sequence[int] | None = None) -> list[int]:
        """How many of these workers are at each site; or the sum of their `each` at each site."""
        found = [0] * len(self.latency)
        for rank, one in zip(ranks, each or [1] * len(ranks), strict=True):
            found[self.of[rank]] += one
        return found

    def transfer_time(self, leaving: Sequence[float], coming: Sequence[float]) -> float:
        """The time that the links need for so many bytes of each site, in both directions at once."""
        return max(
            max(out, come) / bandwidth
            for out, come, bandwidth in zip(leaving, coming, self._bandwidth, strict=True)
        )

    def slowest_pair(self, workers: Sequence[tuple[int, float]]) -> float:
        """The largest latency between two workers, given with the latencies of their own links."""
        own: dict[int, list[float]] = {}
        for rank, latency in workers:
            own.setdefault(self.of[rank], []).append(latency)
        inside = max(sum(sorted(each)[-2:]) for each in own.values())
        outside = sorted(max(each) + self.latency[site] for site, each in own.items())[-2:]
        return max(inside, sum(outside) if len(outside) > 1 else 0.0)
