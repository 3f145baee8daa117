"""`polyrhythm plan`."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.cli.output import stdout_to_stderr
from polyrhythm.cli.training import Commands

EPILOG = """\
The script runs until it calls session.prepare(model, optimizer, loader), and no further. The model is
captured with torch.export, and each of its operations is measured forward and backward on a micro-batch of
the loader's first examples. The cuts are those with which the slowest stage, with what it sends and receives,
takes least.

  polyrhythm plan train.py --stages 4                      where to cut, and whether a pipeline pays
  polyrhythm plan train.py --stages 2 --at layers.6        cut where you say
  polyrhythm plan train.py --stages 4 --network 1000       stages on machines of their own, 1 Gbit/s
  polyrhythm plan train.py --stages 4 --picture model.svg  draw the model with its cuts
  polyrhythm plan train.py --stages 4 -- --width 1024      arguments after -- go to the script

With K stages and M micro-batches a stage waits for (K - 1) / (M + K - 1) of the time: the bubble. More
micro-batches make it smaller, but smaller micro-batches cost more in all, which is measured too.
"""


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "plan",
        help="say where to cut a model into pipeline stages, and whether it pays",
        description="Measures a script's model and cuts it into pipeline stages, without training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("script", help="the training script")
    command.add_argument("--stages", type=int, default=2, metavar="K", help="how many stages (2)")
    command.add_argument(
        "--micro-batches",
        type=int,
        default=8,
        metavar="M",
        help="parts of a batch that follow each other (8)",
    )
    command.add_argument(
        "--at", default="", metavar="NAME,...",
        help="the submodules with which all stages but the first begin (where the slowest stage takes least)",
    )  # fmt: skip
    command.add_argument(
        "--network", type=float, default=None, metavar="MBIT",
        help="the speed between stages in Mbit/s, if each is on a machine of its own (all are on this one)",
    )  # fmt: skip
    command.add_argument(
        "--threads", type=int, default=0, metavar="T",
        help="threads per stage (an equal share of the cores; all of them with --network)",
    )  # fmt: skip
    command.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the model with its cuts")
    command.add_argument("--json", action="store_true", help="print everything as one JSON object")
    command.set_defaults(execute=execute)


def execute(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from polyrhythm.lab import plan
    from polyrhythm.launch.nodes import threads_each
    from polyrhythm.launch.program import Program

    program = Program(options.script, rest)
    stages = 1 if options.network is not None else options.stages
    wanted = plan.Wanted(
        options.stages, options.micro_batches, tuple(filter(None, options.at.split(","))), options.network,
        threads_each(options.threads, stages), threads_each(0, 1),
    )  # fmt: skip
    with stdout_to_stderr() if options.json else contextlib.nullcontext():
        made = plan.plan_program(program, wanted)
    if options.picture:
        from polyrhythm.lab.plan_picture import draw

        options.picture.write_text(draw(made), encoding="utf-8")
    print(json.dumps(made.plan.plain()) if options.json else plan.show(made.plan))
    return 0
