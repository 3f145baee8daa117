"""PlaceExchange: what the workers of one model have, gathered on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyrhythm.core.place_node import receive_from
from polyrhythm.session.model_context import ModelContext

_KIND = "part of model"  # of the messages


class Found(NamedTuple):
    """What one place has, by name."""

    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]  # numbers and texts


class PlaceExchange:
    """The exchanges between the workers of a model outside its passes. All of them begin the same ones."""

    def __init__(self, context: ModelContext) -> None:
        self._context = context

    def gather(self, mine: Found) -> list[Found]:
        """What all places have, in order. Tensors of other places are copies."""
        node, me = self._context.worker_node, self._context.place
        others = [place for place in range(len(self._context.model)) if place != me]
        with torch.no_grad(), self._context.blocking():
            for place in others:
                node.send(
                    self._context.model[place],
                    f"{_KIND} {me}",
                    *(each.detach().reshape(-1) for each in mine.tensors.values()),
                    names=list(mine.tensors),
                    shapes=[list(each.shape) for each in mine.tensors.values()],
                    plain=dict(mine.plain),
                )
            return [mine if place == me else self._receive(place) for place in range(len(others) + 1)]

    def _receive(self, place: int) -> Found:
        message = receive_from(self._context.worker_node, self._context.model[place], f"{_KIND} {place}")
        flat = zip(message["names"], message["shapes"], message.tensors, strict=True)
        return Found({name: each.view(shape) for name, shape, each in flat}, message["plain"])
