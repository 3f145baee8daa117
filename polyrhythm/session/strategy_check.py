"""Decides and checks the strategy of a run, in the first process that knows its class.

This is the launcher if the strategy is built in, the fork server if it is in a module named by `--import`,
and the first node if the script defines or chooses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from polyrhythm.collectives import choose
from polyrhythm.core.codec import Reduction
from polyrhythm.core.errors import UsageError
from polyrhythm.core.plan import Plan
from polyrhythm.core.resolve import ResolvedStrategy, load, resolved
from polyrhythm.core.strategy import Strategy
from polyrhythm.session import batch_norm as norms

if TYPE_CHECKING:
    from polyrhythm.session.context import WorldContext

DEFAULT = "allreduce"


def planned(plan: Plan, script: Strategy | None = None) -> Strategy:
    """The strategy of the plan, else the script's, else the default."""
    if plan.strategy is not None:
        return load(plan.strategy, plan.classes)
    return script if script is not None else load(DEFAULT)


def proposed(here: WorldContext, script: Strategy | None) -> tuple[Strategy, ResolvedStrategy]:
    """The strategy that this node proposes when it joins: that of the run, if it is known already."""
    known = here.strategy
    if known is not None:
        return load(known.text, known.classes), known
    strategy = planned(here.plan, script)
    return strategy, check_strategy(here.plan, strategy)


def check_strategy(plan: Plan, strategy: Strategy) -> ResolvedStrategy:
    """Checks a strategy against the plan; raises UsageError if they do not fit."""
    traits = strategy.traits
    norms.check(plan.batch_norm or norms.DEFAULT, strategy)
    if plan.servers and not traits.uses_servers:
        raise UsageError(f"{strategy} uses no servers; leave out --servers")
    if plan.servers == 0 and traits.uses_servers:
        raise UsageError(
            f"{strategy} needs servers, and servers is 0: leave out --servers to have one, or use a strategy "
            "without servers, such as allreduce"
        )
    choose.check_codec(plan.collective, strategy)
    if plan.balance:
        _check_balance(strategy)
    _check_models(plan, strategy)
    seen = plan.by_models(traits.model_size)
    strategy.check(replace(seen, servers=(plan.servers or 1) if traits.uses_servers else 0))
    if traits.one_host and (plan.local_workers != plan.workers or plan.listen != "unix:"):
        raise UsageError(
            f"{strategy} needs memory that all workers share, so they must be on one host: leave out --here "
            "and --listen, or use a strategy that sends messages, such as async"
        )
    if plan.restarts and not traits.survives:
        raise UsageError(f"under {strategy} no worker can continue without the others; leave out --restarts")
    return resolved(strategy, _notes(plan, strategy))


def _check_balance(strategy: Strategy) -> None:
    if not strategy.traits.lockstep:
        raise UsageError(
            f"under {strategy} fast workers take more batches already: leave out --balance, which is for "
            "strategies in which workers step together, such as allreduce"
        )
    if strategy.traits.survives:
        raise UsageError(
            f"--balance needs workers that stay the same, and under {strategy} they may die and be replaced: "
            "leave it out, or use allreduce or local"
        )


def _check_models(plan: Plan, strategy: Strategy) -> None:
    """The workers must be enough for whole models, and those of a model at one site."""
    size = strategy.traits.model_size
    if plan.workers % size:
        fewer = plan.workers // size * size
        if not fewer:
            raise UsageError(
                f"{strategy} divides each model over {size} workers, and there are {plan.workers}: use "
                f"{size}, or fewer parts (polyrhythm plan SCRIPT --stages {size} says how many it can have)"
            )
        raise UsageError(
            f"{strategy} divides each model over {size} workers, and {plan.workers} is no multiple of "
            f"{size}: use {fewer} or {fewer + size} workers"
        )
    for name, ranks in plan.sites.items():
        if apart := {rank // size for rank in ranks} & {
            rank // size for other, theirs in plan.sites.items() if other != name for rank in theirs
        }:
            first = min(apart) * size
            raise UsageError(
                f"{strategy}: the workers {first} to {first + size - 1} hold one model, and are at two "
                f"sites; give each site a multiple of {size} workers"
            )


def _notes(plan: Plan, strategy: Strategy) -> tuple[str, ...]:
    codecs = [] if strategy.traits.uses_servers else [part.codec for part in strategy.parts]
    return tuple(
        f"{strategy}: in the ring, {codec.name} is decoded, added and encoded again at each hop"
        for codec in codecs
        if plan.collective == "ring" and codec is not None and codec.reduction is Reduction.HOPS
    )
