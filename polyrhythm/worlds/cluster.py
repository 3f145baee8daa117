"""The cost model of the simulator: what a step, an update and a message cost, from a `cluster.toml`.

Every worker has a host of its own, every host a link of its own to a network that is never the bottleneck.
Hosts may be at sites: then what passes between two sites also passes the link of each, which all hosts of the
site share.

    [[hosts]]                  # a group of equal hosts; workers are dealt to the groups in order
    name = "workstation"
    count = 3                  # one group may go without: it takes the workers that are left over
    speed = 1.0                # relative: at 0.5 a step takes twice as long (default 1)
    step_time = "20 ms"        # or { uniform = ["10 ms", "30 ms"] }, { exponential = "20 ms" } (its mean),
                               # { lognormal = "20 ms", sigma = 0.3 } (its median) (default 10 ms)
    bandwidth = "1 Gbit/s"     # of its link, each way; bit/s or B/s with k, M or G (default unlimited)
    latency = "0.1 ms"         # of its link, one way; ns, us, ms or s (default 0)
    site = "berlin"            # where they are: all groups say it, or none; several may be at one site

    [[sites]]                  # the link of a site to the others; one that is not listed has a free one
    name = "berlin"            # a site that hosts are at
    bandwidth = "10 Mbit/s"    # each way (default unlimited)
    latency = "20 ms"          # one way (default 0)

    [servers]                  # the host of each server: the same keys, but no name and no count (a server
                               # without a site is at none: what it says to workers passes their site's link)
    step_time = "1 ms"         # what a server takes per push (default 0)
                               # (beside workers they have no link of their own: no bandwidth, no latency)

    [[stragglers]]             # an episode in which some workers are slower
    workers = [3]              # their ranks; or host = "workstation"
    from = "10 s"              # (default 0)
    to = "20 s"                # (default: to the end)
    slowdown = 5.0             # their steps take five times as long

    [[failures]]               # a crash of some workers, for strategies in which the others can go on
    workers = [1]              # their ranks
    at = "0.5 s"               # when they crash
    back = "1 s"               # when they begin anew (default: never)

Nothing is required: an empty file describes equal hosts on a free network.

Real runs use such a file for one thing: which worker is at which site (`--strategy "allreduce / diloco:50"`).
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf, isfinite, log
from pathlib import Path
from typing import Any

from polyrhythm.errors import UsageError

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
BYTES_PER_SECOND = {
    **{"bit/s": 0.125, "kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6},
    **{"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9},
}
QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*", re.ASCII | re.DOTALL)


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


@dataclass(frozen=True)
class Crash:
    """Some workers stop dead; at `back`, if ever, they begin anew."""

    workers: tuple[int, ...]
    at: float
    back: float | None = None


SERVER = Host(step_time=StepTime("constant", (0.0,)))


@dataclass(frozen=True)
class Cluster:
    """The machines and links on which a simulated run takes place."""

    hosts: tuple[Host, ...] = (Host(),)
    servers: Host = SERVER
    stragglers: tuple[Straggler, ...] = ()
    source: str = "the cluster"
    failures: tuple[Crash, ...] = ()
    sites: tuple[Site, ...] = ()  # in the order of their hosts

    @staticmethod
    def uniform() -> Cluster:
        """Any number of equal hosts, steps of 10 ms and a free network: what is simulated by default."""
        return Cluster()

    @staticmethod
    def load(path: Path | str) -> Cluster:
        """Reads a `cluster.toml`; whatever is wrong with it is a `UsageError` of one line."""
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"{path}: no such file; it must be a description like examples/cluster.toml"
            ) from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not valid TOML: {error}") from None
        return _cluster(_Table(str(path), content))

    def place(self, workers: int, servers: int, seed: int, colocated: bool = False) -> Costs:
        """Deals the workers to the hosts; server r has one of its own, or shares worker r's. The seed
        decides every draw.
        """
        if colocated and (self.servers.bandwidth != inf or self.servers.latency or self.servers.site):
            raise UsageError(
                f"{self.source}: servers: colocated servers use the links of the workers' hosts; leave out "
                "their bandwidth and latency" + (" and site" if self.servers.site else "")
            )
        dealt = self._deal(workers)
        return Costs(dealt, [self.servers] * servers, self.stragglers, seed, colocated, self.sites)

    def places(self, workers: int) -> dict[str, list[int]]:
        """The ranks of so many workers by their sites; empty if there are no sites."""
        dealt = self._deal(workers) if self.sites else []
        return {
            site.name: [rank for rank, host in enumerate(dealt) if host.site == site.name]
            for site in self.sites
        }

    def _deal(self, workers: int) -> list[Host]:
        """The host of each worker."""
        counts = [host.count for host in self.hosts]
        fixed = sum(count for count in counts if count is not None)
        if None not in counts and workers > fixed:
            raise UsageError(
                f"{self.source}: {workers} workers, but only {fixed} hosts; use --workers {fixed} or fewer, "
                "raise a count, or leave out the count of one group"
            )
        dealt: list[Host] = []
        for host in self.hosts:
            wanted = max(0, workers - fixed) if host.count is None else host.count
            dealt += [host] * min(wanted, workers - len(dealt))
        return dealt


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
    """The links of sites, each shared by all nodes of its site, and what has passed them."""

    def __init__(self, sites: Sequence[Site], names: Sequence[str]) -> None:
        links = [*sites, Site("")]
        known = [site.name for site in links]
        self.of = [known.index(name) for name in names]  # the site of each node
        self.latency = [site.latency for site in links]
        self.passed = 0.0  # bytes that have left a site
        self._bandwidth = [site.bandwidth for site in links]
        self._free = {"up": [0.0] * len(links), "down": [0.0] * len(links)}

    def through(self, site: int, way: str, nbytes: int, head: float, span: float) -> tuple[float, float]:
        """When the first byte of a message that reaches a site's link at `head` is through, and how long it
        takes from then until the last one is. Asked at that time.

        As on a host's downlink: one message after the other, and bytes no faster than they come.
        """
        free, bandwidth = self._free[way], self._bandwidth[site]
        if way == "up":
            self.passed += nbytes
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
        self.passed += sum(leaving)
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


class _Table:
    """A TOML table that is read key by key, and knows where it stands for the sake of its errors."""

    def __init__(self, where: str, content: Any) -> None:
        if not isinstance(content, dict):
            raise UsageError(f"{where}: must be a table, not {content!r}")
        self.where, self.content, self.known = where, content, list[str]()

    def take(self, key: str, default: Any = None) -> Any:
        self.known.append(key)
        return self.content.get(key, default)

    def wrong(self, key: str, problem: str) -> UsageError:
        value = f" = {self.content[key]!r}" if key in self.content else ""
        return UsageError(f"{self.where}: {key}{value}: {problem}")

    def end(self) -> None:
        """Every key must have been taken."""
        for key in self.content:
            if key not in self.known:
                raise UsageError(f"{self.where}: unknown key {key!r}; {_hint(key, self.known, 'keys')}")

    def tables(self, key: str) -> list[_Table]:
        value = self.take(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise UsageError(f"{self.where}: {key} must be a list of tables; write [[{key}]]")
        return [_Table(f"{self.where}: {key}[{index}]", item) for index, item in enumerate(value)]

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, 'must be a text in quotes, such as "workstation"')
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0."""
        value = self.take(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value <= 1e100:
            raise self.wrong(key, "must be a number above 0")
        return float(value)

    def quantity(self, key: str, units: dict[str, float], default: float, above_zero: bool = False) -> float:
        value = self.take(key)
        return default if value is None else self.parse(key, value, units, above_zero)

    def parse(self, key: str, value: Any, units: dict[str, float], above_zero: bool = False) -> float:
        try:
            result = quantity(value, units)
        except ValueError as error:
            raise self.wrong(key, str(error)) from None
        if result < 0 or (above_zero and result == 0):
            raise self.wrong(key, "must be above 0" if above_zero else "must be 0 or more")
        return result


def quantity(value: object, units: dict[str, float]) -> float:
    """The value of a text such as "20 ms" in the unit whose factor is 1."""
    match = QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"must be a text of a number and a unit; use {_words(list(units), 'or')}")
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(f"{'unknown' if unit else 'no'} unit; use {_words(list(units), 'or')}")
    result = float(number) * units[unit]
    if not isfinite(result):
        raise ValueError("too large")
    return result


