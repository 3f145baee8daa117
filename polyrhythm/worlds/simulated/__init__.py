"""Simulated: every node is a greenlet, and time is virtual.

Workers run the user's own unmodified script and compute real gradients. Whatever blocks switches to the
event loop, which moves virtual time to the next event: the end of a step, the arrival of a message. There
is one thread, one queue and one seed, so a run has one result, bit for bit.

Rules that keep it honest:
- `Fiber.block` (see `fibers`) is the only place where a node gives up control.
- Events at the same time happen in the order they were made.
- Each worker owns its random states, and each fiber its autograd mode. Torch's are swapped at switches;
  those of Python and numpy, which strategies do not touch, whenever a worker is away from its script.

`world` starts the nodes and runs them to the end. `node` is the strategy's view of it, and `context` the
session's. Waits of single nodes are in `waits`, collectives in `group`; `network` delivers messages.
"""

from polyrhythm.worlds.simulated.world import Simulated

__all__ = ["Simulated"]
