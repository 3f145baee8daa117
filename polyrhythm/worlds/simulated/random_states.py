"""Random numbers: each simulated node has its own, although all scripts draw from the same global generators.

The generators hold the state of one node at a time. Torch's state is swapped whenever another worker runs,
because strategies and optimizers may draw from it. Copying Python's takes 12 µs, a quarter of a step without
a gradient, so Python's and numpy's are swapped only when another node's script runs.
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
        self.torch, self.python = torch.default_generator.get_state(), random.getstate()
        self.numpy = get_bit_generator()
        self._running: RandomState | None = None  # whose state torch's generator has
        self._script: RandomState | None = None  # whose states the others have

    def switch_to(self, worker: RandomState) -> None:
        """Called before a worker runs."""
        if worker is not self._running:
            if self._running is not None:
                self._running.torch = torch.default_generator.get_state()
            torch.default_generator.set_state(worker.torch)
            self._running = worker

    def enter_script(self, node: RandomState) -> None:
        """Called when the script of a node begins or continues."""
        if node is not self._script:
            if self._script is not None:
                self._script.python = random.getstate()
            random.setstate(node.python)
            set_bit_generator(node.numpy)
            self._script = node

    def restore(self) -> None:
        """Restores the states from before the simulation."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        set_bit_generator(self.numpy)
