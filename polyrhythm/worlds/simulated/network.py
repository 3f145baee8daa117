"""Network: delivers messages from host to host on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polyrhythm.core.message import Message
from polyrhythm.worlds.simulated.fibers import Loop

if TYPE_CHECKING:
    from polyrhythm.worlds.cost_model import CostModel

# A message on the way to its host: the host, its bytes, the seconds from the first byte to the last, and the
# function to call with it on arrival.
_Landing = tuple[tuple[str, int], int, float, Callable[..., Any], Message]


class Network:
    """Delivers messages. A link carries them in the order in which they reach it."""

    def __init__(self, loop: Loop, costs: CostModel) -> None:
        self.loop, self.costs = loop, costs

    def carry(
        self,
        source: tuple[str, int],
        target: tuple[str, int],
        nbytes: int,
        arrive: Callable[..., Any],
        what: Message,
    ) -> None:
        """Sends a message; `arrive(what)` is called when its last byte has arrived."""
        loop, costs = self.loop, self.costs
        if costs.free or costs.same_host(source, target):
            loop.at(loop.now, arrive, what)
            return
        head, span = costs.start_transfer(source, target, nbytes, loop.now)
        landing = (target, nbytes, span, arrive, what)
        crossing = costs.sites_crossed(source, target)
        if crossing is None:
            loop.at(head, self._land, landing)
        else:
            assert costs.sites is not None
            head += sum(costs.sites.latency[site] for site in crossing)
            loop.at(head, self._cross, (crossing, ("up", "down"), landing))

    def _land(self, message: _Landing) -> None:
        target, nbytes, span, arrive, what = message
        self.loop.at(self.costs.end_transfer(target, nbytes, self.loop.now, span), arrive, what)

    def _cross(self, message: tuple[tuple[int, ...], tuple[str, ...], _Landing]) -> None:
        """Carries a message over the first of these sites' links, and then over the rest to its host."""
        (site, *sites), (way, *ways), (target, nbytes, span, *rest) = message
        assert self.costs.sites is not None
        head, span = self.costs.sites.forward(site, way, nbytes, self.loop.now, span)
        landing = (target, nbytes, span, *rest)
        self.loop.at(head, self._cross if sites else self._land, (sites, ways, landing) if sites else landing)
