"""Nested state as flat tensors, to send it: never pickled.

The first tensor is a description in JSON, the others are the tensors of the state, flat, in the order of the
description.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import WireError

if TYPE_CHECKING:
    from torch import Tensor


def pack(state: Any) -> list[Tensor]:
    """Tensors that hold a state: tensors, numbers, texts, None, and lists, tuples and dicts of these."""
    import torch

    tensors: list[Tensor] = []
    text = json.dumps(_described(state, tensors))
    return [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), *tensors]


def unpack(packed: Sequence[Tensor]) -> Any:
    """The state that `pack` was given, with tensors of its own. WireError if these are no such tensors."""
    try:
        description = json.loads(bytes(packed[0].cpu().numpy()))
        return _restored(description, packed[1:])
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WireError(f"not a packed state: {type(error).__name__}: {error}") from None


def _described(value: Any, tensors: list[Tensor]) -> Any:
    from torch import Tensor

    if isinstance(value, Tensor):
        tensors.append(value.detach().reshape(-1))
        return {"tensor": len(tensors) - 1, "shape": list(value.shape)}
    if isinstance(value, dict):
        return {
            "dict": [[_described(key, tensors), _described(each, tensors)] for key, each in value.items()]
        }
    if isinstance(value, tuple):
        return {"tuple": [_described(each, tensors) for each in value]}
    if isinstance(value, list):
        return [_described(each, tensors) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"a state has tensors and plain values, not {type(value).__name__}")


def _restored(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return [_restored(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]].clone().reshape(value["shape"])
    if "tuple" in value:
        return tuple(_restored(each, tensors) for each in value["tuple"])
    return {_restored(key, tensors): _restored(each, tensors) for key, each in value["dict"]}
