"""CallNumbers: numbers the calls of a script that workers make together, such as saving, in increasing order.

They are counted within an epoch: a worker that replaces another, and whose script resumes in a later epoch,
gives a call the number that it has on the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrhythm.model.replica import Replica

_EPOCH = 1 << 32  # more calls than an epoch has


class CallNumbers:
    """The calls of one worker."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.last = 0  # the number of the last call

    def next(self) -> int:
        """The number of the call that the script makes now."""
        self.last = max(self.last, self._replica.epochs() * _EPOCH) + 1
        return self.last
