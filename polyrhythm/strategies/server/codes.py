"""The codec on a server: pushes that arrive in code, and replies in code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.compress.reducers import reducer_for
from polyrhythm.compress.replies import reply_codec
from polyrhythm.core.errors import WireError
from polyrhythm.core.events import Refused
from polyrhythm.model.vectors import copied, difference
from polyrhythm.strategies.server.worker_vectors import WorkerVectors

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Compressor
    from polyrhythm.compress.state import SenderState
    from polyrhythm.core.codec import Codec
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.worker import State
    from polyrhythm.model.shard import Shard
    from polyrhythm.model.vectors import Vectors
    from polyrhythm.strategies.server.updates import PushedUpdate


class PushDecoder:
    """Decodes the pushes of all workers."""

    def __init__(self, codec: Codec | None, node: Node, shard: Shard) -> None:
        from polyrhythm.compress.compressor import Decompressor

        self.codec, self.node, self.shard = codec, node, shard
        self._codes = Decompressor(codec, shard.layout, shard.start, shard.stop) if codec else None

    def decode(self, push: PushedUpdate) -> None:
        """Fills in the update of a push."""
        push.update = self._decoded(push.message)
        if self.codec is not None and self.codec.feedback and push.absent:
            # A residual arrives also when its worker has no gradient for the parameter.
            push.absent = self.shard.silent(push.update, push.absent)

    def agree(self, update: Vectors) -> None:
        """Lets the codec post-process a reduced update in place (for example a majority vote)."""
        if self._codes is not None:
            reducer_for(self._codes.codec).decide(update, self._codes)

    def _decoded(self, message: Message) -> tuple[Tensor, ...]:
        if self._codes is None or not message.fields.get("coded", True):
            parts = zip(message.tensors, self.shard.parameters, strict=True)
            return tuple(part.to(like.device) for part, like in parts)
        update = self.shard.zeros()
        try:
            self._codes.add(message.tensors, update)
        except WireError as error:  # it counts as zero, and the server continues
            why = f"{message.sender} sent a push that cannot be read: {error}"
            self.node.log(Refused(message.sender.rank, message.sequence, why))
            for part in update:
                part.zero_()
        return update


class _Given(NamedTuple):
    """The last reply to a worker."""

    sequence: int  # of its request
    version: int
    codes: Sequence[Tensor] | None  # None: the parameters themselves


class CodedReplies:
    """Replies with the code of the change from the parameters that a worker has to those it is to see.

    The worker adds the decoded change to its parameters, and the server to its copy of them: both ends know,
    bit for bit, what the worker has, and what a code leaves out is part of the next change. A lost reply is
    given again; a request that arrives late and twice changes nothing.
    """

    def __init__(self, codec: Codec, node: Node, shard: Shard) -> None:
        self.codec, self.node, self.shard = reply_codec(codec), node, shard
        self.known = WorkerVectors(shard)  # the parameters that each worker has
        self.given: dict[int, _Given] = {}
        self.states: dict[int, SenderState] = {}  # of the codec, by worker
        self._compressors: dict[int, Compressor] = {}
        self._change = shard.zeros()

    def reply(self, reader: Message, view: Vectors) -> tuple[int, Sequence[Tensor]]:
        """The version that a worker gets to see, and the tensors to send it."""
        worker, shard = reader.sender.rank, self.shard
        known, last = self.known[worker], self.given.get(worker, _Given(-1, 0, ()))
        if reader.sequence < last.sequence:
            return last.version, ()  # no worker waits for it
        if reader.sequence == last.sequence:
            return last.version, known if last.codes is None else last.codes
        if reader.kind == "pull" and "coded" not in reader.fields:  # it starts from these parameters
            copied(view, known)
            self._forget_codes(worker)
            self.given[worker] = _Given(reader.sequence, shard.version, None)
            return shard.version, known
        change, compressor = difference(view, known, self._change), self._compressor(worker)
        where = f"{self.node.me} at version {shard.version}"
        shard.layout.check_finite(change, where, shard.start, shard.stop)
        codes = compressor.encode_all(change)
        compressor.add(codes, known)
        # Parts that travel uncoded are in `_change`, which the next reply overwrites.
        kept = [
            code if segment.coded else code.clone()
            for code, segment in zip(codes, compressor.segments, strict=True)
        ]
        self.given[worker] = _Given(reader.sequence, shard.version, kept)
        return shard.version, codes

    def forget(self, worker: int) -> None:
        """A worker has left."""
        self.known.pop(worker, None)
        self.given.pop(worker, None)
        self._forget_codes(worker)

    def _forget_codes(self, worker: int) -> None:
        self.states.pop(worker, None)
        self._compressors.pop(worker, None)

    def _compressor(self, worker: int) -> Compressor:
        from polyrhythm.compress.compressor import Compressor

        if worker not in self._compressors:
            shard = self.shard
            state = self.states[worker] = self.states.get(worker) or self._state(worker)
            self._compressors[worker] = Compressor(
                self.codec, state, start=shard.start, stop=shard.stop, feedback=False
            )
        return self._compressors[worker]

    def _state(self, worker: int) -> SenderState:
        """A new state of the codec."""
        from polyrhythm.compress.state import SenderState

        shard = self.shard
        return SenderState(
            shard.layout, start=shard.start, stop=shard.stop, name=f"to {worker}", seed=self.node.seed,
            worker=worker, workers=len(self.node.members.workers),
        )  # fmt: skip

    def state_dict(self) -> State:
        """The last replies are left out: a resumed worker does not repeat a request."""
        states = {worker: state.state_dict() for worker, state in self.states.items()}
        return {"known": self.known.state_dict(), "codecs": states}

    def load_state_dict(self, state: State) -> None:
        self.known.load_state_dict(state["known"])
        self.states = {worker: self._state(worker) for worker in state["codecs"]}
        self._compressors.clear()
        for worker, saved in state["codecs"].items():
            self.states[worker].load_state_dict(saved)
