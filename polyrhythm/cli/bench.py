"""`polyrhythm bench`."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from polyrhythm.cli.output import stdout_to_stderr
from polyrhythm.cli.training import Commands


def add(commands: Commands) -> None:
    kinds = commands.add_parser("bench", help="measure this machine").add_subparsers(
        dest="bench", metavar="WHAT", required=True
    )
    servers = kinds.add_parser(
        "servers",
        help="measure how many parameter servers a number of workers needs",
        description="Measures push and pull for every number of workers and servers, with real processes and "
        "the strategy async, and compares the knee with the formula P* = ceil(N |w| / (beta t)).",
        epilog="A worker sleeps for the time of a step, as if it computed on a machine of its own.",
    )

    def option(name: str, default: Any, metavar: str, text: str, kind: type = str) -> None:
        servers.add_argument(name, default=default, metavar=metavar, help=text, type=kind)

    option("--size", "16MiB", "SIZE", "of the parameters: B, kB, MB, GB, KiB, MiB or GiB (16MiB)")
    option("--workers", "1,2,4", "N,...", "numbers of workers (1,2,4)")
    option("--servers", "1,2,4", "P,...", "numbers of servers (1,2,4)")
    option("--step-time", "50ms", "T", "sleep of a worker between two pushes (50ms)")
    option("--seconds", 2.0, "S", "duration of each measurement (2)", float)
    servers.add_argument("--json", action="store_true", help="print the result as one JSON object")
    servers.set_defaults(execute=bench_servers)


def bench_servers(options: argparse.Namespace, _: Sequence[str]) -> int:
    from polyrhythm.lab import servers

    sweep = servers.ServerSweep.parse(
        options.size, options.workers, options.servers, options.step_time, options.seconds
    )
    with stdout_to_stderr() if options.json else contextlib.nullcontext():
        report = servers.measure(sweep, servers.say)
    print(json.dumps(report) if options.json else servers.show(report))
    return 0