def _words(items: list[str], last: str) -> str:
    return f"{', '.join(items[:-1])} {last} {items[-1]}" if len(items) > 1 else items[0]


def _hint(word: str, known: list[str], what: str) -> str:
    if close := get_close_matches(word, known, n=1):
        return f"did you mean {close[0]}?"
    return f"the {what} here are {_words(known, 'and')}" if known else f"there are no {what} here"


def _cluster(table: _Table) -> Cluster:
    hosts = tuple(_host(item) for item in table.tables("hosts")) or Cluster.hosts
    servers = _node(_Table(f"{table.where}: servers", table.take("servers", {})), SERVER)
    names = [host.name for host in hosts if host.name]
    size = None if any(host.count is None for host in hosts) else sum(host.count or 0 for host in hosts)
    stragglers = tuple(_straggler(item, names, size) for item in table.tables("stragglers"))
    failures = tuple(_failure(item, size) for item in table.tables("failures"))
    sites = _sites(table, hosts, servers)
    table.end()
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{table.where}: hosts: two groups have the name {name!r}; give each its own")
    if sum(host.count is None for host in hosts) > 1:
        raise UsageError(
            f"{table.where}: hosts: more than one group has no count; one at most can take what is left over"
        )
    return Cluster(hosts, servers, stragglers, table.where, failures, sites)


