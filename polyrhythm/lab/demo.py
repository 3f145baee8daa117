"""`make demo`: runs the digits example on four real workers with every strategy, and prints one table."""

from __future__ import annotations

import argparse
import sys

from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.core.registry import describe
from polyrhythm.launch import run
from polyrhythm.launch.console import HEAD, Console, row, table


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("script", nargs="?", default="examples/digits.py")
    options.add_argument("-n", "--workers", type=int, default=4)
    options.add_argument("--runs", default="runs")
    options.add_argument(
        "arguments", nargs="*", default=["--epochs", "30"], help="arguments of the script, after --"
    )
    given = options.parse_args()
    rows = []
    names = [each.name for each in describe("strategy")]
    print(f"{given.script} on {given.workers} workers with {', '.join(names)}", flush=True)
    try:
        for name in names:
            print(f"\n{name}", flush=True)
            summary = run(
                given.script, arguments=given.arguments, workers=given.workers, strategy=name,
                runs=given.runs, console=Console(sys.stdout),
            )  # fmt: skip
            print(f"done: {summary['folder']}", flush=True)
            rows.append(row(summary))
    except KeyboardInterrupt:
        print("polyrhythm: interrupted", file=sys.stderr)
        return 130
    except PolyrhythmError as error:
        print(f"polyrhythm: {error}", file=sys.stderr)
        return error.exit_code
    print("\n" + table(HEAD, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
