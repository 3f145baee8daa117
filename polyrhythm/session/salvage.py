"""Which parameters a worker can save when the run has failed, without help from other workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.core.errors import PolyrhythmError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.peer import Peer
    from polyrhythm.core.stopping import Stopping
    from polyrhythm.core.strategy import Strategy
    from polyrhythm.core.worker import Worker


SCRIPT = 1.0  # seconds for the script to come to a call of the session, which then saves


def salvage_beside(
    stopping: Stopping, salvage: Callable[[], None], say_where: Callable[[], None]
) -> Callable[[], None]:
    """A function for a thread of a run that has failed: saves what there is while the script is elsewhere.

    The script may be in an evaluation, or anywhere else where no call of the session can stop it. Others may
    have waited for it, so it says where that is.
    """

    def save() -> None:
        with contextlib.suppress(PolyrhythmError):  # there is nothing more that could be said or saved
            say_where()
            if not stopping.salvaging.wait(SCRIPT):
                salvage()

    return save


class Salvaged(NamedTuple):
    """The parameters of each part of the model as flat vectors, and whose they are."""

    parameters: Sequence[Sequence[Tensor]]
    source: str


def salvaged(
    strategy: Strategy, me: Peer, workers: Sequence[Worker], intact: bool, in_step: bool
) -> Salvaged | None:
    """The servers' parameters, or this worker's own if they are intact; None if there are none.

    `in_step`: an exchange in a step has failed, so the script has changed nothing since.
    """
    traits = strategy.traits
    if traits.uses_servers:
        with contextlib.suppress(PolyrhythmError):  # a server is gone too
            return Salvaged([worker.consensus() for worker in workers], "the servers")
    if not intact:
        return None
    together = traits.lockstep and traits.sync_period == 1 and len(strategy.parts) == 1
    equal = together and not traits.parameters_held_by_peers and not traits.uses_servers
    equal |= traits.steps_in_place
    own = [worker.replica.parameters for worker in workers]
    if not in_step and any(worker.replica.rewritten for worker in workers):
        return Salvaged(own, f"{me}, with what its script has written to it since the last step,")
    return Salvaged(own, "all workers" if equal else str(me))
