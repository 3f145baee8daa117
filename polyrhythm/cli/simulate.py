"""`polyrhythm simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from polyrhythm.cli.training import Commands, add_options, planned, train


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "simulate",
        help="train a script on virtual workers in one process",
        description="Trains a script on virtual workers: gradients are real, time is virtual, and the result "
        "is the same bit for bit every time.",
        epilog="Arguments for the script follow --. Exit code: 0 trained, 1 failed, 2 wrong use, 130 "
        "interrupted.",
    )
    add_options(command)
    command.add_argument(
        "--cluster", metavar="FILE",
        help="hosts, links and sites and their speeds (TOML; without it: equal hosts, free network)",
    )  # fmt: skip
    command.set_defaults(execute=execute)


def execute(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from polyrhythm.launch.api import simulate_plan

    program, plan = planned(options, rest)
    return train(simulate_plan, program, plan, options)
