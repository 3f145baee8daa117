"""Contexts that leave a model and the random number generators as they were."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the generators of torch, numpy and Python."""
    python, numbers = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


@contextmanager
def tensors_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restores the values of buffers, which BatchNorm changes."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the attributes of all modules: their mode, and what forward assigns."""
    attributes = [(module, _contents(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, contents in attributes:
            _restore(module, contents)


def _contents(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes, with copies of dicts and lists."""
    return {n: (v, type(v)(v) if type(v) in (dict, list) else None) for n, v in vars(module).items()}


def _restore(module: nn.Module, contents: dict[str, tuple[Any, Any]]) -> None:
    held = vars(module)
    for name in held.keys() - contents.keys():
        del held[name]
    for name, (value, copy) in contents.items():
        held[name] = value
        if type(value) is list:
            value[:] = copy
        elif type(value) is dict and not _same(value, copy):
            value.clear()
            value.update(copy)


def _same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return list(one) == list(other) and all(one[key] is other[key] for key in one)
