"""`run`, `join` and `simulate`: a run from Python, a notebook or the command line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyrhythm.collectives import choose as choice
from polyrhythm.core.errors import Interrupted, PolyrhythmError, UsageError
from polyrhythm.core.plan import Plan
from polyrhythm.core.registry import parse
from polyrhythm.core.strategy import Strategy
from polyrhythm.launch.program import Program
from polyrhythm.launch.screen import Screen, Spoken, shown
from polyrhythm.record.folder import RunFolder, name_run
from polyrhythm.session import batch_norm as norms

if TYPE_CHECKING:
    from polyrhythm.coordination.coordinator import Coordinator

Summary = dict[str, Any]
Servers = int | Literal["colocated"]  # colocated: one beside each worker
MOST = 1024  # processes that one host is asked to run


def run(
    program: str | Path | Callable[[], Any],
    *,
    workers: int = 2,
    strategy: str | Strategy | None = None,
    servers: Servers = 0,
    batch_norm: str | None = None,
    arguments: Sequence[str] = (),
    seed: int = 0,
    threads: int = 0,
    timeout: float = 1800.0,
    listen: str = "unix:",
    here: int | None = None,
    key: str | Path | None = None,
    restarts: int = 0,
    collective: str = "auto",
    cluster: str | Path | None = None,
    runs: str | Path | None = "runs",
    name: str | None = None,
    screen: Screen | None = None,
) -> Summary:
    """Trains a script, or a function, on real processes; returns the summary.

    `strategy` wins over the one in the script. `servers` is for strategies that have them (1 if not given);
    "colocated" is one beside each worker. Up to `restarts` workers that die are replaced, if the strategy
    lets the others go on without them. `collective` forces one way to all-reduce. `batch_norm` says what
    becomes of BatchNorm's statistics: local, rank0, mean, sync or recompute; it too wins over the script's.
    If only `here` of the workers are to run on this host, the run waits until others have joined with the
    rest: `listen` is where ("tcp:10.0.0.1:7000"), `key` the file, made if need be, that they have a copy of.
    `cluster` is a file that says which workers are at which site, for strategies of two levels.
    `runs` is where the run folder goes; None keeps nothing. Raises `PolyrhythmError` if the run fails.
    """
    from polyrhythm.launch import key as keys
    from polyrhythm.launch.local import Launcher
    from polyrhythm.launch.nodes import polite
    from polyrhythm.worlds.cluster import Cluster

    what = Program(program, arguments)
    count = _count(servers, workers)
    chosen = _check(strategy, workers, count, seed, threads, batch_norm)
    here = workers if here is None else here
    if here + count > MOST:
        raise UsageError(f"{here + count} processes are more than {MOST}; use fewer, or simulate them")
    if restarts < 0:
        raise UsageError(f"restarts is {restarts}; it must be 0 or more")
    if not 0 < timeout < float("inf"):
        raise UsageError(f"timeout is {timeout}; it must be a number of seconds above 0")
    if listen != "unix:" and not _is_tcp(listen):
        where = listen.removeprefix("tcp:")
        raise UsageError(f"cannot listen at {where}; give HOST:PORT, with port 0 for any")
    choice.check(collective)
    model = Cluster.uniform() if cluster is None else Cluster.load(cluster)
    sites = model.places(workers)
    if chosen is not None:
        choice.check_codec(collective, chosen)
        chosen.check(Plan(chosen, workers, (count if servers else 0) or 1, sites))
    if chosen is not None and chosen.traits.one_host and (here != workers or listen != "unix:"):
        raise UsageError(
            f"{chosen} works on memory that all workers share, so they must be on one host: leave --here and "
            "--listen out, or use a strategy that sends, such as async"
        )
    if here != workers:
        _check_hosts(workers, here, servers, listen, key, collective)
    elif collective in ("shared", "hierarchical") and listen != "unix:":
        raise UsageError(f"{collective} needs shared memory, and over TCP there is none; use ring or direct")
    secret = None if key is None else (Path(key), keys.make(Path(key)))
    folder = _folder(runs, name, chosen)
    try:
        config = _config(
            "run", what, workers, servers, chosen, seed, batch_norm=batch_norm, threads=threads,
            timeout=timeout, restarts=restarts, collective=collective, here=here,
            cluster=None if cluster is None else str(cluster),
        )  # fmt: skip
        if folder is not None:
            folder.config(config)
        with polite():
            try:
                launcher = Launcher(
                    what, workers=workers, here=here, servers=count, strategy=chosen, seed=seed,
                    threads=threads, wait=timeout, listen=listen, key=secret, restarts=restarts,
                    collective=collective, folder=folder, screen=screen, batch_norm=batch_norm, sites=sites,
                    servers_at=None if servers == "colocated" else model.servers.site,
                )  # fmt: skip
            except UsageError:
                if folder is not None:
                    folder.discard()
                raise
            coordinator = launcher.run()
        _settled(folder, config, coordinator)
        return _summary(coordinator)
    except Interrupted:
        raise KeyboardInterrupt from None
    finally:
        _close(folder)


def join(
    address: str,
    program: str | Path | Callable[[], Any],
    *,
    workers: int = 1,
    key: str | Path,
    arguments: Sequence[str] = (),
    threads: int = 0,
    site: str = "",
    screen: Screen | None = None,
) -> None:
    """Brings workers on this host into a run that another host has begun, and returns when that is over.

    `address` is where the run listens, such as "10.0.0.1:7000"; `program` is the same program as there, by
    this host's own path; `key` is a copy of the run's key file; `site` says at which of the run's sites this
    host is, if it has several. Raises `PolyrhythmError` if the run fails.
    """
    from polyrhythm.launch import key as keys
    from polyrhythm.launch.joiner import Joiner
    from polyrhythm.launch.nodes import polite

    where = address.removeprefix("tcp:")
    if not _is_tcp(f"tcp:{where}") or where.endswith(":0"):
        raise UsageError(f"{where} is no address of a run; give HOST:PORT, as it was given to --listen")
    what = Program(program, arguments)
    if not 1 <= workers <= MOST:
        raise UsageError(f"workers is {workers}; this host can bring 1 to {MOST}")
    if threads < 0:
        raise UsageError(f"threads is {threads}; there must be 1 or more, or 0 to share out the cores")
    secret = keys.read(Path(key))
    try:
        with polite():
            launcher = Joiner(
                what, f"tcp:{where}", workers=workers, key=secret, threads=threads, site=site, screen=screen
            )
            over = launcher.run()
    except Interrupted:
        raise KeyboardInterrupt from None
    if over.exit_code:
        interrupted = over.exit_code == Interrupted.exit_code
        error = PolyrhythmError(f"the run at {where} was interrupted" if interrupted else over.message)
        error.exit_code = over.exit_code
        raise error


def simulate(
    program: str | Path | Callable[[], Any],
    *,
    workers: int = 2,
    strategy: str | Strategy | None = None,
    servers: Servers = 0,
    batch_norm: str | None = None,
    cluster: str | Path | None = None,
    collective: str = "auto",
    arguments: Sequence[str] = (),
    seed: int = 0,
    threads: int = 0,
    runs: str | Path | None = None,
    name: str | None = None,
    screen: Screen | None = None,
) -> Summary:
    """Trains a script, or a function, on virtual workers in this process; returns the summary.

    Gradients are real, time is virtual: `cluster` is a file that says how fast hosts and links are; without
    one all hosts are equal and the network is free. The same seed gives the same result, bit for bit.
    `collective` is direct, unless "ring" is asked for: then every message of the ring is simulated.
    """
    what = Program(program, arguments)
    count, colocated = _count(servers, workers), servers == "colocated"
    chosen = _check(strategy, workers, count, seed, threads, batch_norm)
    choice.check(collective)
    if chosen is not None:
        choice.check_codec(collective, chosen)
    if collective in ("shared", "hierarchical"):
        raise UsageError(f"{collective} needs workers that share a host; simulated ones have one each")
    from polyrhythm.worlds.cluster import Cluster

    model = Cluster.uniform() if cluster is None else Cluster.load(Path(cluster))
    model.place(workers, count, seed, colocated)
    if chosen is not None:
        chosen.check(Plan(chosen, workers, count or 1, model.places(workers)))
    from polyrhythm.launch.nodes import threads_each

    each = threads or threads_each(0, workers)
    import torch

    from polyrhythm.worlds.simulated import Simulated

    screen = screen or Screen(quiet=True)
    folder = _folder(runs, name, chosen)
    before = torch.get_num_threads()
    try:
        config = _config(
            "simulate", what, workers, servers, chosen, seed, batch_norm=batch_norm, threads=threads,
            collective=collective, cluster=None if cluster is None else str(cluster),
        )  # fmt: skip
        if folder is not None:
            folder.config(config)
        # As many as a worker has on real processes: the bits of a sum depend on it.
        torch.set_num_threads(each)
        world = Simulated(
            what.load(), workers=workers, servers=count, colocated=colocated, strategy=chosen, cluster=model,
            seed=seed, collective=collective, folder=folder, say=screen.line, batch_norm=batch_norm,
        )  # fmt: skip
        world.loop.beat = lambda: screen.progress(_progress(world.coordinator, world.loop.now))
        with _spoken(screen):
            coordinator = world.run()
        _settled(folder, config, coordinator)
        return _summary(coordinator)
    finally:
        torch.set_num_threads(before)
        screen.close()
        _close(folder)


def _is_tcp(address: str) -> bool:
    port = re.fullmatch(r"tcp:(?:\[.*\]|[^:]*):(\d{1,5})", address)
    return port is not None and int(port[1]) < 1 << 16


def _check_hosts(
    workers: int, here: int, servers: Servers, listen: str, key: str | Path | None, collective: str
) -> None:
    """What a run on several hosts needs."""
    if not 0 <= here <= workers:
        raise UsageError(f"here is {here}; it must be between 0 and the number of workers, {workers}")
    if listen == "unix:":
        raise UsageError(
            f"{workers - here} of {workers} workers run on other hosts; say with --listen HOST:PORT where "
            "they reach this one, and with --key FILE which key they need"
        )
    host = listen.removeprefix("tcp:").rpartition(":")[0]
    if host in ("", "0.0.0.0", "[::]"):
        raise UsageError(
            f"{host or 'no host'} tells other hosts nothing; give --listen the address by which they reach "
            "this one"
        )
    if key is None:
        raise UsageError(
            f"{workers - here} of {workers} workers run on other hosts, and need the run's key; give "
            "--key FILE (made if it does not exist) and copy the file to them"
        )
    if servers == "colocated":
        raise UsageError("servers run on this host only, not beside workers of others; give a number of them")
    if collective == "shared":
        raise UsageError("shared needs all workers on one host; use hierarchical, ring or direct")


def _count(servers: Servers, workers: int) -> int:
    """How many servers that is; 0 if it is left to the strategy."""
    if servers == "colocated":
        return workers
    if not isinstance(servers, int):
        raise UsageError(f"servers is {servers!r}; it must be a whole number or the word colocated")
    return servers


def _check(
    strategy: str | Strategy | None,
    workers: int,
    servers: int,
    seed: int,
    threads: int,
    batch_norm: str | None = None,
) -> Strategy | None:
    """All that can be known to be wrong before anything starts."""
    if not isinstance(workers, int):
        raise UsageError(f"workers is {workers!r}; it must be a whole number")
    if workers < 1:
        raise UsageError(f"workers is {workers}; there must be 1 or more")
    if servers < 0:
        raise UsageError(f"servers is {servers}; there cannot be fewer than 0")
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"seed is {seed}; it must be between 0 and 2^63 - 1")
    if threads < 0:
        raise UsageError(f"threads is {threads}; there must be 1 or more, or 0 to share out the cores")
    chosen = strategy if strategy is None or isinstance(strategy, Strategy) else parse(strategy)
    if batch_norm is not None:
        norms.named(batch_norm)
    if chosen is not None:
        norms.check(batch_norm or norms.DEFAULT, chosen)
        if servers and not chosen.traits.uses_servers:
            raise UsageError(f"{chosen} needs no servers; leave --servers out")
    return chosen


def _folder(runs: str | Path | None, name: str | None, strategy: Strategy | None) -> RunFolder | None:
    if name is not None and Path(name).name != name:
        raise UsageError(f"{name!r} cannot be the name of a run; it must be a plain folder name")
    return None if runs is None else RunFolder(Path(runs), name or name_run(str(strategy or "script")))


def _config(
    world: str,
    program: Program,
    workers: int,
    servers: Servers,
    strategy: Strategy | None,
    seed: int,
    **more: Any,
) -> dict[str, Any]:
    from polyrhythm import __version__

    return {
        "polyrhythm": __version__, "world": world, "program": program.name, "arguments": program.arguments,
        "workers": workers, "servers": servers, "strategy": str(strategy) if strategy else None,
        "seed": seed, **more,
    }  # fmt: skip


def _close(folder: RunFolder | None) -> None:
    try:
        if folder is not None:
            folder.close()
    except OSError as error:
        raise PolyrhythmError(f"the run folder is not complete: {error.strerror}") from None


def _settled(folder: RunFolder | None, config: dict[str, Any], coordinator: Coordinator) -> None:
    """Records what is only known since the script has chosen it."""
    if folder is not None and coordinator.strategy is not None and coordinator.failure is None:
        servers = config["servers"] if config["servers"] == "colocated" else coordinator.servers
        settled = {"strategy": str(coordinator.strategy), "servers": servers}
        folder.config(config | settled | {"batch_norm": coordinator.batch_norm})


def _summary(coordinator: Coordinator) -> Summary:
    failure = coordinator.failure
    if failure is not None and failure.exit_code == Interrupted.exit_code:
        raise KeyboardInterrupt
    if failure is not None:
        kind = UsageError if failure.exit_code == UsageError.exit_code else PolyrhythmError
        error = kind(failure.message)
        error.exit_code = failure.exit_code
        raise error
    return coordinator.summary()


@contextlib.contextmanager
def _spoken(screen: Screen) -> Iterator[None]:
    """What virtual workers print is shown like what processes print: line by line, with who said it."""
    from polyrhythm.session.context import world_context

    def write(text: str) -> None:
        here = world_context.get()
        screen.line(f"[{here.me}] {text}" if here else text)

    with contextlib.redirect_stdout(Spoken(write)), contextlib.redirect_stderr(Spoken(write)):
        yield


def _progress(coordinator: Coordinator, now: float) -> str:
    steps, samples = coordinator.progress()
    parts = [str(coordinator.strategy), f"{now:.2f} virtual s", *shown(coordinator.metrics)]
    return "  ".join([*parts, f"{samples:,} samples", f"step {steps:,}"])
