"""The command line. Nothing here imports torch: `--help` and a typing mistake are answered at once."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

from polyrhythm import __version__
from polyrhythm.collectives.choose import WAYS
from polyrhythm.core.errors import PolyrhythmError

_EXAMPLES = """\
examples:
  polyrhythm run train.py --workers 4 --strategy allreduce      four processes, no server
  polyrhythm run train.py --workers 4 --strategy async          four processes and a parameter server
  polyrhythm run train.py -n 4 -s async --servers 2 -- --lr 0.1 what follows -- goes to the script
  polyrhythm simulate train.py -n 64 -s local:8 --cluster office.toml
  polyrhythm run train.py -n 4 --here 2 --listen 10.0.0.1:7000 --key run.key   two workers here, and
  polyrhythm join 10.0.0.1:7000 train.py -n 2 --key run.key                    two on another machine
  polyrhythm strategies                                         what --strategy can be,
  polyrhythm strategies gossip                                  all that one of them does and takes,
  polyrhythm codecs                                             and what can follow it: async+topk:0.01
  polyrhythm bench servers                                      how many servers for how many workers
  polyrhythm explain ring --workers 4                           ring all-reduce, step by step

The script needs three lines: import polyrhythm, session = polyrhythm.init(), and
model, optimizer, loader = session.prepare(model, optimizer, loader).
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other mistake."""
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

    run = commands.add_parser(
        "run",
        help="train a script on real processes, of this machine and of those that join",
        description="Trains a script on real processes: workers, and servers if the strategy has them. With "
        "--here, some of the workers run on other machines, started there by `polyrhythm join`; servers and "
        "the run folder are on this one.",
        epilog="Arguments for the script follow --. Exit code: 0 trained, 1 failed, 2 could not begin.",
    )
    _common(run, "runs")
    run.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S",
        help="longest wait for a peer, and for other machines to join (1800 s)",
    )  # fmt: skip
    run.add_argument(
        "--restarts", type=int, default=0, metavar="R",
        help="replace up to R workers whose processes die while training, where the strategy lets others go "
        "on without them (0); an exception in the script still ends the run",
    )  # fmt: skip
    run.add_argument(
        "--listen", default=None, metavar="HOST:PORT",
        help="let nodes talk over TCP, encrypted, instead of shared memory; the coordinator is at this "
        "address (port 0: any), where other machines join",
    )  # fmt: skip
    run.add_argument(
        "--here", type=int, default=None, metavar="N",
        help="how many of the workers run on this machine (all); the run waits until others have joined with "
        "the rest. Machines talk over TCP, and inside each there is shared memory",
    )  # fmt: skip
    run.add_argument(
        "--cluster",
        metavar="FILE",
        help="which workers are at which site (TOML): for a strategy of two levels, such as allreduce / "
        "diloco:50, and to count what passes between sites",
    )
    run.add_argument(
        "--key", metavar="FILE",
        help="the run's key, for who wants to join; made if it does not exist, readable by you alone",
    )  # fmt: skip

    join = commands.add_parser(
        "join",
        help="bring workers of this machine into a run on another",
        description="Runs workers here for a run that `polyrhythm run --here` has begun on another machine. "
        "The script is started by its path on this machine, with the arguments given here; strategy, seed "
        "and timeout are the run's, and the run folder is there. A worker that dies is replaced here, if the "
        "run has --restarts; if this machine goes, its workers are not replaced.",
        epilog="Arguments for the script follow --. Exit code: that of the run, 2 if it could not be joined.",
    )
    join.add_argument("address", metavar="HOST:PORT", help="where the run listens")
    join.add_argument("script", help="the training script, on this machine")
    join.add_argument(
        "-n", "--workers", type=int, default=1, metavar="N", help="how many of the workers run here (1)"
    )
    join.add_argument("--key", required=True, metavar="FILE", help="a copy of the run's key (chmod 600)")
    join.add_argument(
        "--threads", type=int, default=0, metavar="T", help="torch threads per worker (cores / workers)"
    )
    join.add_argument(
        "--site", default="", metavar="NAME",
        help="at which site of the run's --cluster file this machine is, if workers of several are missing",
    )  # fmt: skip

    simulate = commands.add_parser(
        "simulate",
        help="train a script on virtual workers in one process",
        description="Trains a script on virtual workers: gradients are real, time is virtual, the result is "
        "the same bit for bit every time.",
        epilog="Arguments for the script follow --.",
    )
    _common(simulate, "runs")
    simulate.add_argument(
        "--cluster",
        metavar="FILE",
        help="how fast hosts and links are, and at which sites (TOML; without it: equal hosts, free network)",
    )

    for what, one in (("strategies", "strategy"), ("codecs", "codec")):
        listing = commands.add_parser(what, help=f"list every {one} with its fields, defaults and paper")
        listing.add_argument(
            "name", nargs="?", metavar="NAME", help=f"one {one}: what it does, and what its fields mean"
        )
        listing.add_argument("--json", action="store_true", help="as JSON")

    kinds = commands.add_parser("bench", help="measure this machine").add_subparsers(
        dest="bench", metavar="WHAT", required=True
    )
    _bench_servers(kinds.add_parser(
        "servers",
        help="how many parameter servers for how many workers",
        description="Measures push and pull for every number of workers and servers, with real processes and "
        "the strategy async, and prints the knee beside the formula P* = ceil(N |w| / (beta t)).",
        epilog="A worker sleeps for the time of a step: it stands for a machine with cores of its own.",
    ))  # fmt: skip

    kinds = commands.add_parser("explain", help="see an algorithm step by step").add_subparsers(
        dest="explain", metavar="WHAT", required=True
    )
    ring = kinds.add_parser(
        "ring",
        help="ring all-reduce: who sends which chunk to whom, and what everybody holds",
        description="Draws ring all-reduce step by step, from a run of its real code on simulated workers.",
    )
    ring.add_argument("-n", "--workers", type=int, default=4, metavar="N", help="2 to 16 (4)")
    ring.add_argument(
        "--length", type=int, default=None, metavar="L", help="elements of the vector (one per worker)"
    )
    ring.add_argument("--json", action="store_true", help="print all of it as one JSON object")
    return top


def _bench_servers(command: argparse.ArgumentParser) -> None:
    def option(name: str, default: Any, metavar: str, text: str, kind: type = str) -> None:
        command.add_argument(name, default=default, metavar=metavar, help=text, type=kind)

    option("--size", "16MiB", "SIZE", "of the parameters: B, kB, MB, GB, KiB, MiB or GiB (16MiB)")
    option("--workers", "1,2,4", "N,...", "numbers of workers (1,2,4)")
    option("--servers", "1,2,4", "P,...", "numbers of servers (1,2,4)")
    option("--step-time", "50ms", "T", "what a worker sleeps between two pushes (50ms)")
    option("--seconds", 2.0, "S", "how long to measure each (2)", float)
    command.add_argument("--json", action="store_true", help="print the result as one JSON object")


def _common(command: argparse.ArgumentParser, runs: str) -> None:
    command.add_argument("script", help="the training script")
    command.add_argument("-n", "--workers", type=int, default=2, metavar="N", help="how many workers (2)")
    command.add_argument(
        "-s", "--strategy", metavar="S",
        help="how they keep time, such as allreduce, async or local:8, or inside sites and between them: "
        "'allreduce / diloco:50'; wins over the one in the script",
    )  # fmt: skip
    command.add_argument(
        "--batch-norm", metavar="B",
        help="BatchNorm's statistics: local (each worker's own), rank0, mean, sync or recompute; wins over "
        "the one in the script",
    )  # fmt: skip
    command.add_argument(
        "--servers", type=_servers, default=0, metavar="P",
        help="parameter servers, if the strategy has them (1); colocated: one beside each worker",
    )  # fmt: skip
    command.add_argument(
        "--collective", default="auto", metavar="C",
        help="how workers all-reduce: " + "; ".join(f"{name}, {text}" for name, text in WAYS.items()),
    )  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="of models, data order and simulated time (0)")
    command.add_argument(
        "--threads", type=int, default=0, metavar="T", help="torch threads per worker (cores / workers)"
    )
    command.add_argument("--runs", default=runs, metavar="DIR", help="where run folders go (%(default)s)")
    command.add_argument("--name", help="name of the run folder (date and strategy)")
    command.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    command.add_argument("-q", "--quiet", action="store_true", help="no progress")


def _servers(text: str) -> int | str:
    """A number, or a word that the launcher has to know."""
    try:
        return int(text)
    except ValueError:
        return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    rest: list[str] = []
    if "--" in given:
        rest = given[given.index("--") + 1 :]
        given = given[: given.index("--")]
    options = parser().parse_args(given)
    try:
        if options.command in ("strategies", "codecs"):
            kind: Literal["strategy", "codec"] = "codec" if options.command == "codecs" else "strategy"
            return _listing(kind, options.name, options.json)
        if options.command == "bench":
            return _bench(options)
        if options.command == "explain":
            return _explain(options)
        if options.command == "join":
            return _join(options, rest)
        return _train(options, rest)
    except PolyrhythmError as error:
        print(f"polyrhythm: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("polyrhythm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _train(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from polyrhythm.launch import run, simulate
    from polyrhythm.launch.screen import HEAD, Screen, row, size, table

    common: dict[str, Any] = {
        "workers": options.workers, "strategy": options.strategy, "servers": options.servers,
        "batch_norm": options.batch_norm,
        "arguments": rest, "seed": options.seed, "threads": options.threads,
        "runs": options.runs, "name": options.name, "collective": options.collective,
        "screen": Screen(sys.stderr, quiet=options.quiet),
    }  # fmt: skip
    with _silent() if options.json else contextlib.nullcontext():
        if options.command == "run":
            listen = f"tcp:{options.listen}" if options.listen else "unix:"
            summary = run(
                options.script, timeout=options.timeout, listen=listen, restarts=options.restarts,
                here=options.here, key=options.key, cluster=options.cluster, **common,
            )  # fmt: skip
        else:
            summary = simulate(options.script, cluster=options.cluster, **common)
    if options.json:
        print(json.dumps(summary))
        return 0
    print(table(HEAD, [row(summary)]))
    others = {name: value for name, value in summary["metrics"].items() if name != "accuracy"}
    if others:
        print("metrics: " + "  ".join(f"{name} {value}" for name, value in others.items()))
    if summary.get("bytes_between_sites"):
        print(f"between sites: {size(summary['bytes_between_sites'])}")
    if summary["dropped"]:
        print(f"dropped: {summary['dropped']:,} updates that came too late")
    if "lost_updates" in summary:
        counted, lost, share = (summary["lost_updates"][key] for key in ("counted", "lost", "share"))
        print(f"lost updates: {lost:,} of {counted:,} that were counted ({share:.2g})")
    if summary["samples_left_out"]:
        print(f"left out: {summary['samples_left_out']:,} examples of epochs in which their workers died")
    for node, reason in summary["lost"].items():
        times = summary["replaced"].get(node, 0)
        then = f"replaced {times} times" if times > 1 else "replaced" if times else "the others trained on"
        print(f"lost: {node} {reason}; {then}")
    if "folder" in summary:
        print(f"folder: {summary['folder']}")
    return 0


def _join(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from polyrhythm.launch import join
    from polyrhythm.launch.screen import Screen

    join(
        options.address, options.script, workers=options.workers, key=options.key, arguments=rest,
        threads=options.threads, site=options.site, screen=Screen(sys.stderr),
    )  # fmt: skip
    print(f"trained; the result is where the run began, at {options.address}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    from polyrhythm.lab import servers

    plan = servers.Plan.parse(
        options.size, options.workers, options.servers, options.step_time, options.seconds
    )
    with _silent() if options.json else contextlib.nullcontext():
        report = servers.measure(plan, servers.say)
    print(json.dumps(report) if options.json else servers.show(report))
    return 0


def _explain(options: argparse.Namespace) -> int:
    from polyrhythm.lab import explain

    what = explain.ring(options.workers, options.length)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(json.dumps(what.plain()) if options.json else explain.draw(what, colour))
    return 0


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Sends to standard error what anybody else writes to standard output, child processes included."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)


def _listing(kind: Literal["strategy", "codec"], one: str | None, as_json: bool) -> int:
    from polyrhythm.core.codec import Codec
    from polyrhythm.core.grammar import find
    from polyrhythm.core.registry import describe
    from polyrhythm.core.strategy import Strategy
    from polyrhythm.strategies.server.parameter_server import ParameterServer
    from polyrhythm.strategies.two_level import able

    rows = describe(kind)
    known: Mapping[str, type[Any]] = Strategy.registry if kind == "strategy" else Codec.registry
    if one is not None:
        found = find(kind, known, one)
        rows = [row for row in rows if row.name == found.name]
    if as_json:
        print(json.dumps([row._asdict() for row in rows]))
        return 0
    if one is None and kind == "strategy":
        print("A strategy is written name:value,field=value; the value after the colon sets the first field.")
        print("After a plus comes the codec that it sends through, if any: `polyrhythm codecs` lists them.")
        print("Two, as in allreduce / diloco:50, are one inside each site and another between the sites:")
        print(f"inside there can be {able('inside_sites')}, between {able('between_sites')}.")
        print("`polyrhythm strategies NAME` tells what one does, and what its fields mean.\n")
    elif one is None:
        print("A codec comes after a strategy and a plus, written name:value,field=value: async+topk:0.01.")
        print("`polyrhythm codecs NAME` tells what one does, and what its fields mean.\n")
    for each in rows:
        cls = known[each.name]
        print(f"{each.name}:{cls.main.upper()}" if cls.main else each.name)
        said = each.summary if one is None else _doc(cls)
        print(textwrap.indent(said, "    ") + ("" if one is None else "\n"))
        for name, takes, default in sorted(each.fields, key=lambda field: field[0] != cls.main):
            print(f"    {name} = {default}  ({takes})")
        print(f"    {each.paper}\n")
    common = ParameterServer if kind == "strategy" else Codec
    if one is None or issubclass(known[rows[0].name], common):
        which = "many strategies with servers" if kind == "strategy" else "all codecs"
        print(f"What the fields decide that {which} have:")
        for line in (common.__doc__ or "").splitlines():
            if line.startswith(("    - ", "      ")):
                print(line)
    return 0


def _doc(cls: type) -> str:
    """What a class says of itself, without the example in Python."""
    import inspect

    return (inspect.getdoc(cls) or "").partition("\n>>>")[0].strip()
