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
    """Outputs as one tensor of bytes."""
    text, *tensors = pack(dict(outputs))
    dtypes = [str(each.dtype).removeprefix("torch.") for each in tensors]
    parts = [_bytes(each) for each in tensors]
    head = json.dumps([len(text), [[dtype, len(part)] for dtype, part in zip(dtypes, parts, strict=True)]])
    header = torch.frombuffer(bytearray(head.encode()), dtype=torch.uint8)
    size = torch.tensor([len(header)], dtype=torch.int64).view(torch.uint8)
    return torch.cat([size, header, text, *parts])


def unpacked(whole: Tensor) -> Outputs:
    """The outputs that `packed` was given. WireError if these are no such bytes."""
    try:
        end = 8 + int(whole[:8].view(torch.int64))
        length, parts = json.loads(bytes(whole[8:end].numpy()))
        sizes = [length, *(int(size) for _, size in parts)]
        text, *tensors = torch.split(whole[end:], sizes)
        # Copies, because their bytes lie at any place, and the memory that they came in is lent.
        kinds = [getattr(torch, name) for name, _ in parts]
        typed = [part.clone().view(kind) for part, kind in zip(tensors, kinds, strict=True)]
        return dict(unpack([text, *typed]))
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        raise WireError(f"not the outputs of a worker: {type(error).__name__}: {error}") from None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
