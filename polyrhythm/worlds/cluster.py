"""The machines and links of a simulated run, and the `cluster.toml` that describes them.

    [[hosts]]                  # a group of equal hosts; workers are assigned to the groups in order
    name = "workstation"
    count = 3                  # one group may leave it out: it takes the remaining workers
    speed = 1.0                # relative: at 0.5 a step takes twice as long (default 1)
    step_time = "20 ms"        # or { uniform = ["10 ms", "30 ms"] }, { exponential = "20 ms" } (its mean),
                               # { lognormal = "20 ms", sigma = 0.3 } (its median) (default 10 ms)
    bandwidth = "1 Gbit/s"     # of its link, each direction; bit/s or B/s with k, M or G (default unlimited)
    latency = "0.1 ms"         # of its link, one way; ns, us, ms or s (default 0)
    site = "berlin"            # all groups have one, or none; several groups may be at one site

    [[sites]]                  # the link of a site to the others; a site not listed has a free link
    name = "berlin"            # a site that hosts are at
    bandwidth = "10 Mbit/s"    # in each direction (default unlimited)
    latency = "20 ms"          # one way (default 0)

    [servers]                  # the host of each server: the same keys, but no name and no count. A server
                               # without a site is outside all sites: messages cross the worker's site link
    step_time = "1 ms"         # time of a server per push (default 0)
                               # (colocated servers use the worker's link: no bandwidth, no latency)

    [[stragglers]]             # a period in which some workers are slower
    workers = [3]              # their ranks; or host = "workstation"
    from = "10 s"              # (default 0)
    to = "20 s"                # (default: to the end)
    slowdown = 5.0             # their steps take five times as long

    [[failures]]               # a crash of some workers, for strategies in which the others can continue
    workers = [1]              # their ranks
    at = "0.5 s"               # when they crash
    back = "1 s"               # when they are replaced (default: never)

Nothing is required: an empty file describes equal hosts on a free network.

Real runs use only the sites of the workers (`--strategy "allreduce / diloco:50"`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from polyrhythm.core.errors import UsageError
from polyrhythm.worlds.cost_model import CostModel, Host, Site, StepTime, Straggler
from polyrhythm.worlds.tables import BYTES_PER_SECOND, SECONDS, Table, hint


@dataclass(frozen=True)
class Crash:
    """A crash of some workers; `back` is the time at which they are replaced, if ever."""

    workers: tuple[int, ...]
    at: float
    back: float | None = None


SERVER = Host(step_time=StepTime("constant", (0.0,)))
ASSUMED = (
    "without --cluster FILE all workers are equally fast: each step takes 10 ms of simulated time, servers "
    "and the network take none; examples/cluster.toml shows how to describe machines and links"
)


@dataclass(frozen=True)
class Cluster:
    """The machines and links of a simulated run."""

    hosts: tuple[Host, ...] = (Host(),)
    servers: Host = SERVER
    stragglers: tuple[Straggler, ...] = ()
    source: str = "the cluster"
    failures: tuple[Crash, ...] = ()
    sites: tuple[Site, ...] = ()  # in the order of their hosts

    @staticmethod
    def uniform() -> Cluster:
        """The default: any number of equal hosts, steps of 10 ms and a free network."""
        return Cluster()

    @staticmethod
    def load(path: Path | str) -> Cluster:
        """Reads a `cluster.toml`; raises `UsageError` with one line if anything is wrong with it."""
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
        return _cluster(Table(str(path), content))

    def cost_model(self, workers: int, servers: int, seed: int, colocated: bool = False) -> CostModel:
        """The cost model of a run. Server r has its own host, or shares that of worker r."""
        if colocated and (self.servers.bandwidth != inf or self.servers.latency or self.servers.site):
            raise UsageError(
                f"{self.source}: servers: colocated servers use the links of the workers' hosts; leave out "
                "their bandwidth and latency" + (" and site" if self.servers.site else "")
            )
        hosts = self._assign_hosts(workers)
        return CostModel(hosts, [self.servers] * servers, self.stragglers, seed, colocated, self.sites)

    def ranks_by_site(self, workers: int) -> dict[str, list[int]]:
        """The ranks at each site; empty if there are no sites."""
        assigned = self._assign_hosts(workers) if self.sites else []
        return {
            site.name: [rank for rank, host in enumerate(assigned) if host.site == site.name]
            for site in self.sites
        }

    def _assign_hosts(self, workers: int) -> list[Host]:
        """The host of each worker."""
        counts = [host.count for host in self.hosts]
        fixed = sum(count for count in counts if count is not None)
        if None not in counts and workers > fixed:
            raise UsageError(
                f"{self.source}: {workers} workers, but only {fixed} hosts; use --workers {fixed} or fewer, "
                "raise a count, or leave out the count of one group"
            )
        assigned: list[Host] = []
        for host in self.hosts:
            wanted = max(0, workers - fixed) if host.count is None else host.count
            assigned += [host] * min(wanted, workers - len(assigned))
        return assigned


def _cluster(table: Table) -> Cluster:
    hosts = tuple(_host(item) for item in table.tables("hosts")) or Cluster.hosts
    servers = _node(Table(f"{table.where}: servers", table.take("servers", {})), SERVER)
    names = [host.name for host in hosts if host.name]
    size = None if any(host.count is None for host in hosts) else sum(host.count or 0 for host in hosts)
    stragglers = tuple(_straggler(item, names, size) for item in table.tables("stragglers"))
    failures = tuple(_failure(item, size) for item in table.tables("failures"))
    sites = _sites(table, hosts, servers)
    table.reject_unknown_keys()
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{table.where}: hosts: two groups have the name {name!r}; give each its own")
    if sum(host.count is None for host in hosts) > 1:
        raise UsageError(
            f"{table.where}: hosts: more than one group has no count; only one can take the remaining workers"
        )
    return Cluster(hosts, servers, stragglers, table.where, failures, sites)


def _sites(table: Table, hosts: Sequence[Host], servers: Host) -> tuple[Site, ...]:
    """The sites of the hosts, in their order, with their links."""
    names = list(dict.fromkeys(host.site for host in hosts if host.site))
    found = {name: Site(name) for name in names}
    for number, host in enumerate(hosts):
        if names and not host.site:
            raise UsageError(
                f"{table.where}: hosts[{number}]: site is missing; if one group has a site, all need one"
            )
    seen = []
    for item in table.tables("sites"):
        name = item.text("name") or ""
        if name not in found:
            raise item.error("name", f"no group of hosts is at such a site; {hint(name, names, 'sites')}")
        if name in seen:
            raise item.error("name", "this site is listed twice")
        seen.append(name)
        found[name] = Site(
            name,
            item.quantity("bandwidth", BYTES_PER_SECOND, inf, above_zero=True),
            item.quantity("latency", SECONDS, 0.0),
        )
        item.reject_unknown_keys()
    if servers.site and servers.site not in found:
        raise UsageError(
            f"{table.where}: servers: site = {servers.site!r}: no group of hosts is there; "
            f"{hint(servers.site, names, 'sites')}"
        )
    return tuple(found.values())


def _host(table: Table) -> Host:
    name = table.text("name") or ""
    count = table.take("count")
    if count is not None and (type(count) is not int or count < 1):
        raise table.error("count", "must be a whole number, 1 or more")
    return _node(table, Host(), name, count)


def _node(table: Table, default: Host, name: str = "", count: int | None = None) -> Host:
    host = Host(
        name=name,
        count=count,
        speed=table.number("speed", 1.0),
        step_time=_step_time(table, default.step_time),
        bandwidth=table.quantity("bandwidth", BYTES_PER_SECOND, inf, above_zero=True),
        latency=table.quantity("latency", SECONDS, 0.0),
        site=table.text("site") or "",
    )
    table.reject_unknown_keys()
    return host


def _step_time(table: Table, default: StepTime) -> StepTime:
    value = table.take("step_time")
    if value is None:
        return default
    if not isinstance(value, dict):
        return StepTime("constant", (table.parse("step_time", value, SECONDS),))
    match value:
        case {"uniform": [low, high], **rest} if not rest:
            bounds = table.parse("step_time", low, SECONDS), table.parse("step_time", high, SECONDS)
            if bounds[0] > bounds[1]:
                raise table.error("step_time", "the lower bound comes first")
            return StepTime("uniform", bounds)
        case {"exponential": mean, **rest} if not rest:
            return StepTime("exponential", (table.parse("step_time", mean, SECONDS),))
        case {"lognormal": middle, "sigma": float() | int() as sigma, **rest} if (
            not rest and 0 <= sigma <= 10
        ):
            median = table.parse("step_time", middle, SECONDS, above_zero=True)
            return StepTime("lognormal", (median, float(sigma)))
    raise table.error(
        "step_time",
        'use "20 ms", { uniform = ["10 ms", "30 ms"] }, { exponential = "20 ms" } or '
        '{ lognormal = "20 ms", sigma = 0.3 } with a sigma of 0 to 10',
    )


def _straggler(table: Table, names: list[str], size: int | None) -> Straggler:
    workers, host = table.take("workers"), table.text("host")
    start, end = table.quantity("from", SECONDS, 0.0), table.quantity("to", SECONDS, inf)
    slowdown = table.number("slowdown", 0.0)
    table.reject_unknown_keys()  # first, because a missing key may be a misspelt one
    if slowdown == 0:
        raise UsageError(f"{table.where}: slowdown is missing; write, say, slowdown = 5.0")
    if (workers is None) == (host is None):
        raise UsageError(f'{table.where}: name the workers, either by workers = [3] or by host = "name"')
    if host is not None and host not in names:
        raise table.error("host", f"there is no such group of hosts; {hint(host, names, 'names')}")
    ranks = _ranks(table, [] if workers is None else workers, size)
    if not start < end:
        raise table.error("to", "must be later than from")
    return Straggler(ranks, host, start, end, slowdown)


def _failure(table: Table, size: int | None) -> Crash:
    workers, at = table.take("workers"), table.quantity("at", SECONDS, 0.0, above_zero=True)
    back = table.quantity("back", SECONDS, inf)
    table.reject_unknown_keys()
    if workers is None or workers == []:
        raise UsageError(f"{table.where}: workers is missing; write, say, workers = [1]")
    if at == 0:
        raise UsageError(f'{table.where}: at is missing; write, say, at = "0.5 s"')
    ranks = _ranks(table, workers, size)
    if not at < back:
        raise table.error("back", "must be later than at")
    return Crash(ranks, at, None if back == inf else back)


def _ranks(table: Table, ranks: Any, size: int | None) -> tuple[int, ...]:
    if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise table.error("workers", "must be a list of ranks, such as [0, 3]")
    if size is not None and any(rank >= size for rank in ranks):
        raise table.error("workers", f"there are only {size} hosts, so ranks are 0 to {size - 1}")
    return tuple(ranks)
