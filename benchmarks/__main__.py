"""python -m benchmarks [NAME ...] [--quick] [--json FILE]
python -m benchmarks compare REV [--only NAME ...] [--rounds N] [--quick] [--json FILE]

Runs the benchmarks (all of them, or those named), prints a table for each and writes all figures as JSON.
It never fails because of a figure: machines are shared, so read the ratios and the CPU steal beside them.

`compare` measures the key figures (all-reduce, DDP, server round trip, simulator, start-up, memory) of
revision REV and of the work tree, in turn, and prints both columns: `python -m benchmarks compare --help`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.report import Steal, show

NAMES = (
    "allreduce", "branches", "checks", "churn", "codec_accuracy", "codecs", "collectives", "communication",
    "conversions", "cut", "events", "growth", "hogwild", "hybrid", "keras", "last_executor", "memory",
    "pipeline", "plan", "predict", "process_group", "replicate",
    "server", "simulator", "sites", "slow_link", "slow_network", "staleness", "startup", "straggler",
    "tensor", "toolarge", "wire_bytes",
)  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["compare"]:
        from benchmarks import compare

        return compare.main(sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s [-h] [--quick] [--json FILE] [NAME ...]\n       %(prog)s compare REV ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none is given"
    )
    parser.add_argument("--quick", action="store_true", help="smaller and less exact")
    parser.add_argument(
        "--json", type=Path, default=Path("runs/bench.json"), metavar="FILE", help="%(default)s"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f"there is no benchmark {unknown[0]}; there are {', '.join(NAMES)}")
    results: dict[str, Any] = {}
    failed = False
    for name in args.names or NAMES:
        benchmark = importlib.import_module(f"benchmarks.{name}")
        print(f"\n{name}: {(benchmark.__doc__ or '').partition(chr(10))[0]}", flush=True)
        began = time.monotonic()
        try:
            with Steal() as steal:
                rows, notes = benchmark.measure(quick=args.quick)
        except Exception:  # one that cannot run here should not cost the figures of the others
            traceback.print_exc()
            results[name], failed = {"error": traceback.format_exc()}, True
            continue
        seconds = time.monotonic() - began
        print(show(rows), *notes, f"{seconds:.0f} s, {steal}", sep="\n", flush=True)
        results[name] = {
            "rows": [row.plain() for row in rows], "notes": notes, "seconds": seconds, "steal": steal.share,
        }  # fmt: skip
    where = {
        "when": f"{datetime.now():%Y-%m-%d %H:%M}", "cores": os.cpu_count(), "machine": platform.platform(),
        "python": platform.python_version(), "quick": args.quick,
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**where, "benchmarks": results}, indent=2) + "\n")
    print(f"\nwritten to {args.json}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
