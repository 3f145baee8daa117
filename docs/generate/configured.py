"""Pages of strategies and codecs, from their classes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from docs.generate import composition, traits
from polyrhythm.core import grammar
from polyrhythm.core.codec import Codec
from polyrhythm.core.docstrings import read
from polyrhythm.core.grammar import Configured
from polyrhythm.core.registry import Kind, describe, registered
from polyrhythm.core.strategy import Strategy

FOLDER: dict[Kind, str] = {"strategy": "strategies", "codec": "codecs"}

# The order in which the index lists strategies; each belongs to the first family whose test it passes.
FAMILIES = (
    ("All workers together", lambda t: t.lockstep and not t.uses_servers and not t.parameters_held_by_peers),
    ("Parameter servers", lambda t: t.uses_servers),
    ("Worker to worker, without a server", lambda t: t.parameters_held_by_peers),
    ("Shared memory on one host", lambda t: t.one_host),
)

INTRODUCTION = {
    "strategy": """\
# Strategies

A strategy decides when workers exchange what, and who waits for whom. It is one value,
`--strategy name:value,field=value`; the value after the colon sets the field in italics. After a plus comes
the [codec](../codecs/index.md) that it sends through, if any. `polyrhythm strategies` prints the same in a
terminal. What goes together is in [what composes with what](../composition.md).
""",
    "codec": """\
# Codecs

A codec turns numbers into fewer bytes and back. It follows a [strategy](../strategies/index.md) and a plus:
`allreduce+topk:0.01`. `polyrhythm codecs` prints the same in a terminal. Which strategies take which codec is
in [what composes with what](../composition.md).
""",
}


def pages() -> dict[str, str]:
    """All pages, as Markdown by their path in the documentation."""
    made = {}
    for kind, folder in FOLDER.items():
        made[f"{folder}/index.md"] = index(kind)
        for row in describe(kind):
            made[f"{folder}/{row.name}.md"] = page(registered(kind)[row.name])
    return made


def index(kind: Kind) -> str:
    """The page that lists all classes of a kind."""
    classes = [registered(kind)[row.name] for row in describe(kind)]
    if kind == "codec":
        return INTRODUCTION[kind] + "\n" + _list(classes)
    parts, left = [INTRODUCTION[kind]], dict.fromkeys(classes)
    for title, belongs in FAMILIES:
        family = [cls for cls in left if belongs(cls().traits)]
        left = {cls: None for cls in left if cls not in family}
        parts.append(f"## {title}\n\n{_list(family)}")
    assert not left, left
    return "\n".join(parts)


def _list(classes: Iterable[type[Configured]]) -> str:
    lines = ["| name | what it does | paper |", "|---|---|---|"]
    for cls in classes:
        value = f":*{cls.main}*" if cls.main else ""
        lines.append(f"| [`{cls.name}`]({cls.name}.md){value} | {read(cls).summary} | {cls.paper} |")
    return '<div class="listing" markdown="1">\n\n' + "\n".join(lines) + "\n\n</div>\n"


def page(cls: type[Configured]) -> str:
    """The page of one class."""
    doc = read(cls)
    idea, mark, rule = doc.text.partition("$$")
    parts = [f"# {cls.name}\n\n**{doc.summary}**\n\n{idea.strip()}"]
    if mark:
        parts.append(
            f"## Update rule\n\n$${rule}" if issubclass(cls, Strategy) else f"## The code\n\n$${rule}"
        )
    parts.append(f"## Fields\n\n{_fields(cls, doc.fields)}")
    if issubclass(cls, Strategy):
        parts.append(f"## What it sends, and what it survives\n\n{traits.table(cls())}")
        parts.append(f"## What it composes with\n\n{composition.of_strategy(cls)}")
    elif issubclass(cls, Codec):
        parts.append(f"## How codes are combined\n\n{traits.of_codec(cls())}")
        parts.append(f"## What it composes with\n\n{composition.of_codec(cls)}")
    parts.append(f"## Example\n\n{_example(doc.example)}")
    if cls.paper:
        parts.append(f"## Paper\n\n{cls.paper}.")
    return "\n\n".join(parts) + "\n"


def _fields(cls: type[Configured], meaning: dict[str, str]) -> str:
    """A table of the fields; the one that a bare value sets comes first."""
    options = [option for option in grammar.options(cls) if option.name in cls.choices()]
    if not options:
        return "It has none."
    lines = ["| field | default | takes | what it decides |", "|---|---|---|---|"]
    for option in sorted(options, key=lambda option: option.name != cls.main):
        default = "required" if option.required else f"`{grammar.write(option.type, option.default) or ' '}`"
        lines.append(
            f"| `{option.name}` | {default} | {grammar.wanted(option.type)} | {meaning[option.name]} |"
        )
    table = "\n".join(lines)
    table = f'<div class="fields" markdown="1">\n\n{table}\n\n</div>'
    return table + (f"\n\n`{cls.name}:VALUE` sets `{cls.main}`." if cls.main else "")


def command(example: str) -> str:
    """The command that trains as an example does."""
    named = re.search(r'pr\.parse\("([^"]+)"\)', example)
    assert named, example
    return f"polyrhythm run examples/digits.py --workers 4 --strategy {named[1]}"


def _example(example: str) -> str:
    return f"```pycon\n{example}\n```\n\n```console\n$ {command(example)}\n```"
