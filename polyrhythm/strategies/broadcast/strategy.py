"""Broadcast: everybody tells everybody, in pulses of one size, and nobody waits for anybody."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polyrhythm.compress.codecs.threshold import LARGEST, SMALLEST
from polyrhythm.compress.kernels import selection
from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError
from polyrhythm.core.events import ResidualLeft
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog, digest
from polyrhythm.strategies.broadcast.reliable_broadcast import ReliableBroadcast
from polyrhythm.strategies.decentralized.base import Peers, others

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica

MOST = 1 << 30  # pulses of a parameter, in all


@dataclass(frozen=True)
class Broadcast(Peers):
    """Each worker sends what has grown to ±tau, as pulses, to all others, and waits for nobody (Strom).

    u = the step of the worker's own optimizer; r <- r + u; where |r_j| >= tau: sends (j, ±m), r_j <- r_j -+ m
    tau. Everybody, the sender too, applies every message: w = w0 + tau k, where k counts the pulses of all.
    Counts are whole numbers, so it does not matter in which order messages come: workers that have got the
    same ones have the same bits. What is used as tau is the power of two next to it, for then r loses nothing
    by rounding.

    - `pulses=many` sends all whole multiples of tau, so |r| stays below tau. With `one`, as in the paper, r
      falls behind for as long as steps are larger than tau.
    - `reduce=sum`: N workers take N steps, so the learning rate acts as if it were N times as large; `mean`
      divides each step by the number of workers.
    - `topology=tree`: a message goes to up to `fanout` + 1 neighbours in a tree, and they pass it on.
    - `warmup`: so many steps only the `first` workers train, and the others follow.

    The paper has plain SGD. Momentum is part of u: it is taken of each worker's own gradients, before they
    become pulses, and what waits in r comes late on top of it. At the end r is not sent.

    Messages are numbered, and kept until all have confirmed them (see `courier`). Whoever has missed some,
    since another died before it had sent to all, gets them from others; one that comes late takes w0 and k
    from another. While more is unconfirmed than k has bytes, divided by the number of workers, and than 1 MiB
    and 32 messages, the network is behind: then what would be sent stays in r, for up to 16 steps, and goes
    in one message. What one that does not answer has not confirmed is merged, by origin, into a message or
    two that are no longer than k.

    To save its state all workers call `session.state_dict()` at the same place, and wait there until all know
    the same: k is saved with r, so nothing is lost by it, and nothing counts twice. One that came late passes
    by the places where the others have saved before. A run that is resumed has its warm-up again.

    >>> import polyrhythm as pr
    >>> pr.parse("broadcast:0.001,topology=tree").unit == 2**-10
    True
    """

    name: ClassVar[str] = "broadcast"
    main: ClassVar[str | None] = "tau"
    paper: ClassVar[str] = "Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing"
    kinds: ClassVar[tuple[str, ...]] = ("begin", *ReliableBroadcast.kinds)

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
            raise UsageError("first must be 1 or more: somebody has to train")

    def check_counts(self, workers: int, servers: int) -> None:
        if self.first > workers:
            raise UsageError(f"{self}: first is at most {workers}, for there are no more workers")
        if self.first > 1 and not self.warmup:
            raise UsageError(f"{self}: first is for a warmup; say for how many steps, as in warmup=100")
        if self.fanout != type(self).fanout and self.topology != "tree":
            raise UsageError(f"{self}: fanout is for topology=tree; in a mesh each sends to all others")

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def unit(self) -> float:
        """The size of a pulse: the power of two next to tau."""
        return float(2.0 ** round(math.log2(self.tau)))

    def prepare(self, dtype: torch.dtype) -> None:
        import torch

        selection.warm_counts(torch.float32 if dtype.itemsize < 4 else dtype)

    # --- how it begins ------------------------------------------------------------------------------

    def start(self, node: Node, replica: Replica) -> None:
        import torch

        for dtype, _ in replica.layout.kinds:
            self.prepare(dtype)
        if not node.incarnation:
            node.group().broadcast(*replica.parameters)
        base = replica.buffer("base", exact=True)
        copied(replica.parameters, base)
        kinds = zip(replica.layout.kinds, replica.layout.counts, strict=True)
        counts = [torch.zeros(count, dtype=torch.int32, device=device) for (_, device), count in kinds]
        fanout = self.fanout if self.topology == "tree" else None
        courier = ReliableBroadcast(node, DeliveryLog(counts, self.unit), base, fanout)
        replica.notes.update(courier=courier, done=False, begin=[])
        _refuse_loading(replica)
        node.subscribe(partial(self.hear, node, replica), *self.kinds)
        if node.incarnation:
            courier.catch_up()

    def enter(self, node: Node, replica: Replica) -> None:
        waits = bool(self.warmup) and node.rank >= self.first
        if waits:
            self._wait_for_the_first(node)
        _courier(replica).rest.begin(later=waits or bool(node.incarnation))
        self._place(node, replica, replica.parameters)

    def _wait_for_the_first(self, node: Node) -> None:
        """Others are to train for some steps before this one does."""
        while True:
            before = [peer for peer in others(node) if peer < node.me]
            if not before:
                return
            try:
                if node.request(before[0], "begin").wait()["now"]:
                    return
            except PeerLost:  # the next one is the first then
                continue

    def hear(self, node: Node, replica: Replica, message: Message | None) -> None:
        notes = replica.notes
        if message is not None and message.kind == "begin":
            with node.lock():
                notes["begin"].append(message)
            if self._may_begin(replica):
                self._let_begin(node, replica)
            return
        if message is None:
            with node.lock():
                notes["begin"] = [asked for asked in notes["begin"] if node.members.alive(asked)]
        _courier(replica).hear(message)

    def _may_begin(self, replica: Replica) -> bool:
        return bool(replica.notes["done"] or replica.steps >= self.warmup)

    def _let_begin(self, node: Node, replica: Replica) -> None:
        """Answers those who wait to begin; who may not yet asks again."""
        with node.lock():
            asked, replica.notes["begin"] = replica.notes["begin"], []
        for message in asked:
            node.reply(message, now=self._may_begin(replica))

    # --- what is saved ------------------------------------------------------------------------------

    def keep(self, node: Node, replica: Replica) -> dict[str, Any]:
        if not _courier(replica).rest.come():  # it runs through epochs that are over
            return {}
        kept: dict[str, Any] = {}
        base, ledger = replica.buffer("base", exact=True), _courier(replica).ledger

        def note() -> None:
            kept["base"] = [part.clone() for part in base]
            kept["counts"] = [part.clone() for part in ledger.counts]

        _courier(replica).rest.take(note)
        self._place(node, replica, replica.parameters)
        return kept

    def resume(self, node: Node, replica: Replica, kept: dict[str, Any]) -> None:
        if not kept:
            raise UsageError(
                "this state has no pulses in it, for it was saved by a worker that had just come, or by an "
                "older version: a run cannot go on with it; leave session.load_state_dict() out, and it "
                "begins anew with the model that was saved"
            )
        if replica.steps:
            raise UsageError("session.load_state_dict() comes before the first step: others count on it")
        courier = _courier(replica)
        with node.lock():
            copied(kept["base"], replica.buffer("base", exact=True))
            courier.began = digest(*kept["base"], *kept["counts"])[:16]
            for place, saved in zip(courier.ledger.counts, kept["counts"], strict=True):
                place.add_(saved.to(place.device))  # pulses of others may have come already
        courier.tell()
        self._place(node, replica, replica.parameters)

    # --- a step -------------------------------------------------------------------------------------

    def step(self, node: Node, replica: Replica) -> None:
        courier = _courier(replica)
        courier.check()
        codes = self._emit(node, replica, self._update(node, replica))
        if codes:
            courier.enter(codes)
        self._place(node, replica, replica.parameters)
        if codes:
            courier.publish()
        self._let_begin(node, replica)

    def _update(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """u: where the optimizer's step leads from the present parameters."""
        import torch

        update = replica.buffer("update", exact=True)
        copied(replica.parameters, update)
        replica.apply()
        for place, after in zip(update, replica.parameters, strict=True):
            torch.sub(after, place, out=place)
            if self.reduce == "mean":
                place.div_(self._training(node, replica))
        replica.layout.check_finite(update, f"{node.me}, step {replica.steps}")
        return update

    def _training(self, node: Node, replica: Replica) -> int:
        """How many workers train."""
        count = len(_courier(replica).everybody)
        first = (
            node.rank < self.first and not node.incarnation
        )  # one that comes late finds the others training
        return min(count, self.first) if first and replica.steps <= self.warmup else count

    def _emit(self, node: Node, replica: Replica, update: Sequence[Tensor]) -> list[Tensor]:
        """r <- r + u, and the pulses that are taken out of it; none if there are none."""
        if _courier(replica).behind():
            for residual, part in zip(replica.residual, update, strict=True):
                residual.add_(part)
            return []
        pairs = zip(replica.residual, update, strict=True)
        found = [selection.pulses(*pair, self.unit, many=self.pulses == "many") for pair in pairs]
        return [code for code, _ in found] if any(count for _, count in found) else []

    def _place(self, node: Node, replica: Replica, into: Sequence[Tensor]) -> Sequence[Tensor]:
        """w = w0 + tau k."""
        most, base, counts = 0, replica.buffer("base", exact=True), _courier(replica).ledger.counts
        with node.lock():
            for start, count, place in zip(base, counts, into, strict=True):
                most = max(most, selection.place(start, count, self.unit, place))
        if most >= MOST:
            raise PolyrhythmError(
                f"{node.me}: a parameter is {most} pulses from where it began: training has diverged, or tau "
                f"({self.unit:.3g}) is too small"
            )
        return into

    # --- how it ends --------------------------------------------------------------------------------

    def finish(self, node: Node, replica: Replica) -> None:
        import torch

        courier = _courier(replica)
        replica.notes["done"] = True
        self._let_begin(node, replica)
        courier.rest.end()
        waits = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in replica.residual))
        node.log(ResidualLeft(courier.sent, self.unit, waits))
        courier.settle({courier.origin: courier.sent})

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """Nobody trains any longer: once all have everything, all have the same."""
        _courier(replica).agree()
        return self.consensus(node, replica)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """What this worker knows now. The others may know more, but none knows anything else."""
        return self._place(node, replica, replica.buffer("consensus"))


def _courier(replica: Replica) -> ReliableBroadcast:
    courier = replica.notes["courier"]
    assert isinstance(courier, ReliableBroadcast)
    return courier


def _refuse_loading(replica: Replica) -> None:
    """What is loaded into one replica would be lost at its next step, which makes it anew from the pulses."""

    def refuse(what: object, *_: object) -> None:
        if what is replica.model:
            raise UsageError("load_state_dict() comes before session.prepare(): all replicas start from it")

    replica.model.register_load_state_dict_post_hook(refuse)  # type: ignore[no-untyped-call]
