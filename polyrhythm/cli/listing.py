"""Lists classes for `strategies` and `codecs`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.cli.training import Commands, add_import

if TYPE_CHECKING:
    from polyrhythm.core.grammar import Configured
    from polyrhythm.core.registry import Kind, Row


def add_listing(
    commands: Commands, name: str, kind: str, execute: Callable[[argparse.Namespace, Sequence[str]], int]
) -> None:
    command = commands.add_parser(
        name,
        help=f"list every {kind} with its fields, defaults and paper",
        description=f"Lists every {kind} with its fields, defaults and paper: built-in ones, those of "
        "installed plug-ins, and those of modules named by --import.",
    )
    command.add_argument(
        "name", nargs="?", metavar="NAME",
        help=f"one {kind}, to describe it and its fields; or a script (train.py), to list those that it "
        "defines",
    )  # fmt: skip
    add_import(command)
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(execute=execute)


class Listing(NamedTuple):
    """The list of all classes of one kind."""

    kind: Kind
    introduction: Callable[[], str]
    base: type  # its docstring explains the fields that many classes share
    which: str  # these classes, in words

    def show(self, options: argparse.Namespace) -> None:
        from polyrhythm.core import extensions
        from polyrhythm.core.grammar import find
        from polyrhythm.core.registry import describe, registered
        from polyrhythm.core.resolve import SCRIPT
        from polyrhythm.launch.program import Program

        one: str | None = options.name
        script = Path(one) if one is not None and one.endswith(".py") else None
        extensions.search(None if script is None else script.parent)
        extensions.import_modules(options.imports)
        for failure in extensions.load_plugins(self.kind):
            print(f"polyrhythm: {failure}", file=sys.stderr)
        if script is not None:
            Program(script).import_script()
        rows = describe(self.kind, own=True)
        if script is not None:
            rows = [row for row in rows if row.origin == SCRIPT]
            if not rows and not options.json:
                print(f"{script} defines no {self.kind}")
        elif one is not None:
            found = find(self.kind, registered(self.kind), one)
            rows = [row for row in rows if row.name == found.name]
        if options.json:
            print(json.dumps([row._asdict() for row in rows]))
        else:
            self._print(rows, registered(self.kind), one)

    def _print(self, rows: Sequence[Row], known: Mapping[str, type[Configured]], one: str | None) -> None:
        from polyrhythm.core.docstrings import plain, read

        if one is None:
            print(self.introduction())
        for row in rows:
            cls = known[row.name]
            print(f"{row.name}:{cls.main.upper()}" if cls.main else row.name)
            print(textwrap.indent(row.summary, "    "))
            doc = read(cls)
            if one is not None:
                print("\n" + textwrap.indent(plain(doc.text), "    ") + "\n")
            for name, takes, default in sorted(row.fields, key=lambda field: field[0] != cls.main):
                print(f"    {name} = {default}  ({takes})")
                if one is not None and name in doc.fields:
                    print(textwrap.indent(textwrap.fill(plain(doc.fields[name]), 96), " " * 8))
            if row.origin:
                print(f"    defined in {_origin(cls)}")
            print(f"    {row.paper}\n" if row.paper else "")
        if one is None:
            print(f"Fields that {self.which} have:")
            for name, text in read(self.base).fields.items():
                print(textwrap.fill(f"{name}: {plain(text)}", 100, subsequent_indent="    "))


def _origin(cls: type) -> str:
    """The file of a class, or its module."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return str(file or cls.__module__)
