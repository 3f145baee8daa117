"""The command line: the parser and the entry point.

Nothing here imports torch, so `--help` and usage errors are answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from polyrhythm import __version__
from polyrhythm.cli import bench, codecs, events, explain, join, plan, predict, run, simulate, strategies
from polyrhythm.cli.other_options import instead
from polyrhythm.core.errors import PolyrhythmError

_EXAMPLES = """\
examples:
  polyrhythm run train.py --workers 4 --strategy allreduce      four processes, no server
  polyrhythm run train.py --workers 4 --strategy async          four processes and a parameter server
  polyrhythm run train.py -n 4 -s async --servers 2 -- --lr 0.1 arguments after -- go to the script
  polyrhythm simulate train.py -n 64 -s local:8 --cluster office.toml
  polyrhythm run train.py -n 4 --here 2 --listen 10.0.0.1:7000 --key run.key   two workers here, and
  polyrhythm join 10.0.0.1:7000 train.py -n 2 --key run.key                    two on another machine
  polyrhythm strategies                                         the values of --strategy,
  polyrhythm strategies gossip                                  one of them in full,
  polyrhythm codecs                                             and what can follow it: async+topk:0.01
  polyrhythm events runs/NAME apply                             what happened in a run
  polyrhythm predict runs/NAME train.py -n 4                    predict with the model of a run
  polyrhythm plan train.py --stages 4                           where to cut the model into stages
  polyrhythm bench servers                                      how many servers for how many workers
  polyrhythm explain ring --workers 4                           ring all-reduce, step by step

A strategy or codec of your own is a class in your script, or in a module named by --import:
  polyrhythm run train.py --strategy mine:4                     class Mine(Strategy) is in train.py
  polyrhythm run train.py --strategy mine:4 --import my_module  it is in my_module.py
  polyrhythm strategies train.py                                lists those that train.py defines

The script needs three lines: import polyrhythm, session = polyrhythm.init(), and
model, optimizer, loader = session.prepare(model, optimizer, loader).
"""


TRAINING = ("run", "join", "simulate")  # the commands whose options resemble those of other launchers


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # An argument of the script without -- before it must not pass for the beginning of an option.
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Reports a usage error in one line, like all other errors."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="polyrhythm",
        description="Your PyTorch loop, unchanged. Choose in one line how the workers keep time.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"polyrhythm {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (run, join, simulate, predict, plan, events, strategies, codecs, bench, explain):
        command.add(commands)
    top.set_defaults(parsers=commands.choices)
    return top


def _refuse(top: argparse.ArgumentParser, options: argparse.Namespace, unknown: Sequence[str]) -> NoReturn:
    """Reports arguments that the command does not know. They may be meant for the script."""
    words, command = " ".join(unknown), f"{top.prog} {options.command}"
    hint = ""
    known = [each for each in options.parsers[options.command]._option_string_actions if len(each) > 2]
    if near := difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.8):
        hint = f" (did you mean {near[0]}?)"
    if script := getattr(options, "script", ""):
        hint += f"; arguments of the script follow --: {command} {script} ... -- {words}"
    top.exit(2, f"{top.prog}: unknown arguments {words}{hint}; see {command} --help\n")


def report(message: str, error: BaseException) -> None:
    """Prints an error in one line; the last line says what is left of the run and how to continue."""
    for line in (message, *getattr(error, "__notes__", ())):
        print(f"polyrhythm: {line}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    rest: list[str] = []  # for the script
    if "--" in given:
        rest = given[given.index("--") + 1 :]
        given = given[: given.index("--")]
    top = parser()
    if given[:1] and given[0] in TRAINING and (wrong := instead(given)):
        top.exit(2, f"{top.prog}: {wrong}; see {top.prog} {given[0]} --help\n")
    options, unknown = top.parse_known_args(given)
    if unknown:
        _refuse(top, options, unknown)
    try:
        code: int = options.execute(options, rest)
    except PolyrhythmError as error:
        report(str(error), error)
        return error.exit_code
    except KeyboardInterrupt as error:
        report("interrupted", error)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return code
