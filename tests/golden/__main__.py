"""Check the golden file of digests, or renew it: see docs/testing.md."""

from __future__ import annotations

import argparse
import sys

from tests.golden import checks
from tests.golden.cases import cases, chosen
from tests.golden.checks import Differences, Golden

RULE = "A changed digest is an error, or a fix that CHANGELOG.md names: only then `make golden-renew`."


def main(words: list[str] | None = None) -> int:
    """The exit status: 1 if a case differs from the golden file, or if that could not be renewed."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="run the cases and say which differ from the golden file")
    renew = commands.add_parser("renew", help="run the cases, rewrite the golden file and say what changed")
    for each in (check, renew):
        each.add_argument(
            "--only", metavar="PATTERN", default="",
            help="cases whose names match this shell pattern, or contain it if it has no wildcard",
        )  # fmt: skip
        each.add_argument("--world", choices=["simulated", "real"], help="cases of one world only")
    check.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[],
        help="change the environment of the runs, to see what depends on it: ATEN_CPU_CAPABILITY=avx2",
    )  # fmt: skip
    options = parser.parse_args(words)
    wanted = chosen(options.only, options.world)
    if not wanted:
        parser.error(f"no case matches {options.only!r}")
    whole = len(wanted) == len(cases())
    if options.command == "renew":
        return _renew(Golden.load(), checks.run(wanted, tell=_Progress(len(wanted))), whole)
    environment = dict(pair.split("=", 1) for pair in options.set)
    return _check(Golden.load(), checks.run(wanted, environment, _Progress(len(wanted))), whole)


class _Progress:
    """Counts on a terminal; says nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, name: str) -> None:
        self.done += 1
        if sys.stderr.isatty():
            text = "" if self.done == self.total else f"{self.done} of {self.total}  {name}"[:100]
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _differences(golden: Golden, found: Golden, whole: bool) -> Differences:
    return checks.differences(golden, found) | (checks.obsolete(golden, cases()) if whole else {})


def _check(golden: Golden, found: Golden, whole: bool) -> int:
    wrong = _differences(golden, found, whole)
    if not wrong:
        print(f"{len(found.cases)} cases are as the golden file says.")
        return 0
    print(checks.report(wrong, golden, found))
    print(f"{len(wrong)} of {len(found.cases)} cases differ from the golden file. {RULE}")
    return 1


def _renew(golden: Golden, found: Golden, whole: bool) -> int:
    new = Golden(found.versions, found.cases if whole else golden.cases | found.cases)
    failed = {name: [each["error"]] for name, each in found.cases.items() if "error" in each}
    if wrong := failed or checks.contradictions(new, cases()):
        print(checks.report(wrong, golden, found))
        why = "runs failed" if failed else "real processes give other results than the simulator"
        print(f"The golden file was not written: {why}.")
        return 1
    if golden.cases and not whole and (other := checks.versions(golden, found)):
        print(f"The golden file was not written. It was made with {other}: renew all of it.")
        return 1
    changed = _differences(golden, found, whole)
    changed |= {name: ["is new"] for name in new.cases.keys() - golden.cases.keys()}
    changed |= {name: ["is removed"] for name in golden.cases.keys() - new.cases.keys()}
    checks.FILE.write_text(new.text())
    if changed:
        print(checks.report(changed, golden, found))
    print(f"{len(changed)} lines of {checks.FILE.name} changed; it has {len(new.cases)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
