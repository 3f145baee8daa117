"""Options, plan and report of `run` and `simulate`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyrhythm.cli.output import stdout_to_stderr
from polyrhythm.collectives.choose import ALGORITHMS

if TYPE_CHECKING:
    from polyrhythm.core.plan import Plan
    from polyrhythm.launch.api import Output
    from polyrhythm.launch.program import Program
    from polyrhythm.record.result import RunResult

Commands = Any  # argparse's subparsers have no public type
Execute = Callable[["Program", "Plan", "Output"], "RunResult"]


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("script", help="the training script")
    command.add_argument("-n", "--workers", type=int, default=2, metavar="N", help="how many workers (2)")
    command.add_argument(
        "-s", "--strategy", metavar="S",
        help="the synchronization strategy, such as allreduce, async or local:8, or one inside sites and one "
        "between them: 'allreduce / diloco:50'; overrides the one in the script (allreduce)",
    )  # fmt: skip
    add_import(command)
    command.add_argument(
        "--batch-norm", metavar="B",
        help="BatchNorm's statistics: rank0 (those of worker 0), mean, sync, recompute or local; "
        "overrides the one in the script",
    )  # fmt: skip
    command.add_argument(
        "--servers", type=_servers, metavar="P",
        help="parameter servers, if the strategy uses them (1); colocated: one on the host of each worker",
    )  # fmt: skip
    command.add_argument(
        "--collective", default="auto", metavar="C",
        help="how workers all-reduce: " + "; ".join(f"{name}, {text}" for name, text in ALGORITHMS.items()),
    )  # fmt: skip
    command.add_argument(
        "--check-replicas", type=int, metavar="N",
        help="where workers step together, compare replicas and hyper-parameters after the first step, "
        "every N steps and at the end, and name the first difference; 0: never (100)",
    )  # fmt: skip
    command.add_argument(
        "--balance", action="store_true",
        help="where workers step together, measure their speeds and give fast ones larger batches, with as "
        "many examples per step as without",
    )  # fmt: skip
    command.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of simulated time and, for scripts that do not seed, of model and data order (0)",
    )
    command.add_argument(
        "--threads", type=int, default=0, metavar="T",
        help="torch threads per worker (OMP_NUM_THREADS, or cores / workers)",
    )  # fmt: skip
    command.add_argument("--runs", default="runs", metavar="DIR", help="where run folders go (%(default)s)")
    command.add_argument("--name", help="name of the run folder (date and strategy)")
    command.add_argument(
        "--events", default="all", metavar="E",
        help="which events the run folder records: all; sample, one in 100 of those that occur in every "
        "step; or off (%(default)s). `polyrhythm events` prints them",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    command.add_argument("-q", "--quiet", action="store_true", help="no progress")


def add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="a module that defines strategies or codecs, beside the script, in this folder or on "
        "PYTHONPATH; may be repeated. Those defined in the script need no --import",
    )  # fmt: skip


def _servers(text: str) -> int | str:
    """A number, or a word that the launcher checks."""
    try:
        return int(text)
    except ValueError:
        return text


def planned(options: argparse.Namespace, rest: Sequence[str]) -> tuple[Program, Plan]:
    """The program and the plan that the common options describe."""
    from polyrhythm.core.plan import Plan
    from polyrhythm.launch.planning import counted
    from polyrhythm.launch.program import Program

    program = Program(options.script, rest)
    plan = Plan(
        strategy=options.strategy, workers=options.workers,
        servers=counted(options.servers, options.workers), colocated=options.servers == "colocated",
        imports=tuple(options.imports), batch_norm=options.batch_norm, collective=options.collective,
        check_replicas=options.check_replicas, balance=options.balance,
        seed=options.seed, threads=options.threads, cluster=options.cluster, world=options.command,
        events=options.events, program=program.name, arguments=tuple(rest),
    )  # fmt: skip
    return program, plan


def train(execute: Execute, program: Program, plan: Plan, options: argparse.Namespace) -> int:
    """Executes a plan and prints the report."""
    from polyrhythm.launch.api import Output
    from polyrhythm.launch.console import Console

    console = Console(sys.stderr, options.quiet, sys.stderr if options.json else sys.stdout)
    output = Output(options.runs, options.name, console)
    with stdout_to_stderr() if options.json else contextlib.nullcontext():
        summary = execute(program, plan, output).summary
    if options.json:
        print(json.dumps(summary))
    else:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the script's
            _report(summary, simulated=plan.world == "simulate")
    return 0


def _report(summary: dict[str, Any], simulated: bool) -> None:
    from polyrhythm.launch.console import HEAD, PLACES_HEAD, SIMULATED_HEAD, place_rows, row, size, table

    print(table(SIMULATED_HEAD if simulated else HEAD, [row(summary)]))
    if places := place_rows(summary):
        print(f"\n{table(PLACES_HEAD, places)}\n")
    others = {name: value for name, value in summary["metrics"].items() if name != "accuracy"}
    if others:
        print("metrics: " + "  ".join(f"{name} {value}" for name, value in others.items()))
    if summary.get("bytes_between_sites"):
        print(f"between sites: {size(summary['bytes_between_sites'])}")
    if summary["dropped"]:
        print(f"dropped: {summary['dropped']:,} updates that arrived too late")
    if "lost_updates" in summary:
        counted, lost, share = (summary["lost_updates"][key] for key in ("counted", "lost", "share"))
        print(f"lost updates: {lost:,} of {counted:,} counted ({share:.2g})")
    if summary["samples_left_out"]:
        print(f"left out: {summary['samples_left_out']:,} examples of epochs in which their workers died")
    for node, reason in summary["lost"].items():
        times = summary["replaced"].get(node, 0)
        then = f"replaced {times} times" if times > 1 else "replaced" if times else "the others continued"
        print(f"lost: {node} {reason}; {then}")
    if "folder" in summary:
        print(f"folder: {summary['folder']}")
    if "parameters" in summary:
        print(f"parameters: {summary['parameters']}, because the run folder could not be written")
