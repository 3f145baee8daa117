"""`polyrhythm predict`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.cli.training import Commands

EPILOG = """\
The script is the one that has trained the model, with one more condition and one more call:

  model, optimizer, loader = session.prepare(model, optimizer, loader)
  if not session.predicting:
      ...                                        # the training loop, which polyrhythm predict leaves out
  outputs = session.predict(test_loader)         # in the order of test_loader, which must not shuffle

session.prepare() loads consensus.safetensors of the run into the model. A script that trains all the same is
refused, so nothing is skipped without a word. Workers share the batches, and a fast one takes more; if one
dies, the others do its batches.

  polyrhythm predict runs/NAME                              the script and the arguments of the run
  polyrhythm predict runs/NAME train.py -n 4                four workers, each with the whole model
  polyrhythm predict runs/NAME train.py --split pipeline:2  two workers hold the model together
  polyrhythm predict runs/NAME -o predictions.safetensors   writes the outputs: output, or output.0, output.1
                                                            of a tuple and output.KEY of a dict
  polyrhythm predict runs/NAME train.py -- --width 256      arguments after -- go to the script

Exit code: 0 predicted, 1 failed, 2 wrong use, 130 interrupted.
"""


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "predict",
        help="predict with the model of a run, on several workers",
        description="Predicts with the model that a run has trained. The outputs have the bits of one "
        "process, in the order of the loader.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("run", type=Path, help="the folder of a run that has finished")
    command.add_argument("script", nargs="?", help="the script (that of the run)")
    command.add_argument("-n", "--workers", type=int, default=2, metavar="N", help="how many workers (2)")
    command.add_argument(
        "--split", metavar="S",
        help="how the workers divide the model, such as pipeline:2; batches stream through its parts (each "
        "worker holds all of it)",
    )  # fmt: skip
    command.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write what session.predict() returns to this file"
    )
    command.add_argument(
        "--threads", type=int, default=0, metavar="T",
        help="torch threads per worker (OMP_NUM_THREADS, or cores / workers)",
    )  # fmt: skip
    command.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="longest wait for a worker (1800 s)"
    )
    command.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    command.set_defaults(execute=execute)


def execute(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from polyrhythm.core.plan import Plan
    from polyrhythm.launch.api import Output, predict_plan
    from polyrhythm.launch.console import Console
    from polyrhythm.launch.program import Program
    from polyrhythm.record.saved_model import saved_model

    saved = saved_model(options.run)
    own = not options.script or Path(options.script).resolve() == Path(saved.plan.program).resolve()
    program = Program(options.script or saved.plan.program, rest or (saved.plan.arguments if own else ()))
    plan = Plan(
        strategy=f"allreduce@{options.split}" if options.split else "allreduce", workers=options.workers,
        imports=saved.plan.imports, threads=options.threads, timeout=options.timeout,
        seed=saved.plan.seed, predicts_with=str(saved.file),
        predictions=None if options.output is None else str(options.output.resolve()),
        program=program.name, arguments=tuple(program.arguments),
    )  # fmt: skip
    console = Console(sys.stderr, options.quiet, sys.stdout)
    if saved.note:
        console.line(saved.note)
    summary = predict_plan(program, plan, Output(console=console)).summary
    seconds, examples = summary["wall_s"], summary["samples"]
    print(
        f"{examples:,} examples in {summary['steps']:,} batches, by {plan.workers} workers in {seconds:.2f} s"
        f" ({examples / seconds:,.0f} a second)",
        *([f"outputs: {options.output}"] if options.output is not None else []),
        sep="\n", file=sys.stderr,
    )  # fmt: skip
    return 0
