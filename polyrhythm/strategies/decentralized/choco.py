"""CHOCO-SGD: gossip through a codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.compress.replies import reply_codec
from polyrhythm.core.errors import UsageError
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import BLOCK, cloned, copied, difference
from polyrhythm.strategies.decentralized.mixing import mix
from polyrhythm.strategies.decentralized.neighbor_exchange import NeighborMixing, NeighborWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.sender import CompressedSender
    from polyrhythm.core.codec import Codec
    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.model.layout import Layout
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class Choco(NeighborMixing):
    r"""Gossip through a codec: neighbors send compressed differences to a public estimate (CHOCO-SGD).

    $$
    y_i &= x_i - \eta g_i(x_i) \\
    q_i &= Q(y_i - \hat{x}_i), \qquad \hat{x}_i \leftarrow \hat{x}_i + q_i \\
    x_i &\leftarrow y_i + \gamma \sum_j W_{ij} (\hat{x}_j - \hat{x}_i)
    $$

    $\hat{x}_i$ is the public estimate of worker $i$, held by itself and by its neighbors with the same bits.
    What the codec $Q$ leaves out remains in $y_i - \hat{x}_i$, so there is no residual. $Q$ must not lengthen
    a vector on average, so a codec takes the form that servers use for their replies. Stochastic rounding,
    for example, is replaced by rounding to the nearest value.

    - `gamma`: the consensus step size; auto: 1 without a codec, otherwise half of the energy that $Q$ keeps
      of random numbers. A larger one may do better for some models; with one that is too large the workers
      diverge.
    - `topology`: as for `gossip`, but neighbors must stay the same: not exponential

    >>> import polyrhythm as pr
    >>> pr.parse("choco:0.02,topology=torus+topk:0.01").gamma
    0.02
    """

    name: ClassVar[str] = "choco"
    main: ClassVar[str | None] = "gamma"
    codecs: ClassVar[bool] = True
    exchanges: ClassVar[Literal["gradients", "updates"]] = "updates"
    paper: ClassVar[str] = (
        "Koloskova, Stich, Jaggi 2019, Decentralized Stochastic Optimization and Gossip Algorithms with "
        "Compressed Communication"
    )

    gamma: Literal["auto"] | float = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma != "auto" and not 0 < self.gamma <= 1:
            raise UsageError("gamma must be auto, or more than 0 and at most 1")
        if self.topology == "exponential":
            raise UsageError(
                "neighbors that change by turns do not know what each has sent before; use "
                "topology=exponential-all"
            )

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return ChocoWorker(self, node, replica, group)

    def step_size(self, layout: Layout) -> float:
        """gamma for a model of this layout."""
        if self.gamma != "auto":
            return self.gamma
        if self.codec is None:
            return 1.0
        # Rounded, because all workers need the same value and processors may differ in the last bits.
        return float(f"{energy_kept(reply_codec(self.codec), layout) / 2:.3g}")


class ChocoWorker(NeighborWorker):
    """Publishes the difference between its parameters and its public estimate."""

    strategy: Choco
    exact: ClassVar[bool] = True

    def __init__(self, strategy: Choco, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.gamma = strategy.step_size(replica.layout)
        self.sender: CompressedSender | None = None
        if strategy.codec is not None:
            from polyrhythm.compress.sender import CompressedSender

            codec = reply_codec(strategy.codec)
            self.sender = CompressedSender(codec, node, replica, node.rank, group.size, feedback=False)
        self.estimate = replica.buffer(exact=True)  # h of this worker,
        self.estimates: dict[Peer, Sequence[Tensor]] = {}  # and of each neighbor
        self._difference: Sequence[Tensor] = ()

    def begin(self) -> None:
        super().begin()
        if not self.node.incarnation:  # all are equal, and know it
            for h in (self.estimate, *map(self.estimate_of, self.exchange.neighbors())):
                copied(self.replica.parameters, h)

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        super().on_membership(ranks, number)
        # New neighbors have no estimate of each other, so each publishes its whole parameters once.
        self.exchange.request(lambda _, peer: self.estimate_of(peer))
        self.exchange.publish(self.exchange.copy(copied(self.replica.parameters, self.estimate)))
        for _ in self.exchange.received():
            pass
        self.request()

    def step(self) -> None:
        with self.node.lock():
            self.replica.apply()
        self.exchange.publish(self.q())
        given = []
        for weight, fetch, message in self.exchange.received():
            h = self.estimate_of(fetch.publisher)
            self.add(message.tensors if self.sender else fetch.into, h)
            given.append((self.gamma * weight, h))
        with self.node.lock():
            mix(self.replica.parameters, self.estimate, given)
        self.request()

    def q(self) -> Sequence[Tensor]:
        """The codes to publish. It updates its own estimate by the same operations as the others."""
        self._difference = self._difference or self.replica.scratch(exact=True)
        new = difference(self.replica.parameters, self.estimate, self._difference)
        if self.sender is None:
            self.add(new, self.estimate)
            return self.exchange.copy(new)
        self.sender.check_update()
        compressor = self.sender.compressor()
        codes = compressor.encode_all(new)
        self.add(codes, self.estimate)
        return [
            code if segment.coded else code.clone()  # uncoded segments are views of `new`
            for code, segment in zip(codes, compressor.segments, strict=True)
        ]

    def add(self, q: Sequence[Tensor], h: Sequence[Tensor]) -> None:
        """h <- h + q."""
        if self.sender is not None:
            return self.sender.compressor().add(q, h)
        for place, new in zip(h, q, strict=True):
            place.add_(new)

    def into(self, number: int, peer: Peer) -> Sequence[Tensor]:
        # The length of a code is not known in advance.
        return super().into(number, peer) if self.sender is None else ()

    def estimate_of(self, neighbor: Peer) -> Sequence[Tensor]:
        if neighbor not in self.estimates:
            self.estimates[neighbor] = self.replica.buffer(exact=True)
        return self.estimates[neighbor]

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        self._difference = ()  # its memory is free between two steps
        return super().consensus(final)

    def state_dict(self) -> State:
        places = {rank: place for place, rank in enumerate(self.ranks)}
        near = self.exchange.neighbors()
        return {
            **super().state_dict(),
            "estimate": cloned(self.estimate),
            "estimates": {places[peer.rank]: cloned(self.estimates[peer]) for peer in near},
            "sender": None if self.sender is None else self.sender.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        copied(state["estimate"], self.estimate)
        places = {rank: place for place, rank in enumerate(self.ranks)}
        for peer in self.exchange.neighbors():
            copied(state["estimates"][places[peer.rank]], self.estimate_of(peer))
        if self.sender is not None:
            self.sender.load_state_dict(state["sender"])
        self.resume(state["round"], f"round {state['round']}")


def energy_kept(codec: Codec, layout: Layout) -> float:
    """The share of the squares that a codec keeps of random numbers, uniform or normal: the smaller."""
    import torch

    from polyrhythm.compress.compressor import Decompressor
    from polyrhythm.compress.segments import wide
    from polyrhythm.compress.state import CodecState

    least = 1.0
    for segment in Decompressor(codec, layout).coded:
        dtype, count = wide(layout.kinds[segment.part][0]), segment.high - segment.low
        for normal in (False, True):
            values = torch.empty(count, dtype=dtype)
            for start in range(0, count, BLOCK):  # a little at a time, because these are 64 bits wide
                part = values[start : start + BLOCK]
                numbers = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.float64)
                uniform = numbers.sin_().mul_(43758.5453).frac_()
                part.copy_(uniform.clamp_(-1 + 1e-9, 1 - 1e-9).erfinv_() if normal else uniform)
            state = CodecState.alone(count, feedback=False, shapes=segment.shapes, dtype=dtype)
            got = torch.zeros_like(values)
            codec.decode(codec.encode(values, state), got)
            missing = float(got.sub_(values).square_().sum() / values.square_().sum())
            least = min(least, 1 - missing)
    return max(least, 1e-3)
