"""`polyrhythm run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from polyrhythm.cli.training import Commands, add_options, planned, train


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "run",
        help="train a script on real processes, on this machine and on others that join",
        description="Trains a script on real processes: workers, and servers if the strategy uses them. With "
        "--here, some of the workers run on other machines, started there by `polyrhythm join`; servers and "
        "the run folder are on this one.",
        epilog="Arguments for the script follow --. Exit code: 0 trained, 1 failed, 2 wrong use, 130 "
        "interrupted.",
    )
    add_options(command)
    command.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S",
        help="longest wait for a peer, and for other machines to join (1800 s)",
    )  # fmt: skip
    command.add_argument(
        "--restarts", type=int, default=0, metavar="R",
        help="replace up to R workers whose processes die, if the strategy lets the others continue without "
        "them (0); an exception in the script still ends the run",
    )  # fmt: skip
    command.add_argument(
        "--listen", default=None, metavar="HOST:PORT",
        help="connect nodes over encrypted TCP instead of shared memory; the coordinator listens at this "
        "address (port 0: any), where other machines join",
    )  # fmt: skip
    command.add_argument(
        "--here", type=int, default=None, metavar="N",
        help="how many of the workers run on this machine (all); the run waits until other machines have "
        "joined with the rest. Machines communicate over TCP, and over shared memory inside each",
    )  # fmt: skip
    command.add_argument(
        "--cluster", metavar="FILE",
        help="the site of each worker (TOML): for a strategy of two levels, such as allreduce / diloco:50, "
        "and to count the bytes between sites",
    )  # fmt: skip
    command.add_argument(
        "--key", metavar="FILE",
        help="the run's key, which other machines need to join; created if it does not exist, readable only "
        "by you",
    )  # fmt: skip
    command.set_defaults(execute=execute)


def execute(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from dataclasses import replace  # slow to import, and not needed for `--help`

    from polyrhythm.launch.api import run_plan

    program, plan = planned(options, rest)
    listen = f"tcp:{options.listen}" if options.listen else "unix:"
    plan = replace(
        plan, timeout=options.timeout, restarts=options.restarts, listen=listen, here=options.here,
        key=options.key,
    )  # fmt: skip
    return train(run_plan, program, plan, options)
