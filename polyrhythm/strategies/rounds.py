"""Rounds of local steps: the base of local SGD, its relatives and the outer optimizers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import cloned, copied
from polyrhythm.strategies.reduce_ops import MeanReducer, agree

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class Rounds(Strategy):
    """Workers take `period` local steps, then synchronize.

    - `period`: local steps between two synchronizations
    """

    main: ClassVar[str | None] = "period"
    shows_main: ClassVar[bool] = True
    exchanges: ClassVar[Literal["gradients", "updates"]] = "updates"

    period: Literal["auto"] | int = 8

    def __post_init__(self) -> None:
        if self.period != "auto" and self.period < 1:
            raise UsageError("period must be 1 or more")

    @property
    def traits(self) -> Traits:
        period = None if self.period == "auto" else self.period
        return Traits(sync_period=period, inside_sites=True, between_sites=True)


class RoundsWorker(Worker):
    """Takes local steps and synchronizes at the end of each round."""

    strategy: Rounds

    def __init__(self, strategy: Rounds, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.reducer = MeanReducer(strategy.codec, node, replica, group)
        self.local_steps = 0  # since the last synchronization

    def step(self) -> None:
        self.replica.apply()
        self.local_steps += 1
        if self.due():
            self.synchronize()

    def finish(self) -> None:
        if self.local_steps:
            self.synchronize(full=True)

    def due(self) -> bool:
        """True if the step that has just been taken is the last of its round."""
        assert self.strategy.period != "auto"
        return self.local_steps >= self.strategy.period

    def synchronize(self, full: bool = False) -> None:
        """Makes all workers equal; `full`: exactly, so the codec may not leave anything out."""
        self.local_steps = 0

    @property
    def replicas_equal(self) -> bool:
        return not self.local_steps

    def state_dict(self) -> State:
        # In the middle of a round each worker has parameters of its own, and a run starts with the first's.
        own = cloned(self.replica.parameters) if self.local_steps else []
        return {"local_steps": self.local_steps, "parameters": own, "reducer": self.reducer.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.local_steps = state["local_steps"]
        if self.local_steps:
            copied(state["parameters"], self.replica.parameters)
        self.reducer.load_state_dict(state["reducer"])


@dataclass(frozen=True)
class Averaging(Rounds):
    """At the end of a round all workers take the mean of their parameters.

    With a codec, workers send updates: how their parameters changed since the last synchronization. The part
    that the codec leaves out is sent in later rounds. The last synchronization of a run, and `consensus()`,
    do not use the codec.

    - `momentum`: what becomes of the optimizer's state (momentum, Adam's moments) at a synchronization: each
      worker keeps its own, all take the average, or all reset it
    """

    codecs: ClassVar[bool] = True

    momentum: Literal["keep", "average", "reset"] = "keep"

    @property
    def traits(self) -> Traits:
        period = None if self.period == "auto" else self.period
        return Traits(
            sync_period=period,
            inside_sites=True,
            between_sites=True,
            identical_optimizers=self.momentum != "keep",
            averages_optimizers=self.momentum == "average",
        )

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return AveragingWorker(self, node, replica, group)


class AveragingWorker(RoundsWorker):
    """Averages parameters, and the state of the optimizers if momentum=average."""

    strategy: Averaging

    def __init__(self, strategy: Averaging, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        # Updates count from here: the parameters at the last synchronization.
        self.base = replica.buffer() if self.sends_updates else ()
        self._moments: list[str] = []  # what all optimizers keep for each element

    @property
    def sends_updates(self) -> bool:
        """False if the parameters themselves are averaged."""
        return self.strategy.codec is not None

    def on_gradient(self) -> None:
        if self.sends_updates and self.local_steps == 0:
            copied(self.replica.parameters, self.base)

    def synchronize(self, full: bool = False) -> None:
        replica, momentum = self.replica, self.strategy.momentum
        names = self._moment_names() if momentum == "average" else []
        if names:
            moments, held = replica.optimizer_state.flat(names)
            self.mean([*replica.parameters, *moments], held, full=full)
            replica.optimizer_state.adopt(names)
        else:
            self.mean(replica.parameters, full=full)
        if momentum == "reset":
            replica.optimizer_state.forget()
        super().synchronize(full)

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        if not self.local_steps:
            return self.replica.parameters
        average = copied(self.replica.parameters, self.replica.consensus_vectors())
        self.mean(average, full=True)
        return average

    def mean(self, vectors: Sequence[Tensor], *flags: Tensor, full: bool = False) -> None:
        """Replaces each vector, the parameters and what follows them, by its mean over the workers."""
        if not self.sends_updates:
            return self.reducer.mean(vectors, *flags)
        own, others = vectors[: len(self.base)], vectors[len(self.base) :]
        self.reducer.check_update()
        # A mean of updates leaves what nobody has moved where it is, to the last bit.
        for part, base in zip(own, self.base, strict=True):
            part.sub_(base)
        weight = self.weight()
        if weight is not None:
            for part in vectors:
                part.mul_(weight)
        try:
            self.reducer.mean(own, *others, *flags, full=full)
        except BaseException as error:
            copied(self.base, own)  # the script may save the model
            if isinstance(error, PeerLost):
                error.untouched = True
            raise
        for part, base in zip(own, self.base, strict=True):
            part.add_(base)

    def weight(self) -> float | None:
        """The weight of this worker in the mean; None on all workers if all weights are equal."""
        return None

    def _moment_names(self) -> list[str]:
        """What all optimizers keep for each element. Agreed once all have taken a step."""
        if not self._moments:
            mine = self.replica.optimizer_state.names()
            number = float(zlib.crc32(" ".join(mine).encode())) if mine else 0.0
            least, most = agree(self.group, number, -number, op="min")
            if least == 0:
                return []  # some optimizer has nothing to average yet
            if least != -most:
                raise PolyrhythmError(
                    f"{self.strategy}: {self.node.me}'s optimizer state has {', '.join(mine)}; another "
                    "worker's differs; use the same optimizer on all workers"
                )
            self._moments = mine
        return self._moments

    def state_dict(self) -> State:
        base = cloned(self.base) if self.local_steps else []
        return {**super().state_dict(), "base": base, "moments": list(self._moments)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if state["base"]:
            copied(state["base"], self.base)
        self._moments = list(state["moments"])
