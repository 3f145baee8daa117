"""Checks the plan of a run before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from polyrhythm.collectives import choose
from polyrhythm.core import extensions
from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import POLICIES
from polyrhythm.core.extras import no_encryption
from polyrhythm.core.plan import Plan
from polyrhythm.core.registry import check_known, refuse_unknown, unknown_names
from polyrhythm.core.resolve import ResolvedStrategy, hinted, resolved
from polyrhythm.core.strategy import Strategy
from polyrhythm.launch.program import Program
from polyrhythm.session import batch_norm as norms
from polyrhythm.session.strategy_check import check_strategy, planned
from polyrhythm.worlds.cluster import Cluster

Servers = int | Literal["colocated"]  # colocated: one beside each worker
MOST = 1024  # processes on one host


def named(strategy: str | Strategy | None) -> tuple[str | None, Mapping[str, str]]:
    """The text of a strategy, and the class paths of its names that are not built in."""
    if strategy is None or isinstance(strategy, str):
        return strategy, {}
    known = resolved(strategy)
    return known.text, known.classes


def counted(servers: Servers | None, workers: int) -> int | None:
    """The number of servers; None leaves it to the strategy."""
    if servers == "colocated":
        return workers
    if servers is not None and not isinstance(servers, int):
        raise UsageError(f"servers is {servers!r}; it must be a whole number or the word colocated")
    return servers


def check_plan(plan: Plan) -> None:
    """Checks everything but the strategy and the cluster."""
    if not isinstance(plan.workers, int):
        raise UsageError(f"workers is {plan.workers!r}; it must be a whole number")
    if plan.workers < 1:
        raise UsageError(f"workers is {plan.workers}; there must be 1 or more")
    if plan.servers is not None and plan.servers < 0:
        raise UsageError(f"servers is {plan.servers}; there cannot be fewer than 0")
    if not 0 <= plan.seed < 1 << 63:
        raise UsageError(f"seed is {plan.seed}; it must be between 0 and 2^63 - 1")
    check_threads(plan.threads)
    if plan.batch_norm is not None:
        norms.check_name(plan.batch_norm)
    choose.check(plan.collective)
    if plan.check_replicas is not None and plan.check_replicas < 0:
        raise UsageError(
            f"check_replicas is {plan.check_replicas}; it must be a number of steps, or 0 for no checks"
        )
    if plan.events not in POLICIES:
        allowed = f"{', '.join(POLICIES[:-1])} or {POLICIES[-1]}"
        raise UsageError(f"events is {plan.events!r}; it must be {allowed}")
    if plan.world == "simulate":
        if plan.collective in ("shared", "hierarchical"):
            raise UsageError(
                f"{plan.collective} needs workers that share a host; simulated ones have one each"
            )
        return
    if (count := plan.local_workers + (plan.servers or 0)) > MOST:
        raise UsageError(f"{count} processes are more than {MOST}; use fewer, or simulate them")
    if plan.restarts < 0:
        raise UsageError(f"restarts is {plan.restarts}; it must be 0 or more")
    if not 0 < plan.timeout < float("inf"):
        raise UsageError(f"timeout is {plan.timeout}; it must be a number of seconds above 0")
    if plan.listen != "unix:" and not is_tcp(plan.listen):
        where = plan.listen.removeprefix("tcp:")
        raise UsageError(f"cannot listen at {where}; give HOST:PORT, with port 0 for any")
    if plan.listen != "unix:":
        check_encryption()


def check_encryption() -> None:
    """Raises UsageError if nodes cannot encrypt what they send over TCP."""
    if why := no_encryption():
        raise UsageError(f"TCP between nodes is encrypted, and that needs {why}")


def check_threads(threads: int) -> None:
    if threads < 0:
        raise UsageError(f"threads is {threads}; there must be 1 or more, or 0 to share out the cores")


def is_tcp(address: str) -> bool:
    port = re.fullmatch(r"tcp:(?:\[.*\]|[^:]*):(\d{1,5})", address)
    return port is not None and int(port[1]) < 1 << 16


def with_cluster(plan: Plan) -> tuple[Plan, Cluster]:
    """The plan with the sites of its cluster file, and the cluster."""
    cluster = Cluster.uniform() if plan.cluster is None else Cluster.load(plan.cluster)
    if plan.world == "simulate":
        # Raises if nodes cannot be placed.
        cluster.cost_model(plan.workers, plan.servers or 0, plan.seed, plan.colocated)
        return replace(plan, sites=cluster.ranks_by_site(plan.workers)), cluster
    servers_at = None if plan.colocated else cluster.servers.site
    return replace(plan, sites=cluster.ranks_by_site(plan.workers), servers_at=servers_at), cluster


def check_hosts(plan: Plan) -> None:
    """Checks what a run over TCP, and one on several hosts, needs."""
    away = plan.workers - plan.local_workers
    if not away:
        if plan.collective in ("shared", "hierarchical") and plan.listen != "unix:":
            raise UsageError(
                f"{plan.collective} needs shared memory, and over TCP there is none; use ring or direct"
            )
        return
    if not 0 <= plan.local_workers <= plan.workers:
        raise UsageError(
            f"here is {plan.here}; it must be between 0 and the number of workers, {plan.workers}"
        )
    if plan.listen == "unix:":
        raise UsageError(
            f"{away} of {plan.workers} workers run on other hosts; say with --listen HOST:PORT where "
            "they reach this one, and with --key FILE which key they need"
        )
    host = plan.listen.removeprefix("tcp:").rpartition(":")[0]
    if host in ("", "0.0.0.0", "[::]"):
        raise UsageError(
            f"{host or 'no host'} tells other hosts nothing; give --listen the address by which they reach "
            "this one"
        )
    if plan.key is None:
        raise UsageError(
            f"{away} of {plan.workers} workers run on other hosts, and need the run's key; give "
            "--key FILE (made if it does not exist) and copy the file to them"
        )
    if plan.colocated:
        raise UsageError("servers run on this host only, not beside workers of others; give a number of them")
    if plan.collective == "shared":
        raise UsageError("shared needs all workers on one host; use hierarchical, ring or direct")


def with_strategy(plan: Plan, strategy: ResolvedStrategy) -> Plan:
    """The plan with its strategy in full, and the servers that it needs."""
    servers = plan.servers or int(strategy.traits.uses_servers)
    return replace(plan, strategy=strategy.text, classes=strategy.classes, servers=servers)


def for_prediction(strategy: ResolvedStrategy) -> ResolvedStrategy:
    """The strategy where nothing is trained: workers with whole models can do without each other."""
    whole = strategy.traits.model_size == 1
    return replace(strategy, traits=replace(strategy.traits, survives_loss=whole))


def resolve(plan: Plan, program: Program) -> ResolvedStrategy | None:
    """The plan's strategy, checked, if this process knows it; None if another process has to check it.

    For real runs modules and plug-ins are imported by the fork server, because they may import torch, which
    the launcher must not. Names that the script defines are known to the nodes that run it.
    """
    simulated = plan.world == "simulate"
    extensions.search(program.folder)
    extensions.check_modules(plan.imports)
    if simulated:
        extensions.import_modules(plan.imports)
    if plan.strategy is None:
        return None
    unknown = unknown_names(plan.strategy)
    if simulated:
        for kind, name in unknown:
            extensions.load_plugin(kind, name)
        unknown = unknown_names(plan.strategy)

    def is_known_later(kind: str, name: str) -> bool:
        imported = bool(plan.imports) or name in extensions.plugins(kind)
        return (imported and not simulated) or program.contains(name)

    for kind, name in unknown:
        if not is_known_later(kind, name):
            with hinted():
                refuse_unknown(plan.strategy, kind, name)
    if unknown:
        check_known(plan.strategy)
        return None
    return check_strategy(plan, planned(plan))
