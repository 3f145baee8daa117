"""LaTeX to MathML, which browsers render by themselves: no script, no outside resource."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves of $...$ and $$...$$.
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)

# The converter knows pairs of fences, and takes single ones for symbols.
FENCES = (
    (r"\\big(?![a-z])", ""),
    (r"\\Big\s*(\(|\[|\\lfloor)", r"\\left\1"),
    (r"\\Big\s*(\)|\]|\\rfloor)", r"\\right\1"),
    (r"\\lvert", r"\\left|"),
    (r"\\rvert", r"\\right|"),
    (r"\\lVert", r"\\left\\|"),
    (r"\\rVert", r"\\right\\|"),
)


def render(page: str) -> str:
    """A page in HTML, with MathML in place of LaTeX."""
    page = _BLOCK.sub(lambda found: block(html.unescape(found[1])), page)
    return _INLINE.sub(lambda found: _cell(html.unescape(found[1]), "inline"), page)


def block(latex: str) -> str:
    r"""Displayed mathematics. Rows end with `\\`, and `&` separates the columns, as in LaTeX's `aligned`."""
    latex = re.sub(r"\\(begin|end)\{(aligned|align\*?|split)\}", "", latex)
    rows = []
    for row in latex.split(r"\\"):
        cells = [f"<mtd>{_cell(cell, None)}</mtd>" for cell in re.sub(r"&\s*&", "&", row).split("&")]
        rows.append(f"<mtr>{''.join(cells)}</mtr>")
    table = f'<mtable displaystyle="true">{"".join(rows)}</mtable>'
    return f'<div class="formula" tabindex="0"><math display="block">{table}</math></div>'


def _cell(latex: str, display: str | None) -> str:
    """One formula; without its <math> element if there is no display."""
    for pattern, text in FENCES:
        latex = re.sub(pattern, text, latex)
    made = convert(latex.strip(), display=display or "block")
    # The names of functions stand close to their arguments, and apart from what is before them.
    made = re.sub(r"<mo>(max|min)</mo>", r'<mo lspace="0.17em" rspace="0.17em">\1</mo>', made)
    made = re.sub(r"<mo>(\w{2,})</mo>", r'<mo lspace="0.17em" rspace="0">\1</mo>', made)
    made = made.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")
    return made if display else re.sub(r"^<math[^>]*>|</math>$", "", made)
