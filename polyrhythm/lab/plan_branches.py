"""What `polyrhythm plan` says about branches: whether parts of the model should run at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from polyrhythm.parallel.costs import Costs
    from polyrhythm.parallel.example import Call
    from polyrhythm.parallel.graph import ModelGraph


@dataclass(frozen=True)
class PlannedBranches:
    """The branches of a model on some workers, and what they gain."""

    workers: int
    speedup: float

    @property
    def strategy(self) -> str:
        return f"allreduce@branches:{self.workers}"


def plan_branches(
    graph: ModelGraph, costs: Costs, call: Call, workers: int, per_byte: float, serial: float
) -> PlannedBranches | None:
    """Divides the branches of a model by measured times; None if it has none. `serial`: seconds of a step."""
    from polyrhythm.parallel.branches import BACKWARD, choose_places, step_seconds
    from polyrhythm.parallel.estimates import Estimate, estimate
    from polyrhythm.parallel.splits import Branches

    total = costs.seconds(0, len(costs.operations))
    scale = serial / max(total, 1e-9) / (1 + BACKWARD)
    sizes = estimate(graph.train, graph.values(*call)).nbytes
    measured = Estimate(tuple(scale * each.seconds for each in costs.operations), sizes, per_byte=per_byte)
    try:
        places = choose_places(graph, Branches(workers), measured)
    except UsageError:
        return None
    return PlannedBranches(workers, serial / step_seconds(graph, places, measured))
