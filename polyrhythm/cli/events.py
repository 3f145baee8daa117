"""`polyrhythm events`: prints the event log of a run."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence

from polyrhythm.cli.training import Commands
from polyrhythm.core.errors import UsageError


class _Help(argparse.HelpFormatter):
    """Lists the kinds of events. Their module takes a while to import, so only help that is shown does."""

    def format_help(self) -> str:
        from polyrhythm.core.events import field_names

        kinds = textwrap.fill(f"Kinds: {', '.join(sorted(field_names()))}.", self._width)
        return f"{super().format_help()}\n{kinds}\n"


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "events",
        help="print the event log of a run",
        description="Prints the events of a run, one JSON object per line: the kind of `event`, the `node`, "
        "the time `t` in seconds, and the fields of that kind of event. Events of one node are in order; "
        "those of different nodes are not sorted by time.",
        formatter_class=_Help,
    )
    command.add_argument("folder", metavar="FOLDER", help="the run folder, such as runs/NAME")
    command.add_argument("kinds", nargs="*", metavar="KIND", help="only events of these kinds, such as apply")
    command.set_defaults(execute=execute)


def execute(options: argparse.Namespace, _: Sequence[str]) -> int:
    import msgspec

    from polyrhythm.core.events import field_names
    from polyrhythm.record.reader import read_rows

    known = field_names()
    for kind in options.kinds:
        if kind not in known:
            raise UsageError(f"there is no event {kind!r}; the kinds are {', '.join(sorted(known))}")
    for row in read_rows(options.folder, *options.kinds):
        sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
    sys.stdout.flush()
    return 0
