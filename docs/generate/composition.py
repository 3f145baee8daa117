"""What composes with what, by asking the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from polyrhythm.core.codec import Codec
from polyrhythm.core.compose import refusal
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import describe, parse, parse_codec
from polyrhythm.core.strategy import Strategy

YES = "✓"
COLLECTIVES = ("direct", "ring", "hierarchical", "shared")
VARIANTS = ("sign:vote=yes",)  # a field changes what they compose with

PAGE = """\
# What composes with what

This page was made by asking the code that refuses a combination before a run starts, with the default fields
of each. A number refers to the reason below the table.

## Strategies and codecs

{codecs}

## Codecs and collectives

Without servers a mean is taken by a collective. The program chooses it, unless `--collective` says which.

{collectives}

## Two levels

One strategy works inside each site, another between the sites:
`inside / between`, as in `allreduce / diloco:50`. Rows are inside a site, columns between sites. Where both
have periods, the outer one must be a multiple of the inner one, and so must `overlap`; here they are.

{levels}

All other strategies are refused:

- inside: {not_inside}
- between: {not_between}
"""


def strategies() -> list[type[Strategy]]:
    return [Strategy.registry[row.name] for row in describe()]


def codecs() -> dict[str, Codec]:
    """Every codec with its default fields, and some variants."""
    return {text: parse_codec(text) for text in (*(row.name for row in describe("codec")), *VARIANTS)}


def page() -> str:
    takes = {
        (_link("strategies", cls.name), _link("codecs", text)): codec_refusal(cls, codec)
        for cls in strategies()
        for text, codec in codecs().items()
    }
    allreduce = Strategy.registry["allreduce"]
    travels = {
        (_link("codecs", text), f"`{collective}`"): codec_refusal(allreduce, codec, collective)
        for text, codec in codecs().items()
        for collective in COLLECTIVES
    }
    inside, between = (
        [cls for cls in strategies() if getattr(cls().traits, where)]
        for where in ("inside_sites", "between_sites")
    )
    levels = {
        (_link("strategies", within.name), _link("strategies", across.name)): levels_refusal(within, across)
        for within in inside
        for across in between
    }
    return PAGE.format(
        codecs=answer_table(takes, "strategy"),
        collectives=answer_table(travels, "codec"),
        levels=answer_table(levels, "inside"),
        not_inside=_reason(inside, lambda cls: f"{cls.name} / local"),
        not_between=_reason(between, lambda cls: f"allreduce / {cls.name}"),
    )


def codec_refusal(cls: type[Strategy], codec: Codec, collective: str | None = None) -> str:
    """Why a strategy does not take a codec, without their names."""
    why = re.sub(rf"\b{cls.name}\b", "the strategy", refusal(cls, codec, collective))
    named = rf"(?<![+\w])({re.escape(str(codec))}(?!\w)|{codec.name}\b)"
    return re.sub(named, "the codec", why).replace(f"+{codec}", "+CODEC")


def levels_refusal(within: type[Strategy], across: type[Strategy]) -> str:
    """Why one strategy cannot be inside sites with another between them; empty if it can."""
    inner = within().traits.sync_period
    overlap = f",overlap={inner}" if "overlap" in across.choices() else ""
    return _error(f"{within.name} / {across.name}:{40 * inner}{overlap}")


def _reason(able: list[type[Strategy]], text: Callable[[type[Strategy]], str]) -> str:
    """What the code says to the first strategy that is not able."""
    refused = next(cls for cls in strategies() if cls not in able)
    return _error(text(refused)).partition(", and not")[0]


def _error(text: str) -> str:
    """What is wrong with a strategy; empty if nothing."""
    try:
        parse(text)
    except UsageError as error:
        return str(error).partition(": ")[2]
    return ""


def answer_table(answers: Mapping[tuple[str, str], str], corner: str) -> str:
    """A table of yes and numbers, and a list of the reasons that the numbers mean."""
    rows, columns = (list(dict.fromkeys(key[place] for key in answers)) for place in (0, 1))
    reasons: dict[str, int] = {}
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" + "|:-:" * len(columns) + "|"]
    for row in rows:
        whys = [answers[row, column] for column in columns]
        cells = [str(reasons.setdefault(why, len(reasons) + 1)) if why else YES for why in whys]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    table, listed = "\n".join(lines), "\n".join(f"{number}. {why}" for why, number in reasons.items())
    return f'<div class="composition" markdown="1">\n\n{table}\n\n</div>\n\n{listed}'


def _link(folder: str, text: str) -> str:
    return f"[`{text}`]({folder}/{text.partition(':')[0]}.md)"


def of_strategy(cls: type[Strategy]) -> str:
    """The codecs and levels of one strategy."""
    refused = {text: why for text, codec in codecs().items() if (why := codec_refusal(cls, codec))}
    taken = [text for text in codecs() if text not in refused]
    traits = cls().traits
    where = [
        text
        for able, text in ((traits.inside_sites, "inside a site"), (traits.between_sites, "between sites"))
        if able
    ]
    levels = (
        f"it can be {' and '.join(where)}" if where else "it can be neither inside a site nor between sites"
    )
    return (
        _both(taken, refused, "../codecs", "codec")
        + f"\n\nIn a run of [two levels](../composition.md#two-levels) {levels}."
    )


def of_codec(cls: type[Codec]) -> str:
    """The strategies that take one codec."""
    made = cls()
    refused = {each.name: why for each in strategies() if (why := codec_refusal(each, made))}
    taken = [each.name for each in strategies() if each.name not in refused]
    return _both(taken, refused, "../strategies", "strategy")


def _both(taken: Iterable[str], refused: Mapping[str, str], folder: str, kind: str) -> str:
    def names(texts: Iterable[str]) -> str:
        return ", ".join(_link(folder, text) for text in texts)

    if not (taken := list(taken)):
        return f"It takes no {kind}."
    lines = [f"It goes with: {names(taken)}."]
    reasons: dict[str, list[str]] = {}
    for text, why in refused.items():
        reasons.setdefault(why, []).append(text)
    lines += [f"- not with {names(texts)}: {why}" for why, texts in reasons.items()]
    return lines[0] + ("\n\n" + "\n".join(lines[1:]) if refused else "")
