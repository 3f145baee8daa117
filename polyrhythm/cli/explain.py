"""`polyrhythm explain`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from polyrhythm.cli.training import Commands


def add(commands: Commands) -> None:
    kinds = commands.add_parser("explain", help="show an algorithm step by step").add_subparsers(
        dest="explain", metavar="WHAT", required=True
    )
    ring = kinds.add_parser(
        "ring",
        help="ring all-reduce: who sends which chunk to whom, and what every worker holds",
        description="Draws ring all-reduce step by step, from a run of its real code on simulated workers.",
    )
    ring.add_argument("-n", "--workers", type=int, default=4, metavar="N", help="2 to 16 (4)")
    ring.add_argument(
        "--length", type=int, default=None, metavar="L", help="length of the vector (one element per worker)"
    )
    ring.add_argument("--json", action="store_true", help="print everything as one JSON object")
    ring.set_defaults(execute=explain_ring)


def explain_ring(options: argparse.Namespace, _: Sequence[str]) -> int:
    from polyrhythm.lab import explain

    what = explain.ring(options.workers, options.length)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(json.dumps(what.plain()) if options.json else explain.draw(what, color))
    return 0
