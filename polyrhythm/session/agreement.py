"""What all nodes agree on before training begins: the layout of the model, and what the script has seeded."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polyrhythm.core.requests import Prepared, ShowNote
from polyrhythm.model.layout import Layout, hyper_parameters
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.context import WorldContext
from polyrhythm.session.part import joined_hash
from polyrhythm.session.seeds import script_seed, separate

_CONSTANT = (
    "base_lrs", "total_steps", "T_max", "T_0", "T_mult", "eta_min", "step_size", "gamma", "milestones",
    "start_factor", "end_factor", "total_iters", "power", "factor", "patience",
)  # fmt: skip
OUTLINE = 2000  # parameters, so that the message stays small
_SEEDED_DIFFERENTLY = (
    "workers have seeded torch differently: all start from the parameters and data order of worker 0, but "
    "each keeps the buffers of the model that it built"
)


_DIFFERENT_SETTINGS = "if that is not on purpose, give the script the same arguments after -- on all machines"


def agree(context: WorldContext, layouts: Sequence[Layout], given: Arguments, seed: int) -> int:
    """Waits until all nodes have the same model. Returns the seed for the order of the data.

    `seed` is that of the run. From here on each server draws its own random numbers.
    """
    me = context.me
    layout, scripts = joined_hash([each.hash for each in layouts]), script_seed(seed, given.loaders)
    groups = [
        {name: repr(value) for name, value in hyper_parameters(group).items() if name not in scheduled}
        for optimizer in given.optimizers
        for scheduled in [_scheduled(optimizer, given.schedulers)]
        for group in optimizer.param_groups
    ]
    settings = [(f"parameter group {number}", group) for number, group in enumerate(groups)]
    settings += [(type(each).__name__, _constants(each)) for each in given.schedulers]
    agreed = context.request(Prepared(layout, "", scripts, _outline(layouts), settings))
    if agreed.settings and (me.role, me.rank) == ("worker", 0):
        context.request(ShowNote(f"{agreed.settings}: {_DIFFERENT_SETTINGS}"))
    has_buffers = any(True for model in given.models for _ in model.buffers())
    if agreed.differ and has_buffers and (me.role, me.rank) == ("worker", 0):
        context.request(ShowNote(_SEEDED_DIFFERENTLY))
    if me.role == "server":
        separate(me.role, seed, me.rank)
    return seed if agreed.seed is None else agreed.seed


def _scheduled(optimizer: Optimizer, schedulers: Sequence[LRScheduler]) -> Collection[str]:
    """The settings that prepared schedulers set: in a resumed run each worker has loaded those of its own
    last batch."""
    mine = [each for each in schedulers if each.optimizer is optimizer]
    cycles = any(getattr(each, "cycle_momentum", False) for each in mine)
    return [*(["lr"] if mine else []), *(["momentum", "betas"] if cycles else [])]


def _constants(scheduler: LRScheduler) -> dict[str, str]:
    """The settings of a scheduler that do not change while it is stepped."""
    return {name: repr(value) for name in _CONSTANT if (value := getattr(scheduler, name, None)) is not None}


def _outline(layouts: Sequence[Layout]) -> list[str]:
    """The first parameters of all parts in words."""
    lines = [
        f"{line} in optimizer {number}" if number else line
        for number, layout in enumerate(layouts)
        for line in layout.outline
    ]
    return lines[:OUTLINE]
