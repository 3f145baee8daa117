"""`polyrhythm plan`: how a script's model would be cut into stages, and whether a pipeline would pay."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.lab.plan_branches import PlannedBranches, plan_branches
from polyrhythm.launch.console import size, table
from polyrhythm.launch.program import Program

if TYPE_CHECKING:
    from torch import nn

    from polyrhythm.parallel.costs import Costs
    from polyrhythm.parallel.example import Call
    from polyrhythm.parallel.graph import ModelGraph
    from polyrhythm.session.arguments import Arguments

REPEATS = 7
MICRO_BATCHES = 8  # as a pipeline has by default
PAYS = 1.05  # a smaller speed-up is within the error of the prediction
MESSAGES = (
    4e-4  # seconds that a micro-batch costs a stage for its messages, measured on the processes of one host
)
COPIED = 1 << 23  # bytes that are copied to measure the memory


@dataclass(frozen=True)
class PlannedStage:
    """One stage; the times and activations are of one micro-batch."""

    first: int  # operations first to last - 1 of the train graph
    last: int
    layers: str
    forward: float
    backward: float
    parameters: int  # bytes
    activations: int  # bytes kept for backward
    crossing: int  # bytes over the cut behind it, forward and backward
    messages: float  # seconds to send and receive

    @property
    def computing(self) -> float:
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        return self.computing + self.messages


@dataclass(frozen=True)
class PipelinePlan:
    """What was measured, and what follows from it for a step of forward and backward passes."""

    model: str
    note: str
    rows: int  # of a batch
    micro_batches: int
    stages: tuple[PlannedStage, ...]
    cuts: tuple[int, ...]
    begins: tuple[str, ...]  # the submodules that begin at the cuts; "": none does
    serial: float  # seconds of a batch in one process
    serial_micro: float  # seconds of its micro-batches in one process, one after another
    step: float  # predicted seconds of a batch in the pipeline
    cores: int | None  # shared by all stages; None: each is on a machine of its own
    branches: PlannedBranches | None = None  # on as many workers; None: the model has none

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage waits while the pipeline fills and drains."""
        count = len(self.stages)
        return (count - 1) / (self.micro_batches + count - 1)

    @property
    def speedup(self) -> float:
        return self.serial / self.step

    @property
    def strategy(self) -> str:
        """What to give to --strategy for these stages, if each of them begins with a submodule."""
        text = f"allreduce@pipeline:{len(self.stages)}"
        if self.micro_batches != MICRO_BATCHES:
            text += f",micro_batches={self.micro_batches}"
        return f"{text},split_at={'/'.join(self.begins)}" if all(self.begins) else text

    def plain(self) -> dict[str, Any]:
        found = asdict(self)
        more = {"bubble": self.bubble, "speedup": self.speedup, "strategy": self.strategy}
        return {**found, **more, "verdict": verdict(self)}


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from."""

    plan: PipelinePlan
    graph: ModelGraph
    costs: Costs


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    stages: int
    micro_batches: int = MICRO_BATCHES
    at: tuple[str, ...] = ()  # submodules with which stages begin; (): where it is best
    megabits: float | None = None  # speed between stages; None: they are on this machine
    threads: int = 1  # of each stage
    all_threads: int = 1  # of one process

    def check(self) -> None:
        if self.stages < 2:
            raise UsageError(f"--stages {self.stages}: a pipeline has at least 2")
        if self.micro_batches < 1:
            raise UsageError(f"--micro-batches {self.micro_batches}: take at least 1")
        if self.megabits is not None and self.megabits <= 0:
            raise UsageError(f"--network {self.megabits:g}: give the speed in Mbit/s")
        if self.at and len(self.at) != self.stages - 1:
            raise UsageError(
                f"--at names {len(self.at)} submodules, but {self.stages} stages have {self.stages - 1} cuts"
            )


def prepared(program: Program) -> Arguments:
    """Runs a script until it calls `session.prepare(...)`, and returns what it has passed."""
    from polyrhythm.session.context import EndedInPrepare, ends_in_prepare

    arguments, path = list(sys.argv), list(sys.path)

    def script() -> None:
        ends_in_prepare.set(True)
        program()

    try:
        copy_context().run(script)
    except EndedInPrepare as end:
        return end.given
    except (PolyrhythmError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise PolyrhythmError(f"{program.name} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.argv, sys.path[:] = arguments, path
    raise UsageError(
        f"{program.name} never called session.prepare(model, optimizer, loader); see polyrhythm --help"
    )


def plan_program(program: Program, wanted: Wanted) -> Planned:
    """Captures and measures the model that a script prepares."""
    wanted.check()
    given = prepared(program)
    if len(given.models) != 1:
        raise UsageError(f"the script prepares {len(given.models)} models; plan takes a script with one")
    from polyrhythm.parallel.costs import whole_seconds

    model = given.models[0]
    call = example_of(given)
    try:
        whole_seconds(model, *call, runs=1)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{type(model).__name__} does not take what the loader yields: {reason}; plan calls it with x of "
            "a batch (x, y), or with the keys of a dict that are arguments of forward"
        ) from error
    return plan_model(model, call, wanted)


def example_of(given: Arguments) -> Call:
    """What the model is called with: a batch of the loader, or the example that the script gives."""
    from polyrhythm.parallel.example import example_batch, given_call, model_inputs, repeated_rows

    rows = given.loaders[0].batch_size if given.loaders else None
    if given.example is not None:
        call = given_call(given.example)
        return repeated_rows(call, rows) if rows else call
    if not given.loaders:
        raise UsageError(
            "the script prepares no loader, so there is no example batch: pass the loader to prepare(), or "
            "example=(x,)"
        )
    return model_inputs(given.models[0], example_batch(given.loaders[0]))


def plan_model(model: nn.Module, call: Call, wanted: Wanted) -> Planned:
    """Captures, measures and cuts a model."""
    import torch

    from polyrhythm.parallel.best_cuts import measured_cuts
    from polyrhythm.parallel.costs import measure, whole_seconds
    from polyrhythm.parallel.example import first_rows, rows_of
    from polyrhythm.parallel.graph import capture
    from polyrhythm.parallel.partition import cuts_at, split

    rows = rows_of(call)
    count = min(wanted.micro_batches, rows)
    micro = first_rows(call, max(1, rows // count))
    before = torch.get_num_threads()
    try:
        graph = capture(model, *call)
        serial, _ = best_threads(wanted.all_threads, lambda: whole_seconds(model, *call))
        part, threads = best_threads(wanted.threads, lambda: whole_seconds(model, *micro))
        torch.set_num_threads(threads)
        costs = measure(graph, *micro, repeats=REPEATS)
    finally:
        torch.set_num_threads(before)
    # Operations that are measured one by one do not find their inputs in the cache as in the whole model.
    scale = part / max(costs.seconds(0, len(costs.operations)), 1e-9)
    per_byte = copy_seconds() if wanted.megabits is None else 8e-6 / wanted.megabits
    if wanted.at:
        cuts = cuts_at(graph, wanted.at)
        split(graph, cuts)
    else:
        trained = [name for name, each in model.named_parameters() if each.requires_grad]
        cuts = measured_cuts(graph, costs, wanted.stages, per_byte / scale, trained)
    stages = planned_stages(graph, costs, cuts, scale, per_byte)
    times = [stage.seconds for stage in stages]
    step = sum(times) + (count - 1) * max(times)
    cores = None
    if wanted.megabits is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        step = max(step, count * sum(times) * threads / cores)
    branches = plan_branches(graph, costs, call, wanted.stages, per_byte, serial)
    if branches is not None and cores is not None:
        branches = replace(branches, speedup=min(branches.speedup, cores / threads))
    made = PipelinePlan(
        type(model).__name__, graph.note, rows, count, stages, tuple(cuts), begins_of(graph, cuts), serial,
        count * part, step, cores, branches,
    )  # fmt: skip
    return Planned(made, graph, costs)


def best_threads(most: int, seconds: Callable[[], float]) -> tuple[float, int]:
    """The time with one thread or with all, whichever is less, and their number."""
    import torch

    found = []
    for threads in {1, most}:
        torch.set_num_threads(threads)
        found.append((seconds(), threads))
    return min(found)


def planned_stages(
    graph: ModelGraph, costs: Costs, cuts: list[int], scale: float, per_byte: float
) -> tuple[PlannedStage, ...]:
    edges = [0, *cuts, len(costs.operations)]
    return tuple(
        PlannedStage(
            first,
            last,
            layers_of(graph, first, last),
            scale * sum(each.forward for each in costs.operations[first:last]),
            scale * sum(each.backward for each in costs.operations[first:last]),
            costs.parameter_bytes(first, last),
            costs.saved_bytes(first, last),
            costs.crossing[last],
            MESSAGES + per_byte * (costs.crossing[first] + costs.crossing[last]),
        )
        for first, last in itertools.pairwise(edges)
    )


def layers_of(graph: ModelGraph, first: int, last: int) -> str:
    """The first and the last submodule of a stage."""
    names = [name for position in range(first, last) if (name := graph.train.module_of(position))]
    if not names:
        return graph.train.operations[first].name
    return names[0] if names[0] == names[-1] else f"{names[0]} – {names[-1]}"


def begins_of(graph: ModelGraph, cuts: list[int]) -> tuple[str, ...]:
    """The outermost submodule whose first operation is at each cut; "" if there is none."""
    first: dict[str, int] = {}
    for position in range(len(graph.train.operations)):
        parts = graph.train.module_of(position).split(".")
        for depth in range(1, len(parts) + 1):
            first.setdefault(".".join(parts[:depth]), position)
    names = {position: name for name, position in reversed(first.items()) if name in graph.modules}
    return tuple(names.get(cut, "") for cut in cuts)


def copy_seconds() -> float:
    """The seconds to copy a byte in memory, as stages on one machine do twice."""
    import torch

    from polyrhythm.parallel.costs import clock

    source, target = torch.zeros(COPIED, dtype=torch.uint8), torch.zeros(COPIED, dtype=torch.uint8)

    def once() -> float:
        began = clock()
        target.copy_(source)
        return clock() - began

    return 2 * min(once() for _ in range(5)) / COPIED


def verdict(plan: PipelinePlan) -> str:
    """Whether to cut the model, in words."""
    count = len(plan.stages)
    needs = max(stage.parameters + plan.micro_batches * stage.activations for stage in plan.stages)
    total = sum(stage.parameters + plan.micro_batches * stage.activations for stage in plan.stages)
    memory = f"a stage holds up to {size(needs)} of {size(total)}"
    if plan.speedup >= PAYS:
        return f"cut it: {count} stages train {plan.speedup:.1f} times as fast as one process, and {memory}"
    reasons = []
    cost = plan.serial_micro / plan.serial
    if cost > PAYS:
        reasons.append(
            f"{plan.micro_batches} micro-batches of {max(1, plan.rows // plan.micro_batches)} rows cost "
            f"{cost:.2f} times as much as a batch of {plan.rows}"
        )
    if plan.cores is not None and plan.cores < count:
        reasons.append(f"{count} stages share {plan.cores} cores")
    slowest = max(plan.stages, key=lambda stage: stage.seconds)
    mean = sum(stage.seconds for stage in plan.stages) / count
    if slowest.seconds > 1.5 * mean:
        reasons.append(f"the slowest stage takes {slowest.seconds / mean:.1f} times the mean")
    if slowest.messages > 0.2 * slowest.seconds:
        reasons.append(f"messages take {slowest.messages / slowest.seconds:.0%} of the slowest stage")
    reasons.append(f"the bubble is {plan.bubble:.0%}")
    return (
        f"do not: one process is {'faster' if plan.speedup < 1 / PAYS else 'as fast'} ("
        + ", ".join(reasons)
        + f"). Cut it only if it does not fit on one machine: {memory}"
    )


def show(plan: PipelinePlan) -> str:
    """The plan as text."""
    rows = [
        (
            str(number),
            stage.layers,
            milliseconds(stage.forward),
            milliseconds(stage.backward),
            size(stage.parameters),
            size(stage.activations),
            size(stage.crossing) if number < len(plan.stages) - 1 else "–",
        )
        for number, stage in enumerate(plan.stages)
    ]
    head = ("stage", "layers", "forward", "backward", "parameters", "activations", "over the cut")
    count = len(plan.stages)
    lines = [
        f"{plan.model}: a batch of {plan.rows} rows as {plan.micro_batches} micro-batches of "
        f"{max(1, plan.rows // plan.micro_batches)}; times and activations are of one micro-batch",
        *([plan.note] if plan.note else []),
        "",
        table(head, rows),
        "",
        f"one process      {milliseconds(plan.serial)} a step (forward and backward)",
        f"micro-batches    {plan.serial_micro / plan.serial:.2f} times that in one process",
        f"bubble           {plan.bubble:.0%} = ({count} - 1) / ({plan.micro_batches} + {count} - 1)",
        f"{f'{count} stages':17}{milliseconds(plan.step)} a step, {plan.speedup:.2f} times as fast",
        "",
        verdict(plan),
        f"--workers {count} --strategy {plan.strategy}",
    ]
    if plan.branches is not None and plan.branches.speedup >= PAYS:
        better = "better" if plan.branches.speedup > max(plan.speedup, 1.0) else "or"
        lines += [
            "",
            f"{better}: the model has branches that can run at the same time, {plan.branches.speedup:.1f} "
            f"times as fast on {count} workers",
            f"--workers {count} --strategy {plan.branches.strategy}",
        ]
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
