"""The picture of the import graph: which package of polyrhythm imports which, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import polyrhythm

ROOT = Path(polyrhythm.__file__).parent
WIDTH, ROW, BOX, HEIGHT = 760, 92, 124, 44

Graph = dict[str, set[str]]


def graph() -> Graph:
    """The packages that each package imports when it runs, lazily or not. Imports for types do not count."""
    rooms = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    found: Graph = {room: set() for room in rooms}
    for room in rooms:
        for path in (ROOT / room).rglob("*.py"):
            found[room] |= {name for name in _imported(ast.parse(path.read_text())) if name in found}
        found[room].discard(room)
    return found


def _imported(tree: ast.AST) -> Iterable[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("polyrhythm."))
        yield from _imported(node)


def layers(imports: Graph) -> list[list[str]]:
    """The packages by the longest way down to one that imports none; the lowest layer comes last."""
    depth: dict[str, int] = {}

    def measure(room: str) -> int:
        if room not in depth:
            depth[room] = 1 + max((measure(other) for other in imports[room]), default=-1)
        return depth[room]

    for room in imports:
        measure(room)
    return [sorted(r for r in imports if depth[r] == level) for level in range(max(depth.values()), -1, -1)]


def direct(imports: Graph) -> set[tuple[str, str]]:
    """The imports that do not follow from others: without those of what a package imports anyway."""

    def below(room: str) -> set[str]:
        return imports[room] | {far for near in imports[room] for far in below(near)}

    return {
        (room, other)
        for room, others in imports.items()
        for other in others
        if not any(other in below(third) for third in others - {other})
    }


def svg() -> str:
    """The picture. Its colors are those of the page, so it suits light and dark."""
    imports = graph()
    rows, solid = layers(imports), direct(imports)
    place = {
        room: ((number + 1) * WIDTH / (len(row) + 1), HEIGHT / 2 + 10 + level * ROW)
        for level, row in enumerate(rows)
        for number, room in enumerate(row)
    }
    lines = [
        _edge(place[room], place[other], (room, other) in solid)
        for room, others in sorted(imports.items())
        for other in sorted(others)
    ]
    lines.sort(key=lambda line: "solid" in line)  # the faint ones behind
    boxes = [_box(room, *at) for room, at in place.items()]
    said = "; ".join(f"{room}: {', '.join(sorted(others)) or 'none'}" for room, others in imports.items())
    height = len(rows) * ROW - ROW + HEIGHT + 20
    return (
        f'<figure class="imports"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="What each package imports. {said}">{"".join(lines)}{"".join(boxes)}</svg>'
        "<figcaption>What each package imports, read from the source: a package imports those below it. "
        "Faint lines are imports of what is imported indirectly too.</figcaption></figure>"
    )


def _edge(start: tuple[float, float], end: tuple[float, float], solid: bool) -> str:
    (x1, y1), (x2, y2) = (start[0], start[1] + HEIGHT / 2), (end[0], end[1] - HEIGHT / 2)
    bend, kind = (y2 - y1) / 2, "solid" if solid else "faint"
    curve = f"C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    return f'<path class="{kind}" d="M{x1:.0f} {y1:.0f}{curve}"/>'


def _box(room: str, x: float, y: float) -> str:
    modules = sum(1 for path in (ROOT / room).rglob("*.py") if path.name != "__init__.py")
    many = f"{modules} module{'s' if modules > 1 else ''}"
    return (
        f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x:.0f}" y="{y - 2:.0f}">{room}</text>'
        f'<text class="many" x="{x:.0f}" y="{y + 14:.0f}">{many}</text>'
    )
