"""Worker and Server: the stateful halves of a strategy.

The session's driver calls a worker in this order:

    start()
    before_forward()          BeforeForward only
    on_bucket(...)            OnBucket only: while backward runs
    on_gradient()             OnGradient only: backward is complete
    step()                    in place of optimizer.step()
    ...
    finish()
    consensus(final=True)     on one worker, which sends the result

Rare abilities are protocols of one method. The driver looks for them with isinstance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.strategy import Strategy
    from polyrhythm.model.replica import Replica

State = dict[str, Any]  # tensors, numbers, texts, None, and lists, tuples and dicts of these


class Worker(ABC):
    """The stateful half of a strategy on one worker. Its state is its attributes."""

    def __init__(self, strategy: Strategy, node: Node, replica: Replica, group: Group) -> None:
        self.strategy, self.node, self.replica, self.group = strategy, node, replica, group

    def start(self) -> None:
        """Runs before the first step: all workers start equal to the first."""
        self.group.broadcast(*self.replica.parameters)

    @abstractmethod
    def step(self) -> None:
        """Runs in place of `optimizer.step()`."""

    def finish(self) -> None:
        """Runs after the last step."""

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        """The parameters that the workers agree on so far, as flat vectors; called by all workers.

        `final`: all workers have finished, and only one of them calls this. A result written to
        `replica.consensus_vectors()` is not copied again.
        """
        return self.replica.parameters

    @property
    def replicas_equal(self) -> bool:
        """True if the parameters of all workers have the same bits now. `--check-replicas` compares them."""
        return False

    def state_dict(self) -> State:
        """The state that a resumed run needs, besides the model and the optimizer."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continues from what `state_dict` returned. Called after `start`, before the first step."""


@runtime_checkable
class OnGradient(Protocol):
    """Exchanges gradients before the script clips them."""

    def on_gradient(self) -> None:
        """Called when backward has completed a gradient, before the script sees it."""


@runtime_checkable
class OnBucket(Protocol):
    """Exchanges gradients while backward runs."""

    def on_bucket(self, gradient: Sequence[Tensor], last: bool) -> None:
        """Called when part of the gradient is complete, for the same parts in the same order on all workers.

        Must not wait: backward runs on. `on_gradient` follows when all parts have been handed on.
        """


@runtime_checkable
class BeforeForward(Protocol):
    """Acts before the script reads the parameters for a step."""

    def before_forward(self) -> None:
        """Called before each forward pass in training."""


@runtime_checkable
class OnMembership(Protocol):
    """Works in lockstep and continues when a worker dies."""

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        """Called on every worker when the set of workers changes at the start of an epoch.

        `number` counts these changes.
        """


@runtime_checkable
class FetchOptimizerState(Protocol):
    """Keeps the optimizer's state elsewhere, such as on servers."""

    def fetch_optimizer_state(self) -> None:
        """Brings the optimizer's state to this worker, before `optimizer.state_dict()`."""


@runtime_checkable
class OnMeeting(Protocol):
    """Lets the other workers continue while the script of this one waits for them."""

    def on_meeting(self) -> None:
        """Called before the script waits for all workers: none of them may wait for this one's next step."""


class Server(ABC):
    """The stateful half of a strategy on one server."""

    @abstractmethod
    def serve(self) -> None:
        """Serves until the run is over."""

    def state_dict(self) -> State:
        """The state that a resumed run needs, besides the shard's parameters and optimizer."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continues from what `state_dict` returned."""
