"""Random numbers: each simulated node has its own, although all scripts draw from the same global generators.

The generators hold the states of one node at a time. Copying them takes 14 µs, a tenth of a step, so they are
not swapped at every switch between fibers, but when the script or the optimizer of another node is about to
run. Strategies do not draw from the global generators.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator


class RandomState:
    """One node's states of the global generators."""

    def __init__(self, initial: GlobalGenerators) -> None:
        self.torch, self.python = initial.torch, initial.python
        # A bit generator of its own: installing it is quick, and copying a state of numpy's is not.
        self.numpy = np.random.MT19937()
        self.numpy.state = initial.numpy.state  # type: ignore[assignment]


class GlobalGenerators:
    """The global generators of torch, Python and numpy, and the states in which a simulation found them."""

    def __init__(self) -> None:
        self._generator = torch.default_generator
        self.torch, self.python = self._generator.get_state(), random.getstate()
        self.numpy = get_bit_generator()
        self._owner: RandomState | None = None  # whose states are installed

    def install(self, node: RandomState) -> None:
        """Called before the script or the optimizer of a node runs."""
        if node is self._owner:
            return
        if self._owner is not None:
            self._owner.torch, self._owner.python = self._generator.get_state(), random.getstate()
        self._generator.set_state(node.torch)
        random.setstate(node.python)
        set_bit_generator(node.numpy)
        self._owner = node

    def restore(self) -> None:
        """Restores the states from before the simulation."""
        self._generator.set_state(self.torch)
        random.setstate(self.python)
        set_bit_generator(self.numpy)
