"""`polyrhythm strategies`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from polyrhythm.cli.listing import Listing, add_listing
from polyrhythm.cli.training import Commands

INTRODUCTION = """\
A strategy is written name:value,field=value; the value after the colon sets the first field.
A codec may follow after a plus sign, as in async+topk:0.01: `polyrhythm codecs` lists them.
A model that is divided over several workers follows after @, as in async@pipeline:2 or pipeline:2@tensor:2:
{splits}. `polyrhythm plan SCRIPT` says where to divide it.
Two strategies, as in allreduce / diloco:50, run inside each site and between the sites:
inside may be {inside}, between {between}.
`polyrhythm strategies NAME` describes one strategy and its fields.
"""


def add(commands: Commands) -> None:
    add_listing(commands, "strategies", "strategy", execute)


def execute(options: argparse.Namespace, _: Sequence[str]) -> int:
    from polyrhythm.strategies.server.parameter_server import ParameterServer

    Listing("strategy", _introduction, ParameterServer, "many strategies with servers").show(options)
    return 0


def _introduction() -> str:
    from polyrhythm.core.split import ModelSplit
    from polyrhythm.strategies.two_level import able

    splits = ", ".join(ModelSplit.registry)
    return INTRODUCTION.format(splits=splits, inside=able("inside_sites"), between=able("between_sites"))
