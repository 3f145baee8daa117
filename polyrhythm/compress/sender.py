"""CompressedSender: sends a worker's vectors through a codec, and keeps the codec's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyrhythm.compress.compressor import Compressor
from polyrhythm.compress.feedback import ResidualRates
from polyrhythm.compress.state import SenderState
from polyrhythm.compress.transforms.base import check_optimizer
from polyrhythm.model.vectors import cut

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.codec import Codec
    from polyrhythm.core.node import Node
    from polyrhythm.core.worker import State
    from polyrhythm.model.replica import Replica


class CompressedSender:
    """Sends ranges of a replica's flat vectors through a codec, and keeps the residual.

    `rank` and `workers` are the place of the sender among those that send, and their number: random codecs
    draw differently on each.
    """

    def __init__(
        self,
        codec: Codec,
        node: Node,
        replica: Replica,
        rank: int,
        workers: int,
        feedback: bool | None = None,
    ) -> None:
        check_optimizer(codec, replica.optimizer.param_groups)
        self.codec, self.replica = codec, replica
        self.state = SenderState(replica.layout, replica.empty, seed=node.seed, worker=rank, workers=workers)
        self._me, self._whole_norm = node.me, node.whole_norm
        self._feedback = codec.feedback if feedback is None else feedback
        self._compressors: dict[tuple[int, int | None], Compressor] = {}
        self._rates = ResidualRates()

    def compressor(self, start: int = 0, stop: int | None = None) -> Compressor:
        """Compresses a range of the flat vectors."""
        if (start, stop) not in self._compressors:
            self._compressors[start, stop] = Compressor(
                self.codec, self.state, start=start, stop=stop, feedback=self._feedback,
                whole_norm=self._whole_norm,
            )  # fmt: skip
        return self._compressors[start, stop]

    @property
    def residual(self) -> tuple[Tensor, ...]:
        """The part of this worker's updates that has not been sent yet."""
        return self.state.vector("residual")

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter group that the residual is measured by."""
        groups = self.replica.optimizer.param_groups
        return self._rates.rates or [float(group.get("lr", 0.0)) for group in groups]

    def rescale(self) -> None:
        """Scales the residual of gradients after SGD's learning rate has changed."""
        optimizer = self.replica.optimizer
        if not isinstance(optimizer, torch.optim.SGD) or not self.codec.feedback:
            return
        factors = self._rates.change([float(group["lr"]) for group in optimizer.param_groups])
        if all(factor == 1 for factor in factors):
            return
        residual = self.residual
        for span in self.replica.spans(whole=True):
            span.of(residual).mul_(factors[span.group])

    def check_update(self, start: int = 0, stop: int | None = None) -> None:
        """Raises `NotFinite` if this worker's parameters are not finite: a codec would hide that."""
        replica = self.replica
        own = replica.parameters if stop is None else cut(replica.parameters, start, stop)
        replica.layout.check_finite(own, f"{self._me} at step {replica.steps}", start, stop)

    def state_dict(self) -> State:
        return {**self.state.state_dict(), "rates": list(self._rates.rates)}

    def load_state_dict(self, state: State) -> None:
        self.state.load_state_dict(state)
        self._rates = ResidualRates(state["rates"])
