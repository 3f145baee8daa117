"""Random numbers: each simulated node has its own, although all scripts draw from the same global generators.

The generators hold the states of one node at a time. A swap takes 5 µs, so they are not swapped at every
switch between fibers, but when the script or the optimizer of another node is about to run. Strategies do not
draw from the global generators.
"""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Callable
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

    state: dict[str, Any]


_no_bits = _NoBits()


def _get_normal() -> dict[str, Any]:
    """The normal number that numpy's global generator has drawn and not returned yet, if any."""
    _no_bits.state = {"bit_generator": "", "state": None}  # `get_state` adds to it
    bits, _numpy._bit_generator = _numpy._bit_generator, _no_bits
    normal: dict[str, Any] = _numpy.get_state(legacy=False)
    _numpy._bit_generator = bits
    return normal


def _set_numpy(bits: Any, normal: dict[str, Any]) -> None:
    set_bit_generator(bits)  # discards the normal number
    if normal["has_gauss"]:
        _numpy._bit_generator = _no_bits
        _numpy.set_state(normal)
        _numpy._bit_generator = bits


def _numbers_of(generator: random.Random) -> Any:
    """The Mersenne Twister inside a generator of Python, as bytes that can be read and replaced."""
    header = object.__basicsize__
    return (ctypes.c_char * (_random.Random.__basicsize__ - header)).from_address(id(generator) + header)


class PythonGenerator:
    """Python's global generator. Its states are copied as bytes, if CPython stores them as it always has.

    `getstate()` makes 625 integers. With 16 nodes that took a quarter of a step, most of it because they
    displace everything else from the cache.
    """

    def __init__(self) -> None:
        self._generator: Any = random._inst
        self._numbers = _numbers_of(self._generator)
        self.get: Callable[[], Any] = self._copy if _copies() else random.getstate
        self.set: Callable[[Any], None] = self._paste if _copies() else random.setstate

    def _copy(self) -> tuple[bytes, float | None]:
        return self._numbers.raw, self._generator.gauss_next

    def _paste(self, state: tuple[bytes, float | None]) -> None:
        self._numbers.raw, self._generator.gauss_next = state


def _copies() -> bool:
    """True if the bytes of a generator are its whole state, except for the normal number that it keeps."""
    one, other = random.Random(1), random.Random(2)
    one.random()
    _numbers_of(other).raw = _numbers_of(one).raw
    return one.getstate() == other.getstate()


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
        self._generator, self._python = torch.default_generator, PythonGenerator()
        self.torch, self.python = self._generator.get_state(), self._python.get()
        self.numpy, self.normal = get_bit_generator(), _get_normal()
        self._owner: RandomState | None = None  # whose states are installed

    def install(self, node: RandomState) -> None:
        """Called before the script or the optimizer of a node runs."""
        if node is self._owner:
            return
        if self._owner is not None:
            self._owner.torch, self._owner.python = self._generator.get_state(), self._python.get()
            self._owner.normal = _get_normal()
        self._generator.set_state(node.torch)
        self._python.set(node.python)
        _set_numpy(node.numpy, node.normal)
        self._owner = node

    def restore(self) -> None:
        """Restores the states from before the simulation."""
        self._generator.set_state(self.torch)
        self._python.set(self.python)
        _set_numpy(self.numpy, self.normal)
