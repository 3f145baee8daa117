"""Random numbers: each simulated node has its own, although all scripts draw from the same global generators.

The generators hold the states of one node at a time. A swap takes 14 µs, a tenth of a step, so they are
not swapped at every switch between fibers, but when the script or the optimizer of another node is about to
run. Strategies do not draw from the global generators.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

_numpy: Any = np.random.mtrand._rand  # the global generator


class _NoBits:
    """Stands in for numpy's bit generator while `get_state` and `set_state` copy the rest of the state.

    The rest is the second of two normal numbers: `randn` draws them in pairs and keeps one for the next call.
    Copying the bit generator's state too would take 80 µs.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"bit_generator": "", "state": None}


def _get_normal() -> dict[str, Any]:
    """The normal number that numpy's global generator has drawn and not returned yet, if any."""
    bits, _numpy._bit_generator = _numpy._bit_generator, _NoBits()
    normal: dict[str, Any] = _numpy.get_state(legacy=False)
    _numpy._bit_generator = bits
    return normal


def _set_numpy(bits: Any, normal: dict[str, Any]) -> None:
    set_bit_generator(bits)  # discards the normal number
    _numpy._bit_generator = _NoBits()
    _numpy.set_state(normal)
    _numpy._bit_generator = bits


class RandomState:
    """One node's states of the global generators."""

    def __init__(self, initial: GlobalGenerators) -> None:
        self.torch, self.python, self.normal = initial.torch, initial.python, initial.normal
        # A bit generator of its own: installing it is quick, and copying a state of numpy's is not.
        self.numpy = np.random.MT19937()
        self.numpy.state = initial.numpy.state  # type: ignore[assignment]


class GlobalGenerators:
    """The global generators of torch, Python and numpy, and the states in which a simulation found them."""

    def __init__(self) -> None:
        self._generator = torch.default_generator
        self.torch, self.python = self._generator.get_state(), random.getstate()
        self.numpy, self.normal = get_bit_generator(), _get_normal()
        self._owner: RandomState | None = None  # whose states are installed

    def install(self, node: RandomState) -> None:
        """Called before the script or the optimizer of a node runs."""
        if node is self._owner:
            return
        if self._owner is not None:
            self._owner.torch, self._owner.python = self._generator.get_state(), random.getstate()
            self._owner.normal = _get_normal()
        self._generator.set_state(node.torch)
        random.setstate(node.python)
        _set_numpy(node.numpy, node.normal)
        self._owner = node

    def restore(self) -> None:
        """Restores the states from before the simulation."""
        self._generator.set_state(self.torch)
        random.setstate(self.python)
        _set_numpy(self.numpy, self.normal)
