"""Reads the docstrings of strategies and codecs, which the command line and the site show.

A docstring is the idea in one line, paragraphs, the update rule in LaTeX between two lines of `$$`, a list of
the fields (`- `name`: what it decides`) and an example. A field that a class does not explain is explained by
one of its bases.
"""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

_FIELD = re.compile(r"^- `(\w+)`: ")
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$", re.DOTALL)


class Doc(NamedTuple):
    """The parts of a docstring. `text` is Markdown with the update rule in it, without fields and example."""

    summary: str
    text: str
    fields: dict[str, str]
    example: str

    @property
    def rule(self) -> str:
        """The update rule in LaTeX."""
        found = re.search(r"\$\$(.+?)\$\$", self.text, re.DOTALL)
        return found[1].strip() if found else ""


def read(cls: type) -> Doc:
    """The parts of a class's docstring, with the fields that its bases explain."""
    summary, text, fields, example = _parts(cls)
    for base in cls.__mro__[1:]:
        fields = {**_parts(base).fields, **fields}
    return Doc(summary, text, fields, example)


def _parts(cls: type) -> Doc:
    prose: list[str] = []
    fields: dict[str, str] = {}
    text, mark, example = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("\n>>> ")
    name = ""
    for line in text.splitlines():
        if found := _FIELD.match(line):
            name = found[1]
            fields[name] = line[found.end() :]
        elif name and line.startswith("  "):
            fields[name] += f" {line.strip()}"
        else:
            name = ""
            prose.append(line)
    summary, _, rest = "\n".join(prose).partition("\n")
    return Doc(summary, rest.strip(), fields, (mark + example).strip())


# LaTeX for a terminal. Only what the docstrings use.

_SYMBOLS = {
    "leftarrow": "←", "infty": "∞", "odot": "⊙", "sum": "Σ", "le": "≤", "ge": "≥", "ne": "≠", "in": "∈",
    "sim": "~", "cdot": "·", "dots": "...", "top": "T", "lvert": "|", "rvert": "|", "lVert": "‖",
    "rVert": "‖", "lfloor": "⌊", "rfloor": "⌋", "alpha": "α", "beta": "β", "gamma": "γ", "Delta": "Δ",
    "eta": "η", "theta": "θ", "lambda": "λ", "mu": "μ", "xi": "ξ", "sigma": "σ", "tau": "τ", "phi": "φ",
    "omega": "ω", "qquad": "   ", "quad": "  ", "big": "", "Big": "",
}  # fmt: skip
_ACCENTS = {"hat": "\u0302", "bar": "\u0304", "tilde": "\u0303"}


def plain(text: str) -> str:
    """Markdown with LaTeX as text for a terminal.

    >>> plain("It is $w \\\\leftarrow w - \\\\frac{\\\\eta}{N} \\\\sum_i g_i$.")
    'It is w ← w - η/N Σ_i g_i.'
    """
    return _MATH.sub(lambda found: _block(found[1]) if found[1] else _line(found[2]), text)


def _block(latex: str) -> str:
    rows = [_line(row.replace("&&", r"\qquad ").replace("&", "")) for row in latex.split(r"\\")]
    return "\n".join(f"    {row}" for row in rows)


def _line(latex: str) -> str:
    text = re.sub(r"\\(hat|bar|tilde)\{(\w)\}", lambda found: found[2] + _ACCENTS[found[1]], latex)
    text = " ".join(re.sub(r"\\(?:operatorname|text)\{([^}]*)\}", r"\1", text).split())
    text = re.sub(r"([_^])\{(\w+)\}", r"\1\2", text)
    for _ in range(2):  # one may be in another
        text = re.sub(r"([_^])\{([^{}]*)\}", r"\1(\2)", text)
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", _fraction, text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"√(\1)", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: _SYMBOLS.get(found[1], found[1]), text)
    return text.strip()


def _fraction(found: re.Match[str]) -> str:
    above, below = (part if re.fullmatch(r"\\?\w+", part) else f"({part})" for part in found.groups())
    return f"{above}/{below}"
