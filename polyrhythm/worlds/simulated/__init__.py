"""Simulated: every node is a greenlet, and time is virtual.

Workers run the user's unmodified script and compute real gradients. A call that blocks switches to the event
loop, which advances virtual time to the next event, such as the end of a step or the arrival of a message.
There is one thread, one queue and one seed, so a run always has the same result, bit for bit.

Invariants:
- `Fiber.block` (see `fibers`) is the only place where a node gives up control.
- Events of the same moment happen in the order in which they were scheduled.
- Each node has its own random states (see `random_states`), and each fiber its own autograd mode.

`world` starts the nodes and runs them to the end. `node` is what the strategy sees, `context` what the
session sees. `waits` has the waits of single nodes, `group` the collectives; `network` delivers messages.
"""

from polyrhythm.worlds.simulated.world import Simulated

__all__ = ["Simulated"]
