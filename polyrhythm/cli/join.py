"""`polyrhythm join`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from polyrhythm.cli.training import Commands


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "join",
        help="add workers on this machine to a run on another",
        description="Runs workers for a run that `polyrhythm run --here` has started on another machine. "
        "The script is started by its path on this machine, with the arguments given here; strategy, seed, "
        "timeout and the modules of --import come from the run, and the run folder is on the other machine. "
        "A worker that dies is replaced here, if the run has --restarts; if this machine fails, its workers "
        "are not replaced.",
        epilog="Arguments for the script follow --. Exit code: that of the run, 2 if it could not be joined.",
    )
    command.add_argument("address", metavar="HOST:PORT", help="the address at which the run listens")
    command.add_argument("script", help="the training script, on this machine")
    command.add_argument(
        "-n", "--workers", type=int, default=1, metavar="N", help="how many of the workers run here (1)"
    )
    command.add_argument("--key", required=True, metavar="FILE", help="a copy of the run's key (chmod 600)")
    command.add_argument(
        "--threads", type=int, default=0, metavar="T",
        help="torch threads per worker (OMP_NUM_THREADS, or cores / workers)",
    )  # fmt: skip
    command.add_argument(
        "--site", default="", metavar="NAME",
        help="the site of this machine in the --cluster file of the run, if workers of several are missing",
    )  # fmt: skip
    command.set_defaults(execute=execute)


def execute(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from polyrhythm.launch.api import join
    from polyrhythm.launch.console import Console

    join(
        options.address, options.script, workers=options.workers, key=options.key, arguments=rest,
        threads=options.threads, site=options.site, console=Console(sys.stderr),
    )  # fmt: skip
    print(f"trained; the result is on the machine of the run, {options.address}")
    return 0
