"""`polyrhythm codecs`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from polyrhythm.cli.listing import Listing, add_listing
from polyrhythm.cli.training import Commands

INTRODUCTION = """\
A codec follows a strategy and a plus sign, written name:value,field=value: async+topk:0.01.
`polyrhythm codecs NAME` describes one codec and its fields.
"""


def add(commands: Commands) -> None:
    add_listing(commands, "codecs", "codec", execute)


def execute(options: argparse.Namespace, _: Sequence[str]) -> int:
    from polyrhythm.core.codec import Codec

    Listing("codec", lambda: INTRODUCTION, Codec, "all codecs").show(options)
    return 0