def _sites(table: _Table, hosts: Sequence[Host], servers: Host) -> tuple[Site, ...]:
    """The sites that hosts are at, in their order, with the links that they have."""
    names = list(dict.fromkeys(host.site for host in hosts if host.site))
    found = {name: Site(name) for name in names}
    for number, host in enumerate(hosts):
        if names and not host.site:
            raise UsageError(
                f"{table.where}: hosts[{number}]: site is missing; other groups have one, so give each one"
            )
    seen = []
    for item in table.tables("sites"):
        name = item.text("name") or ""
        if name not in found:
            raise item.wrong("name", f"no group of hosts is at such a site; {_hint(name, names, 'sites')}")
        if name in seen:
            raise item.wrong("name", "this site is listed twice")
        seen.append(name)
        found[name] = Site(
            name,
            item.quantity("bandwidth", BYTES_PER_SECOND, inf, above_zero=True),
            item.quantity("latency", SECONDS, 0.0),
        )
        item.end()
    if servers.site and servers.site not in found:
        raise UsageError(
            f"{table.where}: servers: site = {servers.site!r}: no group of hosts is there; "
            f"{_hint(servers.site, names, 'sites')}"
        )
    return tuple(found.values())


def _host(table: _Table) -> Host:
    name = table.text("name") or ""
    count = table.take("count")
    if count is not None and (type(count) is not int or count < 1):
        raise table.wrong("count", "must be a whole number, 1 or more")
    return _node(table, Host(), name, count)


def _node(table: _Table, default: Host, name: str = "", count: int | None = None) -> Host:
    host = Host(
        name=name,
        count=count,
        speed=table.number("speed", 1.0),
        step_time=_step_time(table, default.step_time),
        bandwidth=table.quantity("bandwidth", BYTES_PER_SECOND, inf, above_zero=True),
        latency=table.quantity("latency", SECONDS, 0.0),
        site=table.text("site") or "",
    )
    table.end()
    return host


def _step_time(table: _Table, default: StepTime) -> StepTime:
    value = table.take("step_time")
    if value is None:
        return default
    if not isinstance(value, dict):
        return StepTime("constant", (table.parse("step_time", value, SECONDS),))
    match value:
        case {"uniform": [low, high], **rest} if not rest:
            bounds = table.parse("step_time", low, SECONDS), table.parse("step_time", high, SECONDS)
            if bounds[0] > bounds[1]:
                raise table.wrong("step_time", "the lower bound comes first")
            return StepTime("uniform", bounds)
        case {"exponential": mean, **rest} if not rest:
            return StepTime("exponential", (table.parse("step_time", mean, SECONDS),))
        case {"lognormal": middle, "sigma": float() | int() as sigma, **rest} if (
            not rest and 0 <= sigma <= 10
        ):
            median = table.parse("step_time", middle, SECONDS, above_zero=True)
            return StepTime("lognormal", (median, float(sigma)))
    raise table.wrong(
        "step_time",
        'use "20 ms", { uniform = ["10 ms", "30 ms"] }, { exponential = "20 ms" } or '
        '{ lognormal = "20 ms", sigma = 0.3 } with a sigma of 0 to 10',
    )


def _straggler(table: _Table, names: list[str], size: int | None) -> Straggler:
    workers, host = table.take("workers"), table.text("host")
    start, end = table.quantity("from", SECONDS, 0.0), table.quantity("to", SECONDS, inf)
    slowdown = table.number("slowdown", 0.0)
    table.end()  # first, for a misspelt key is the better explanation of a missing one
    if slowdown == 0:
        raise UsageError(f"{table.where}: slowdown is missing; write, say, slowdown = 5.0")
    if (workers is None) == (host is None):
        raise UsageError(f'{table.where}: say who, either by workers = [3] or by host = "name"')
    if host is not None and host not in names:
        raise table.wrong("host", f"there is no such group of hosts; {_hint(host, names, 'names')}")
    ranks = _ranks(table, [] if workers is None else workers, size)
    if not start < end:
        raise table.wrong("to", "must be later than from")
    return Straggler(ranks, host, start, end, slowdown)


def _failure(table: _Table, size: int | None) -> Crash:
    workers, at = table.take("workers"), table.quantity("at", SECONDS, 0.0, above_zero=True)
    back = table.quantity("back", SECONDS, inf)
    table.end()
    if workers is None or workers == []:
        raise UsageError(f"{table.where}: workers is missing; write, say, workers = [1]")
    if at == 0:
        raise UsageError(f'{table.where}: at is missing; write, say, at = "0.5 s"')
    ranks = _ranks(table, workers, size)
    if not at < back:
        raise table.wrong("back", "must be later than at")
    return Crash(ranks, at, None if back == inf else back)


def _ranks(table: _Table, ranks: Any, size: int | None) -> tuple[int, ...]:
    if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise table.wrong("workers", "must be a list of ranks, such as [0, 3]")
    if size is not None and any(rank >= size for rank in ranks):
        raise table.wrong("workers", f"there are only {size} hosts, so ranks are 0 to {size - 1}")
    return tuple(ranks)
