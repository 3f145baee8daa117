"""Draws a model with its cuts as SVG: a column per stage, a box per layer, a line for what skips layers."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from polyrhythm.lab.plan import Planned, PlannedStage, milliseconds, verdict
from polyrhythm.launch.console import size
from polyrhythm.parallel.graph import ModelGraph

MOST = 18  # boxes in a column; more are joined
COLUMN, GAP, BOX, STEP, TOP = 210, 96, 26, 36, 132
STAGE, BAR, INK, CUT, SKIP = "#eef3fb", "#9cc0e7", "#1d3f66", "#b9771f", "#7a8794"


@dataclass(frozen=True)
class Box:
    """Neighbouring operations of one submodule in one stage."""

    name: str
    first: int
    last: int
    x: int
    y: int

    @property
    def middle(self) -> int:
        return self.y + BOX // 2


def boxes_of(graph: ModelGraph, stage: PlannedStage) -> list[tuple[str, int, int]]:
    """The layers of a stage: name, first operation, last operation + 1. Long ones are joined."""
    paths = [graph.train.module_of(position) for position in range(stage.first, stage.last)]
    depth = max((path.count(".") + 1 for path in paths if path), default=1)
    while True:
        found: list[tuple[str, int, int]] = []
        for position, path in enumerate(paths, stage.first):
            name = ".".join(path.split(".")[:depth]) if path else ""
            if found and (found[-1][0] == name or not name):  # a bare function belongs to the layer before it
                found[-1] = found[-1][0], found[-1][1], position + 1
            else:
                found.append((name, position, position + 1))
        found = [(name or graph.train.operations[first].name, first, last) for name, first, last in found]
        if len(found) <= MOST:
            return found
        if depth == 1:
            half, rest = found[: MOST // 2], found[-(MOST // 2) + 1 :]
            skipped = found[len(half) : -len(rest)]
            return [*half, (f"… {len(skipped)} more", skipped[0][1], skipped[-1][2]), *rest]
        depth -= 1


def draw(made: Planned) -> str:
    plan, graph, costs = made.plan, made.graph, made.costs
    columns = [boxes_of(graph, stage) for stage in plan.stages]
    tall = max(map(len, columns))
    width = len(columns) * COLUMN + (len(columns) - 1) * GAP + 48
    height = TOP + tall * STEP + 96
    boxes: list[list[Box]] = []
    for number, layers in enumerate(columns):
        x = 24 + number * (COLUMN + GAP)
        boxes.append([Box(name, a, b, x, TOP + row * STEP) for row, (name, a, b) in enumerate(layers)])
    every = [box for column in boxes for box in column]
    times = [costs.seconds(box.first, box.last) for box in every]
    longest = max(times) or 1.0
    subtitle = (
        f"{plan.micro_batches} micro-batches of a batch of {plan.rows} rows; "
        "a bar is the time of a layer, forward and backward"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(24, 30, f"{plan.model} in {len(columns)} stages", 18, bold=True),
        text(24, 52, subtitle),
    ]
    for number, (stage, column) in enumerate(zip(plan.stages, boxes, strict=True)):
        parts += stage_parts(number, stage, column[0].x, tall)
    parts += [line for source, target in links(graph, every) for line in link_parts(source, target)]
    for box, spent in zip(every, times, strict=True):
        parts += box_parts(box, spent / longest)
    for stage, column in zip(plan.stages[:-1], boxes, strict=False):
        parts += cut_parts(column[0].x + COLUMN + GAP // 2, tall, size(stage.crossing))
    for row, line in enumerate(wrapped(verdict(plan), width // 7)):
        parts.append(text(24, height - 62 + 18 * row, line))
    return "\n".join([*parts, "</svg>", ""])


def text(
    x: float, y: float, words: str, points: int = 13, *, bold: bool = False, fill: str = INK, anchor: str = ""
) -> str:
    style = (' font-weight="bold"' if bold else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x}" y="{y}" font-size="{points}" fill="{fill}"{style}>{escape(words)}</text>'


def stage_parts(number: int, stage: PlannedStage, x: int, tall: int) -> list[str]:
    height = tall * STEP + 58
    return [
        f'<rect x="{x - 8}" y="{TOP - 58}" width="{COLUMN + 16}" height="{height}" rx="8" fill="{STAGE}"/>',
        text(x, TOP - 36, f"stage {number}: {milliseconds(stage.computing)}", bold=True),
        text(x, TOP - 16, f"{size(stage.parameters)} parameters, {size(stage.activations)} kept", 12),
    ]


def box_parts(box: Box, share: float) -> list[str]:
    name = box.name if len(box.name) <= 30 else f"…{box.name[-29:]}"
    frame = f'<rect x="{box.x}" y="{box.y}" width="{COLUMN}" height="{BOX}" rx="4"'
    bar = (
        f'<rect x="{box.x + 1}" y="{box.y + 1}" width="{share * (COLUMN - 2):.1f}" height="{BOX - 2}" rx="3"'
    )
    return [
        f'{frame} fill="#ffffff" stroke="#3b6ea5"/>',
        f'{bar} fill="{BAR}"/>',
        text(box.x + 8, box.y + 17, name, 12),
    ]


def cut_parts(x: int, tall: int, crossing: str) -> list[str]:
    bottom = TOP + tall * STEP
    return [
        f'<line x1="{x}" y1="{TOP - 50}" x2="{x}" y2="{bottom}" stroke="{CUT}" stroke-width="2" '
        'stroke-dasharray="6 5"/>',
        f'<rect x="{x - 38}" y="{TOP - 50}" width="76" height="20" fill="#ffffff"/>',
        text(x, TOP - 36, crossing, 12, fill=CUT, anchor="middle", bold=True),
    ]


def links(graph: ModelGraph, boxes: list[Box]) -> list[tuple[Box, Box]]:
    """The pairs of boxes of which the second takes a value of the first."""
    home = {position: box for box in boxes for position in range(box.first, box.last)}
    order = {box.first: number for number, box in enumerate(boxes)}
    found: dict[tuple[int, int], tuple[Box, Box]] = {}
    for node in graph.train.operations:
        for other in node.all_input_nodes:
            if other in graph.train.positions:
                source, target = home[graph.train.positions[other]], home[graph.train.positions[node]]
                if source is not target:
                    found[order[source.first], order[target.first]] = source, target
    return [found[key] for key in sorted(found)]


def link_parts(source: Box, target: Box) -> list[str]:
    """A line between two boxes: straight down, around the boxes between them, or to another column."""
    if source.x == target.x and target.y == source.y + STEP:
        x = source.x + COLUMN // 2
        path = f"M {x} {source.y + BOX} L {x} {target.y}"
    elif source.x == target.x:
        x, bulge = source.x + COLUMN, min(40, 10 + (target.y - source.y) // 12)
        path = curve(x, source.middle, x + bulge, x + bulge, x, target.middle)
    else:
        x, end = source.x + COLUMN, target.x
        half = (end - x) // 2
        path = curve(x, source.middle, x + half, end - half, end, target.middle)
    return [f'<path d="{path}" fill="none" stroke="{SKIP}" stroke-width="1.4"/>']


def curve(x: int, y: int, leave: int, arrive: int, end_x: int, end_y: int) -> str:
    return f"M {x} {y} C {leave} {y} {arrive} {end_y} {end_x} {end_y}"


def wrapped(words: str, columns: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) + 1 > columns:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
