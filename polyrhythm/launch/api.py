"""`run`, `join` and `simulate`: a run from Python, a notebook or the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import Interrupted, PolyrhythmError, UsageError
from polyrhythm.core.events import EventPolicy
from polyrhythm.core.plan import Plan
from polyrhythm.core.strategy import Strategy
from polyrhythm.launch import planning
from polyrhythm.launch.console import Console, LineStream, format_metrics
from polyrhythm.launch.planning import MOST, Servers
from polyrhythm.launch.program import Program
from polyrhythm.launch.quick_imports import import_torch
from polyrhythm.record.folder import RunFolder, name_run
from polyrhythm.record.memory import RunMemory
from polyrhythm.record.result import RunResult, kept
from polyrhythm.worlds.cluster import ASSUMED

if TYPE_CHECKING:
    from polyrhythm.coordination.coordinator import Coordinator


def run(
    program: str | Path | Callable[[], Any],
    *,
    workers: int = 2,
    strategy: str | Strategy | None = None,
    servers: Servers | None = None,
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
    check_replicas: int | None = None,
    balance: bool = False,
    cluster: str | Path | None = None,
    imports: Sequence[str] = (),
    runs: str | Path | None = "runs",
    name: str | None = None,
    events: EventPolicy = "all",
    console: Console | None = None,
) -> RunResult:
    """Trains a script, or a function, on real processes; returns the summary, the metrics and the model.

    `strategy` and `batch_norm` win over those of the script. `servers` is for strategies that use servers (1
    by default); "colocated" puts one beside each worker. Up to `restarts` workers that die are replaced, if
    the strategy lets the others continue. `collective` forces one way to all-reduce. `batch_norm` is the
    policy for BatchNorm's statistics: rank0, mean, sync, recompute or local. Where workers step together,
    replicas and hyper-parameters are compared after the first step, every `check_replicas` steps (100) and
    at the end; 0 is never. With `balance` fast workers get larger batches and slow ones smaller, as many
    examples together. `imports` names modules that define strategies or codecs.

    With `here`, only so many workers run on this host, and the run waits until other hosts have joined with
    the rest: `listen` is the address for them ("tcp:10.0.0.1:7000"), and `key` the key file that they need a
    copy of, made if it does not exist. `cluster` is a file that says which workers are at which site, for
    strategies of two levels.

    `runs` is the parent of the run folder; None keeps nothing. `events` says which events are recorded there:
    "all", "sample" (one in a hundred of the frequent kinds) or "off". If the folder cannot be written,
    training goes on, and `parameters` in the summary is the path of the final parameters. Raises
    `PolyrhythmError` if the run fails, and KeyboardInterrupt after Ctrl-C or SIGTERM; the folder then has the
    summary and the model so far.
    """
    what = Program(program, arguments)
    text, classes = planning.named(strategy)
    plan = Plan(
        strategy=text, classes=classes, workers=workers, servers=planning.counted(servers, workers),
        colocated=servers == "colocated", batch_norm=batch_norm, seed=seed, threads=threads, timeout=timeout,
        listen=listen, here=here, key=None if key is None else str(key), restarts=restarts,
        collective=collective, cluster=None if cluster is None else str(cluster), imports=tuple(imports),
        check_replicas=check_replicas, balance=balance, events=events, world="run", program=what.name,
        arguments=tuple(what.arguments),
    )  # fmt: skip
    return run_plan(what, plan, Output(runs, name, console))


def simulate(
    program: str | Path | Callable[[], Any],
    *,
    workers: int = 2,
    strategy: str | Strategy | None = None,
    servers: Servers | None = None,
    batch_norm: str | None = None,
    cluster: str | Path | None = None,
    collective: str = "auto",
    check_replicas: int | None = None,
    balance: bool = False,
    arguments: Sequence[str] = (),
    seed: int = 0,
    threads: int = 0,
    imports: Sequence[str] = (),
    runs: str | Path | None = None,
    name: str | None = None,
    events: EventPolicy = "all",
    console: Console | None = None,
) -> RunResult:
    """Trains a script, or a function, on virtual workers in this process; returns what `run` does.

    Gradients are real, time is virtual: `cluster` is a file that describes the speed of hosts and links;
    without one all hosts are equal and the network is free. The same seed gives the same result, bit for bit.
    `collective` is direct by default; with "ring" every message of the ring is simulated.
    """
    what = Program(program, arguments)
    text, classes = planning.named(strategy)
    plan = Plan(
        strategy=text, classes=classes, workers=workers, servers=planning.counted(servers, workers),
        colocated=servers == "colocated", batch_norm=batch_norm, seed=seed, threads=threads,
        collective=collective, cluster=None if cluster is None else str(cluster), imports=tuple(imports),
        check_replicas=check_replicas, balance=balance, events=events, world="simulate", program=what.name,
        arguments=tuple(what.arguments),
    )  # fmt: skip
    return simulate_plan(what, plan, Output(runs, name, console))


def join(
    address: str,
    program: str | Path | Callable[[], Any],
    *,
    workers: int = 1,
    key: str | Path,
    arguments: Sequence[str] = (),
    threads: int = 0,
    site: str = "",
    console: Console | None = None,
) -> None:
    """Brings workers of this host into a run that another host has begun; returns when the run is over.

    `address` is where the run listens, such as "10.0.0.1:7000"; `program` is the same program as there, by
    this host's own path; `key` is a copy of the run's key file; `site` is the site of this host, if the run
    has several. The plan, with its strategy and imports, is the run's. Raises `PolyrhythmError` if the run
    fails.
    """
    from polyrhythm.launch import key as keys
    from polyrhythm.launch.joiner import Joiner
    from polyrhythm.launch.signals import interruptible

    where = address.removeprefix("tcp:")
    if not planning.is_tcp(f"tcp:{where}") or where.endswith(":0"):
        raise UsageError(f"{where} is no address of a run; give HOST:PORT, as it was given to --listen")
    what = Program(program, arguments)
    if not 1 <= workers <= MOST:
        raise UsageError(f"workers is {workers}; this host can bring 1 to {MOST}")
    planning.check_threads(threads)
    planning.check_encryption()
    secret = keys.read(Path(key))
    try:
        with interruptible():
            joiner = Joiner(
                what, f"tcp:{where}", workers=workers, key=secret, threads=threads, site=site, console=console
            )
            over = joiner.run()
    except Interrupted:
        raise KeyboardInterrupt from None
    if over.exit_code:
        interrupted = over.exit_code == Interrupted.exit_code
        error = PolyrhythmError(f"the run at {where} was interrupted" if interrupted else over.message)
        error.exit_code = over.exit_code
        raise error


@dataclass(frozen=True)
class Output:
    """Where a run writes: the parent and the name of its folder, and the console."""

    runs: str | Path | None = None  # None: no folder
    name: str | None = None  # None: the date and the strategy
    console: Console | None = None

    def record(self, plan: Plan) -> RunFolder | RunMemory:
        """Makes the run folder, or keeps the result in memory."""
        if self.name is not None and Path(self.name).name != self.name:
            raise UsageError(f"{self.name!r} cannot be the name of a run; it must be a plain folder name")
        if self.runs is None:
            return RunMemory()
        say = (self.console or Console(quiet=True)).line
        name = self.name or name_run(plan.strategy or "script")
        made = RunFolder(Path(self.runs), name, plan.events, say)
        if self.name is not None and made.path.name != name:
            say(f"{Path(self.runs) / name} exists already: this run is in {made.path}")
        return made


def run_plan(program: Program, plan: Plan, output: Output) -> RunResult:
    """Executes a plan on real processes; see `run`."""
    from polyrhythm.launch import key as keys
    from polyrhythm.launch.launcher import Launcher
    from polyrhythm.launch.signals import interruptible

    planning.check_plan(plan)
    plan, _ = planning.with_cluster(plan)
    strategy = planning.resolve(plan, program)
    planning.check_hosts(plan)
    secret = None if plan.key is None else keys.make(Path(plan.key))
    if strategy is not None:
        strategy = strategy if plan.predicts_with is None else planning.for_prediction(strategy)
        plan = planning.with_strategy(plan, strategy)
    record = output.record(plan)
    try:
        _write_plan(record, plan)
        with interruptible():
            try:
                launcher = Launcher(program, plan, strategy, secret, record, output.console)
            except UsageError:
                record.discard()
                raise
            coordinator = launcher.run()
        return _finish(coordinator, record)
    except Interrupted:
        raise KeyboardInterrupt from None
    finally:
        record.close()


def predict_plan(program: Program, plan: Plan, output: Output) -> RunResult:
    """Predicts with a saved model on real processes; nothing is recorded."""
    if plan.predictions is not None and not Path(plan.predictions).parent.is_dir():
        raise UsageError(f"cannot write {plan.predictions}: there is no such folder; make it first")
    return run_plan(program, plan, output)


def simulate_plan(program: Program, plan: Plan, output: Output) -> RunResult:
    """Executes a plan in simulation; see `simulate`."""
    from polyrhythm.launch.nodes import threads_each
    from polyrhythm.launch.signals import stoppable

    planning.check_plan(plan)
    # As many as a worker has on real processes, because the bits of a sum depend on it. Before torch is
    # imported: that changes the number.
    threads = plan.threads or threads_each(0, plan.workers)
    import_torch()
    plan, cluster = planning.with_cluster(plan)
    strategy = planning.resolve(plan, program)
    if strategy is not None:
        plan = planning.with_strategy(plan, strategy)
    import torch

    from polyrhythm.worlds.simulated import Simulated

    console = output.console or Console(quiet=True)
    record = output.record(plan)
    before = torch.get_num_threads()
    try:
        _write_plan(record, plan)
        torch.set_num_threads(threads)
        world = Simulated(
            program.load(plan.imports), plan, cluster, strategy, record, console.line, program.places
        )
        world.loop.on_progress = lambda: console.progress(_progress(world.coordinator, world.loop.now))
        with stoppable(world.coordinator.stop, console.line), _prefixed(console, record):
            coordinator = world.run()
        if plan.cluster is None and output.console is not None and coordinator.failure is None:
            console.line(ASSUMED)
        return _finish(coordinator, record)
    finally:
        torch.set_num_threads(before)
        console.close()
        record.close()


def _finish(coordinator: Coordinator, record: RunFolder | RunMemory) -> RunResult:
    """Records what the script has chosen; returns the result or raises the run's failure."""
    if coordinator.strategy is not None:
        _write_plan(record, coordinator.plan)
    summary, failure = coordinator.summary(), coordinator.ending.outcome
    if failure is None:
        return record.result(summary)
    error: BaseException = KeyboardInterrupt(failure.message)
    if failure.exit_code != Interrupted.exit_code:
        error = (
            UsageError(failure.message)
            if failure.exit_code == UsageError.exit_code
            else PolyrhythmError(failure.message)
        )
        error.exit_code = failure.exit_code
    if record.lasting and summary["steps"]:
        error.add_note(kept(summary))
    raise error


def _write_plan(record: RunFolder | RunMemory, plan: Plan) -> None:
    from polyrhythm import __version__

    record.config({"polyrhythm": __version__, **plan.to_json()})


@contextlib.contextmanager
def _prefixed(console: Console, record: RunFolder | RunMemory) -> Iterator[None]:
    """Shows what virtual workers print as that of processes: line by line, with the worker's name."""
    from polyrhythm.session.context import world_context

    def write(show: Callable[[str], None], text: str) -> None:
        here = world_context.get()
        show(f"[{here.me}] {text}" if here else text)
        if here:
            record.output(str(here.me), text)

    streams = [LineStream(partial(write, show)) for show in (console.print, console.line)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield


def _progress(coordinator: Coordinator, now: float) -> str:
    tally = coordinator.tally
    steps, samples = tally.progress()
    parts = [str(coordinator.strategy), f"{now:.2f} simulated s", *format_metrics(tally.metrics.reduced())]
    return "  ".join([*parts, f"{samples:,} samples", f"step {steps:,}"])
