"""CHOCO-SGD: gossip in code. What each has told of itself so far, its neighbours know to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.compress.replies import reply_codec
from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.decentralized.neighbor_exchange import Mixing, board_of, pull, spare
from polyrhythm.strategies.legacy_ops import check_way, sender_of

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Compressor
    from polyrhythm.core.codec import Codec
    from polyrhythm.core.node import Node
    from polyrhythm.model.layout import Layout
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class Choco(Mixing):
    """Gossip in code: neighbours tell each other only what is new, and mix what all know (CHOCO-SGD).

        y_i = x_i - lr g_i(x_i);  q_i = Q(y_i - h_i);  all neighbours h_i <- h_i + q_i
        x_i = y_i + gamma sum_j W_ij (h_j - h_i)

    h_i is what worker i has told of itself, kept alike by itself and by its neighbours. What Q leaves out is
    in y_i - h_i still, so nothing else is remembered. Q may not make that longer, on average: so a codec is
    taken in the form in which a server answers, which for one that rounds by lot is another. `gamma=auto` is
    1 without a codec; with a codec it is half of what Q keeps of random numbers. A larger one may do better
    for some model; with one that is too large the workers part. W follows from `topology`, as for `gossip`,
    but neighbours have to stay the same: not exponential.

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
                "neighbours by turns do not know what each has told; take topology=exponential-all"
            )

    def begin(self, node: Node, replica: Replica) -> None:
        super().begin(node, replica)
        replica.notes["gamma"] = self._gamma(replica.layout)
        if not node.incarnation:  # all are equal, and know it
            for rank in (None, *(peer.rank for peer in board_of(replica).neighbours(0))):
                copied(replica.parameters, told(replica, rank))
            self._ask(replica)

    def regroup(self, node: Node, replica: Replica, ranks: Sequence[int], number: int) -> None:
        super().regroup(node, replica, ranks, number)
        board = board_of(replica)
        # New neighbours know nothing of each other: once they tell all.
        board.request(lambda _, peer: told(replica, peer.rank))
        board.show(spare(replica, copied(replica.parameters, told(replica)), exact=True))
        for _ in board.answers():
            pass
        self._ask(replica)

    def step(self, node: Node, replica: Replica) -> None:
        with node.lock():
            replica.apply()
        board, own = board_of(replica), told(replica)
        board.show(self._news(node, replica, own))
        given = []
        for number, weight, message in board.answers():
            theirs = told(replica, message.sender.rank)
            if self.codec is None:
                _add(replica.buffer(f"news {number}", exact=True), theirs)
            else:
                self._sender(node, replica).add(message.tensors, theirs)
            given.append((replica.notes["gamma"] * weight, theirs))
        with node.lock():
            pull(replica.parameters, own, given)
        self._ask(replica)

    def _news(self, node: Node, replica: Replica, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """What this worker tells in this round. It takes it in by the very operations by which others do."""
        news = replica.buffer("news", exact=True)
        for place, mine, known in zip(news, replica.parameters, own, strict=True):
            place.copy_(mine).sub_(known)
        if self.codec is None:
            _add(news, own)
            return spare(replica, news, exact=True)
        check_way(node, replica, self.codec)
        sender = self._sender(node, replica)
        given = sender.encode_all(news)
        sender.add(given, own)
        return [
            code if segment.coded else code.clone()  # what travels as it is lies in `news`
            for code, segment in zip(given, sender.segments, strict=True)
        ]

    def _ask(self, replica: Replica) -> None:
        if self.codec is None:
            board_of(replica).request(lambda number, _: replica.buffer(f"news {number}", exact=True))
        else:
            board_of(replica).request()  # nobody knows how long a code will be

    def _sender(self, node: Node, replica: Replica) -> Compressor:
        assert self.codec is not None
        return sender_of(node, replica, reply_codec(self.codec), feedback=False)

    def _gamma(self, layout: Layout) -> float:
        if self.gamma != "auto":
            return self.gamma
        # Rounded, for all must have the same, whatever their processors make of the last bits.
        return 1.0 if self.codec is None else float(f"{kept(reply_codec(self.codec), layout) / 2:.3g}")


def told(replica: Replica, rank: int | None = None) -> tuple[Tensor, ...]:
    """h: what this worker has told, or one of its neighbours. By such names what codecs keep is saved."""
    return replica.buffer("sent: told" if rank is None else f"sent: told by {rank}", exact=True)


def kept(codec: Codec, layout: Layout) -> float:
    """The share of the squares that a codec keeps of random numbers, flat or normal, where it keeps least."""
    import torch

    from polyrhythm.compress.compressor import Decompressor
    from polyrhythm.compress.segments import wide
    from polyrhythm.compress.state import CodecState

    least = 1.0
    for segment in Decompressor(codec, layout).coded:
        dtype, count = wide(layout.kinds[segment.part][0]), segment.high - segment.low
        flat = torch.arange(1, count + 1, dtype=torch.float64).sin().mul(43758.5453).frac()
        for drawn in (flat, flat.clamp(-1 + 1e-9, 1 - 1e-9).erfinv()):
            values = drawn.to(dtype)
            state = CodecState.alone(count, feedback=False, shapes=segment.shapes, dtype=dtype)
            got = torch.zeros_like(values)
            codec.decode(codec.encode(values, state), got)
            missing = float((values - got).square().sum() / values.square().sum())
            least = min(least, 1 - missing)
    return max(least, 1e-3)


def _add(news: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    for place, new in zip(known, news, strict=True):
        place.add_(new)
