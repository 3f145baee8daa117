"""ServerClient: how a worker talks to the servers.

The flat vectors are split into near-equal ranges over the servers. Each server has a version of its own, so
what a worker pulls may be torn, its version is a vector, and staleness is known per server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from polyrhythm.compress.replies import reply_codec
from polyrhythm.compress.transforms.base import needs_norm
from polyrhythm.model.vectors import cloned, copied, cut
from polyrhythm.strategies.server.updates import PushRequest, norm, turned

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Decompressor
    from polyrhythm.compress.sender import CompressedSender
    from polyrhythm.core.message import Field, Message, Reply
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.core.worker import State
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.vectors import Vectors
    from polyrhythm.strategies.server.parameter_server import ParameterServer

Replies = list[tuple["Peer", "Reply"]]


class ServerClient:
    """Pushes updates to the servers and pulls parameters from them."""

    def __init__(self, strategy: ParameterServer, node: Node, replica: Replica) -> None:
        self.strategy, self.node, self.replica = strategy, node, replica
        self.versions: dict[int, int] = {}  # of the worker's parameters, by server
        servers, codec = node.members.servers, strategy.codec
        ranges = zip(servers, replica.layout.ranges(len(servers)), strict=True)
        self.ranges = turned([(server, *range_) for server, range_ in ranges], node.rank)
        self.sender: CompressedSender | None = None
        if codec is not None:
            from polyrhythm.compress.sender import CompressedSender

            workers = len(node.members.workers)
            self.sender = CompressedSender(codec, node, replica, node.rank, workers, strategy.feedback)
        # Where servers reply in code: the parameters to which they know that this worker adds the changes.
        self.known = replica.buffer() if strategy.replies_in_code else ()
        self._decompressors: dict[int, Decompressor] = {}

    def initialize(self) -> None:
        """Sends this worker's parameters to the servers, to start from."""
        for server, start, stop in self.ranges:
            self.node.request(server, "initialize", *cut(self.replica.parameters, start, stop)).wait()

    def push(self, request: PushRequest) -> list[Message]:
        """Pushes an update. Returns the servers' replies."""
        return self._receive(self._send(request), request)

    def pull(self, into: Vectors | None = None, fresh: bool = False) -> None:
        """Fetches the servers' parameters; `fresh`: without regard to those that this worker had before."""
        into = self.replica.parameters if into is None else into
        coded = bool(self.known) and not fresh
        fields: dict[str, Field] = {"coded": True} if coded else {}
        replies = []
        for server, start, stop in self.ranges:
            places = () if coded else cut(into, start, stop)
            replies.append((server, self.node.request(server, "pull", into=places, **fields)))
        if coded:
            self.versions.update(_versions(self._take(replies, into)))
            return
        self.versions.update(_versions([reply.wait() for _, reply in replies]))
        if self.known:
            copied(into, self.known)

    def fetch_parameters(self, final: bool = False) -> Vectors:
        """The servers' parameters, without any effect on training."""
        self.join_push()
        parameters = self.replica.consensus_vectors()
        requests = [
            self.node.request(server, "read", into=cut(parameters, start, stop), final=final)
            for server, start, stop in self.ranges
        ]
        for request in requests:
            request.wait()
        return parameters

    def fetch_optimizer_state(self) -> None:
        """Puts the state of the servers' optimizers into the user's own."""
        self.join_push()
        replies = [self.node.request(server, "state").wait() for server in self.node.members.servers]
        self.replica.restore([(reply["slices"], list(reply.tensors)) for reply in replies])

    def rescale(self) -> None:
        """Scales the residual of gradients if SGD's learning rate has changed."""
        if self.sender is not None:
            self.sender.rescale()

    def flush(self) -> None:
        """Pushes the whole residual, uncoded, at the learning rates that it is measured by."""
        if self.sender is None:
            return
        rest, settings = self.replica.buffer(), self.replica.settings()
        for _, start, stop in self.ranges:
            self.sender.compressor(start, stop).flush(cut(rest, start, stop))
        for group, rate in zip(settings, self.sender.rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
        request = PushRequest(rest, settings, self.replica.gradients.absent, fetch=False)
        self._receive(self._send(request, coded=False), request)

    def join_push(self) -> None:
        """Waits for replies that are under way."""

    def finish(self) -> None:
        """Takes replies that are under way."""

    def _send(self, request: PushRequest, coded: bool = True) -> Replies:
        versions = self.versions if request.versions is None else request.versions
        into = self.replica.parameters if request.into is None else request.into
        visible = request.update
        if self.sender is None or not coded:
            pieces: list[Sequence[Tensor]] = [cut(visible, start, stop) for _, start, stop in self.ranges]
        else:
            pieces = self._encoded(self.sender, request.update)
            decoded = self._decoded if self.strategy.clip < math.inf else request.decoded
            if decoded:
                visible = self._decode(self.sender, pieces, decoded)
        fields: dict[str, Field] = {
            "step": self.replica.steps, "fetch": request.fetch, "groups": list(request.settings),
            "absent": list(request.absent),
            "norm": self.node.whole_norm(norm(visible)) if self.strategy.clip < math.inf else 0.0,
            **request.extras,
        }  # fmt: skip
        if not coded:
            fields["coded"] = False
        replies = []
        for (server, start, stop), parts in zip(self.ranges, pieces, strict=True):
            places = cut(into, start, stop) if request.fetch and not self.known else ()
            reply = self.node.request(
                server, "push", *parts, into=places, version=versions[server.rank], **fields
            )
            replies.append((server, reply))
        return replies

    def _receive(self, replies: Replies, request: PushRequest) -> list[Message]:
        """Waits for the replies to a push; the worker continues from the parameters in them."""
        if not request.fetch:
            return [reply.wait() for _, reply in replies]
        into = self.replica.parameters if request.into is None else request.into
        messages = self._take(replies, into)
        self.versions.update(_versions(messages))
        return messages

    def _take(self, replies: Replies, into: Vectors) -> list[Message]:
        """Waits for replies with parameters and decodes those that are in code."""
        messages = []
        for server, reply in replies:
            messages.append(reply.wait())
            if self.known:
                codes = self._decompressor(server.rank)
                codes.add(messages[-1].tensors, cut(self.known, codes.start, codes.stop))
        if self.known:
            copied(self.known, into)
        return messages

    def _encoded(self, sender: CompressedSender, update: Vectors) -> list[Sequence[Tensor]]:
        """The tensors for each server."""
        if self.strategy.exchanges == "updates":
            sender.check_update()
        ranges = [
            (sender.compressor(start, stop), cut(update, start, stop)) for _, start, stop in self.ranges
        ]
        whole: float | None = None
        if needs_norm(sender.codec):  # over all servers
            parts = (compressor.norm(part) for compressor, part in ranges)
            whole = self.node.whole_norm(math.hypot(*parts))
        return [compressor.encode_all(part, whole) for compressor, part in ranges]

    def _decode(self, sender: CompressedSender, pieces: Sequence[Sequence[Tensor]], into: Vectors) -> Vectors:
        """Overwrites vectors with the update that the servers decode."""
        for part in into:
            part.zero_()
        for (_, start, stop), piece in zip(self.ranges, pieces, strict=True):
            sender.compressor(start, stop).add(piece, cut(into, start, stop))
        return into

    def _decompressor(self, server: int) -> Decompressor:
        from polyrhythm.compress.compressor import Decompressor

        codec = self.strategy.codec
        if server not in self._decompressors and codec is not None:
            start, stop = self.replica.layout.ranges(len(self.ranges))[server]
            layout = self.replica.layout
            self._decompressors[server] = Decompressor(reply_codec(codec), layout, start, stop)
        return self._decompressors[server]

    @cached_property
    def _decoded(self) -> Vectors:
        return self.replica.buffer(exact=True)

    def state_dict(self) -> State:
        sender = None if self.sender is None else self.sender.state_dict()
        return {"versions": dict(self.versions), "known": cloned(self.known), "sender": sender}

    def load_state_dict(self, state: State) -> None:
        self.versions = dict(state["versions"])
        copied(state["known"], self.known)
        if self.sender is not None:
            self.sender.load_state_dict(state["sender"])


class PrefetchingClient(ServerClient):
    """Takes the reply to a push after the next batch, which hides the round trip behind computing."""

    def __init__(self, strategy: ParameterServer, node: Node, replica: Replica) -> None:
        super().__init__(strategy, node, replica)
        self.pushed, self.ahead = replica.buffer(), replica.buffer()
        self.outstanding: Replies = []
        self.ahead_versions: dict[int, int] = {}  # of the parameters in `ahead`, if there are any

    def push(self, request: PushRequest) -> list[Message]:
        versions = dict(self.versions) if request.versions is None else request.versions
        self.finish()
        update = copied(request.update, self.pushed)
        request = replace(request, update=update, versions=versions, into=self.ahead)
        self.outstanding = self._send(request)
        return []

    def join_push(self) -> None:
        if self.outstanding:
            replies, self.outstanding = self.outstanding, []
            self.ahead_versions = _versions(self._take(replies, self.ahead))

    def finish(self) -> None:
        """Moves the parameters that arrived while the last batch was computed into their place."""
        self.join_push()
        if self.ahead_versions:
            self.versions, self.ahead_versions = self.ahead_versions, {}
            copied(self.ahead, self.replica.parameters)

    def state_dict(self) -> State:
        ahead = cloned(self.ahead) if self.ahead_versions else []
        return {**super().state_dict(), "ahead": ahead, "ahead_versions": dict(self.ahead_versions)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.ahead_versions = dict(state["ahead_versions"])
        if self.ahead_versions:
            copied(state["ahead"], self.ahead)


def _versions(replies: Sequence[Message]) -> dict[int, int]:
    """The versions in the replies, by server."""
    return {reply.sender.rank: reply["version"] for reply in replies}
