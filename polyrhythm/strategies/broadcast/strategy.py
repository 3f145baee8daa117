"""Broadcast: every worker sends pulses of one size to all others, and no worker waits for another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.compress.codecs.threshold import LARGEST, SMALLEST
from polyrhythm.compress.kernels import selection
from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.events import ResidualLeft
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import cloned, copied
from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog, digest
from polyrhythm.strategies.broadcast.reliable_broadcast import ReliableBroadcast
from polyrhythm.strategies.broadcast.warmup import WarmUp
from polyrhythm.strategies.call_numbers import CallNumbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.model.replica import Replica

MAX_PULSES = 1 << 30  # of a parameter, in all


@dataclass(frozen=True)
class Broadcast(Strategy):
    r"""Each worker sends updates that have grown to ±tau to all others, without waiting (Strom).

    $$
    r &\leftarrow r + u, \qquad m = \operatorname{trunc}(r / \tau) \\
    r &\leftarrow r - \tau m, \qquad k \leftarrow k + m \text{ on all workers} \\
    w &= w_0 + \tau k
    $$

    Here $u$ is the step of the worker's own optimizer and $r$ its residual. All workers, the sender too,
    apply every message; $k$ counts the pulses of all. Counts are integers, so the order of messages does not
    matter: workers that have received the same messages have the same bits. $\tau$ is rounded to a power of
    two, so that $r$ loses nothing to rounding.

    The paper has plain SGD. Momentum is part of $u$: it is taken of each worker's own gradients, before they
    become pulses, and $r$ delays updates on top of it. At the end $r$ is not sent.

    Messages are numbered, and kept until all workers have confirmed them (see `reliable_broadcast`). A worker
    that missed some, because the sender died before it had sent to all, gets them from others; a replacement
    takes $w_0$ and $k$ from another worker. The network is behind while more is unconfirmed than $k$ has
    bytes, divided by the number of workers, and than 1 MiB and 32 messages. Then updates stay in $r$, for up
    to 16 steps, and go in one message. Messages that a worker does not confirm are merged, by origin, into
    one or two that are no longer than $k$.

    All workers call `session.consensus()` and `session.state_dict()` at the same places, and wait there until
    all know the same messages. So the consensus is one model, and as $k$ is saved with $r$, no pulse is lost
    and none counts twice. A replacement skips the places where the others were before it joined. These calls
    end the warm-up, and so does any in which workers wait for each other, such as `session.mean()`; a resumed
    run has none.

    - `tau`: the size of a pulse
    - `pulses`: many: send all whole multiples of tau, so that $r$ stays below tau; one, as in the paper: send
      at most one pulse, so $r$ falls behind for as long as steps are larger than tau
    - `reduce`: sum: N workers take N steps, so the learning rate acts as if it were N times as large; mean:
      divide each step by the number of workers
    - `topology`: mesh: send to all workers; tree: send to up to `fanout` + 1 neighbors, which forward it
    - `fanout`: the children of a worker in the tree
    - `warmup`: for so many steps only the `first` workers train, and the others follow
    - `first`: the number of workers that train in the warm-up

    >>> import polyrhythm as pr
    >>> pr.parse("broadcast:0.001,topology=tree").unit == 2**-10
    True
    """

    name: ClassVar[str] = "broadcast"
    main: ClassVar[str | None] = "tau"
    paper: ClassVar[str] = "Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing"

    tau: float = 1e-3
    pulses: Literal["one", "many"] = "many"
    reduce: Literal["sum", "mean"] = "sum"
    topology: Literal["mesh", "tree"] = "mesh"
    fanout: int = 2
    warmup: int = 0
    first: int = 1

    def __post_init__(self) -> None:
        if not SMALLEST <= self.tau <= LARGEST:
            raise UsageError("tau must be more than 0, as in 0.001 (and from 2^-100 to 2^100)")
        if self.fanout < 1:
            raise UsageError("fanout must be 1 or more: that many others pass a message on")
        if self.warmup < 0:
            raise UsageError("warmup must be 0 or more steps")
        if self.first < 1:
            raise UsageError("first must be 1 or more: some worker has to train")

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=False,
            parameters_held_by_peers=True,
            rebuilds_parameters=True,
            one_optimizer=self.warmup > 0,
        )

    def check(self, plan: Plan) -> None:
        if self.first > plan.workers:
            raise UsageError(f"{self}: first is at most {plan.workers}, the number of workers")
        if self.first > 1 and not self.warmup:
            raise UsageError(f"{self}: first needs a warmup; set its steps, as in warmup=100")
        if self.fanout != type(self).fanout and self.topology != "tree":
            raise UsageError(f"{self}: fanout needs topology=tree; in a mesh each worker sends to all others")

    @property
    def unit(self) -> float:
        """The size of a pulse: the power of two next to tau."""
        return float(2.0 ** round(math.log2(self.tau)))

    def prepare(self, dtype: torch.dtype) -> None:
        import torch

        selection.warm_counts(torch.float32 if dtype.itemsize < 4 else dtype)

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return BroadcastWorker(self, node, replica, group)


class BroadcastWorker(Worker):
    """Turns its updates into pulses, and applies the pulses of all workers."""

    strategy: Broadcast

    def __init__(self, strategy: Broadcast, node: Node, replica: Replica, group: Group) -> None:
        import torch

        super().__init__(strategy, node, replica, group)
        self.base = replica.buffer(exact=True)  # w0
        self.residual = replica.buffer(exact=True)  # r
        self.update: Sequence[Tensor] = ()  # u
        kinds = zip(replica.layout.kinds, replica.layout.counts, strict=True)
        counts = [torch.zeros(count, dtype=torch.int32, device=device) for (_, device), count in kinds]  # k
        fanout = strategy.fanout if strategy.topology == "tree" else None
        log, calls = DeliveryLog(counts, strategy.unit), CallNumbers(replica)
        self.broadcast = ReliableBroadcast(node, log, self.base, fanout, calls)
        self.warmup = WarmUp(node, replica, strategy.warmup, strategy.first)

    # --- start --------------------------------------------------------------------------------------

    def start(self) -> None:
        node, replica, strategy = self.node, self.replica, self.strategy
        for dtype, _ in replica.layout.kinds:
            strategy.prepare(dtype)
        if not node.incarnation:
            self.group.broadcast(*replica.parameters)
        copied(replica.parameters, self.base)
        later = self.warmup.follows or bool(node.incarnation)
        if not later:
            # Before it replies to requests: another worker may already be at its first snapshot.
            self.broadcast.barrier.begin(later=False)
        node.subscribe(self.on_message, *WarmUp.kinds, *ReliableBroadcast.kinds)
        if node.incarnation:
            self.broadcast.catch_up()
        if self.warmup.follows:
            self.warmup.wait()
        if later:
            self.broadcast.barrier.begin(later=True)
        self.warmup.begin()
        self._write_parameters(replica.parameters)

    def on_message(self, message: Message | None) -> None:
        """Takes a message of another worker; None if a worker joined or left."""
        if message is None or message.kind in WarmUp.kinds:
            self.warmup.on_message(message)
        if message is None or message.kind not in WarmUp.kinds:
            self.broadcast.on_message(message)

    # --- the step -----------------------------------------------------------------------------------

    def step(self) -> None:
        self.broadcast.resumed.check()
        self._compute_update()
        codes = self._emit()
        if codes:
            self.broadcast.add(codes)
        self._write_parameters(self.replica.parameters)
        if codes:
            self.broadcast.publish()
        self.warmup.tell()

    def _compute_update(self) -> None:
        """u: the optimizer's step from the present parameters."""
        import torch

        replica = self.replica
        update = self.update = self.update or replica.scratch(exact=True)
        copied(replica.parameters, update)
        replica.apply()
        for place, after in zip(update, replica.parameters, strict=True):
            torch.sub(after, place, out=place)
        if self.strategy.reduce == "mean":
            training = self.warmup.training(len(self.broadcast.topology.everyone))
            for part in update:
                part.div_(training)
        replica.layout.check_finite(update, f"{self.node.me}, step {replica.steps}")

    def _emit(self) -> list[Tensor]:
        """r <- r + u, less the pulses that are returned, one code per vector; empty if there are none."""
        pairs = zip(self.residual, self.update, strict=True)
        if self.broadcast.behind():
            for residual, part in pairs:
                residual.add_(part)
            return []
        many = self.strategy.pulses == "many"
        found = [selection.pulses(*pair, self.strategy.unit, many=many) for pair in pairs]
        return [code for code, _ in found] if any(count for _, count in found) else []

    def _write_parameters(self, into: Sequence[Tensor]) -> Sequence[Tensor]:
        """w = w0 + tau k."""
        unit, most = self.strategy.unit, 0
        with self.node.lock():
            for base, count, place in zip(self.base, self.broadcast.log.counts, into, strict=True):
                most = max(most, selection.add_counts(base, count, unit, place))
        if most >= MAX_PULSES:
            raise PolyrhythmError(
                f"{self.node.me}: a parameter is {most} pulses from its initial value: training has "
                f"diverged, or tau ({unit:.3g}) is too small"
            )
        return into

    # --- finish -------------------------------------------------------------------------------------

    def finish(self) -> None:
        import torch

        broadcast = self.broadcast
        self.warmup.end()
        broadcast.barrier.end()
        norm = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in self.residual))
        self.node.log(ResidualLeft(broadcast.sent, self.strategy.unit, norm))
        broadcast.settling.settle({broadcast.origin: broadcast.sent})

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        """The parameters when all workers have come here and have all pulses, so all get the same.

        A replacement that runs through past epochs does not wait: it has the pulses that it knows now.
        """
        self.update = ()  # its memory is free between two steps
        into, barrier = self.replica.consensus_vectors(), self.broadcast.barrier
        if final:
            self.broadcast.settling.agree()
        elif barrier.come(join=True):
            self.warmup.wait_for_all()
            barrier.take(lambda: self._write_parameters(into))
            return into
        return self._write_parameters(into)

    # --- saving -------------------------------------------------------------------------------------

    def on_meeting(self) -> None:
        self.warmup.end()  # the workers that follow come to this point only after it

    def state_dict(self) -> State:
        barrier, state = self.broadcast.barrier, State()
        if not barrier.come():  # a replacement runs through epochs that are over
            return state
        self.warmup.wait_for_all()

        def save() -> None:
            state["base"] = cloned(self.base)
            state["counts"] = cloned(self.broadcast.log.counts)

        barrier.take(save)
        state["residual"] = cloned(self.residual)
        self._write_parameters(self.replica.parameters)
        return state

    def load_state_dict(self, state: State) -> None:
        if not state:
            raise UsageError(
                "this state holds no pulses: it was saved by a worker that had just joined. A run cannot "
                "continue from it; leave session.load_state_dict() out, and training starts from the saved "
                "model"
            )
        if self.replica.steps:
            raise UsageError(
                "session.load_state_dict() must come before the first step: other workers rely on it"
            )
        log = self.broadcast.log
        self.warmup.end()
        copied(state["residual"], self.residual)
        with self.node.lock():
            copied(state["base"], self.base)
            self.broadcast.resumed.mine = digest(*state["base"], *state["counts"])[:16]
            for place, saved in zip(log.counts, state["counts"], strict=True):
                place.add_(saved.to(place.device))  # pulses of other workers may have arrived already
        self.broadcast.recovery.tell()
        self._write_parameters(self.replica.parameters)
