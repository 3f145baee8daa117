"""OutputExchange: brings outputs that one worker has computed to others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyrhythm.core.errors import PeerLost, WireError
from polyrhythm.core.node import Node
from polyrhythm.core.peer import Peer
from polyrhythm.core.published import Key, Published
from polyrhythm.model.packing import pack, unpack

ALIGNED = 16  # bytes: any tensor may begin there
Outputs = dict[int, Any]  # by the number of the batch


class OutputExchange:
    """The outputs that this worker lets others fetch, and those that it fetches."""

    def __init__(self, node: Node) -> None:
        self._node, self._published = node, Published(node, "prediction")
        node.subscribe(self._published.on_message, *self._published.kinds)

    def publish(self, number: int, readers: Iterable[int], packed: Tensor) -> None:
        """Lets these workers fetch outputs. `number` is the same for all publications of one round."""
        self._published.publish(Key(0, number), [Peer("worker", rank) for rank in readers], [packed])

    def fetch(self, number: int, sizes: Mapping[int, int]) -> Outputs:
        """The outputs of other workers, by their ranks and the bytes that they have published.

        Those of a worker that has died are left out.
        """
        memory, found, fetches = self._node.memory, Outputs(), []
        for rank, size in sizes.items():
            with contextlib.suppress(PeerLost):
                into = [memory.temporary(size, torch.uint8)]
                fetches.append(self._published.fetch(Peer("worker", rank), Key(0, number), into=into))
        for fetch in fetches:
            if fetch.wait() is not None:
                found.update(unpacked(fetch.into[0]))
                fetch.acknowledge()
        return found


def packed(outputs: Mapping[int, Any]) -> Tensor:
    """Outputs as one tensor of bytes, in which each part begins at a multiple of `ALIGNED`."""
    text, *tensors = pack(dict(outputs))
    parts = [text, *(_bytes(each) for each in tensors)]
    kinds = [str(each.dtype).removeprefix("torch.") for each in (text, *tensors)]
    head = json.dumps([[kind, len(part)] for kind, part in zip(kinds, parts, strict=True)]).encode()
    header = torch.frombuffer(bytearray(len(head).to_bytes(8) + head), dtype=torch.uint8)
    gap = torch.zeros(ALIGNED, dtype=torch.uint8)
    return torch.cat([piece for part in (header, *parts) for piece in (part, gap[: -len(part) % ALIGNED])])


def unpacked(whole: Tensor) -> Outputs:
    """The outputs that `packed` was given. WireError if these are no such bytes."""
    try:
        at = 8 + int.from_bytes(bytes(whole[:8].numpy()))
        parts, tensors = json.loads(bytes(whole[8:at].numpy())), []
        for kind, length in parts:
            at += -at % ALIGNED
            if at + length > len(whole):
                raise ValueError(f"{len(whole)} bytes, and a part ends at {at + length}")
            tensors.append(whole[at : at + length].view(getattr(torch, kind)))
            at += length
        return dict(unpack(tensors))  # with tensors of their own
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise WireError(f"not the outputs of a worker: {type(error).__name__}: {error}") from None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
