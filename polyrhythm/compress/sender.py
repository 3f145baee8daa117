"""CompressedSender: what a worker sends through a codec, and the residuals that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyrhythm.compress.state import SenderState
from polyrhythm.model.vectors import cut

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Compressor
    from polyrhythm.core.codec import Codec
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


class CompressedSender:
    """Sends ranges of a replica's flat vectors through a codec, and keeps what was not sent.

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
        codec.check_groups(replica.optimizer.param_groups)
        self.codec, self.replica = codec, replica
        self.state = SenderState(replica.layout, replica.empty)
        self._me, self._seed, self._rank, self._workers = node.me, node.seed, rank, workers
        self._feedback = codec.feedback if feedback is None else feedback
        self._compressors: dict[tuple[int, int | None], Compressor] = {}
        self._rates: list[float] = []  # the learning rates that the residual is measured by

    def compressor(self, start: int = 0, stop: int | None = None) -> Compressor:
        """Compresses a range of the flat vectors."""
        from polyrhythm.compress.compressor import Compressor

        if (start, stop) not in self._compressors:
            self._compressors[start, stop] = Compressor(
                self.codec, self.replica.layout, self.state, "sent", start=start, stop=stop,
                feedback=self._feedback, seed=self._seed, worker=self._rank, workers=self._workers,
            )  # fmt: skip
        return self._compressors[start, stop]

    @property
    def residual(self) -> tuple[Tensor, ...]:
        """What has not been sent yet of what this worker wanted to send."""
        return self.state.buffer("sent: residual")

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter group by which the residual counts."""
        return self._rates or [float(group.get("lr", 0.0)) for group in self.replica.optimizer.param_groups]

    def rescale(self) -> None:
        """Scales the residual of gradients after SGD's learning rate has changed.

        The residual is kept without the learning rate. Scaled by the old rate over the new one, the step that
        it becomes part of is as long as it would have been.
        """
        import torch

        optimizer = self.replica.optimizer
        if not isinstance(optimizer, torch.optim.SGD) or not self.codec.feedback:
            return
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        before, self._rates = self._rates or rates, rates
        if rates == before:
            return
        residual = self.residual
        for span in self.replica.spans(whole=True):
            now, then = rates[span.group], before[span.group]
            if now > 0:
                span.of(residual).mul_(then / now)
            else:
                rates[span.group] = then  # a rate of 0 is a pause

    def check_update(self, start: int = 0, stop: int | None = None) -> None:
        """Raises `NotFinite` if this worker's parameters are not finite: a codec would hide that."""
        replica = self.replica
        own = replica.parameters if stop is None else cut(replica.parameters, start, stop)
        replica.layout.check_finite(own, f"{self._me} at step {replica.steps}", start, stop)

    def state_dict(self) -> dict[str, Any]:
        return {**self.state.state_dict(), "rates": list(self._rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)
        self._rates = list(state["rates"])
        self._compressors.clear()  # they are views of the notes that were there before
