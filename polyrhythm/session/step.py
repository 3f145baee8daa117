"""StepDriver: calls the strategy's worker from the script's training loop.

It passes buckets of the gradient to the worker while backward runs, lets the worker exchange the gradient
when backward is complete, and calls its step in place of the optimizer's.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import PeerLost, UsageError
from polyrhythm.core.group import Group
from polyrhythm.core.node import Node
from polyrhythm.core.strategy import Strategy
from polyrhythm.core.worker import BeforeForward, OnBucket, OnGradient, State, Worker
from polyrhythm.model.buckets import Bucket
from polyrhythm.model.hooks import Hook
from polyrhythm.model.layout import needs_closure
from polyrhythm.model.replica import Replica
from polyrhythm.session.context import WorldContext
from polyrhythm.session.hand_updates import HandUpdates
from polyrhythm.session.loading import LoadedParameters
from polyrhythm.session.meter import Meter
from polyrhythm.session.replica_check import ReplicaCheck
from polyrhythm.session.step_hooks import StepHooks
from polyrhythm.session.write_check import WriteCheck

IN_BACKWARD = (
    "optimizer.step() was called inside backward(), as by a hook of a parameter: workers exchange gradients "
    "when the pass is complete; call step() after it"
)


class StepDriver:
    """Calls a worker at the right points of each training step."""

    def __init__(
        self, context: WorldContext, worker: Worker, replica: Replica, peers: Group, meter: Meter, alone: bool
    ) -> None:
        self._context, self._worker, self._replica = context, worker, replica
        self._node: Node = context.node
        self.meter = meter
        self._peers = peers  # the workers that exchange gradients with this one
        # Looked up once: isinstance with a protocol is slow.
        self._on_bucket = worker.on_bucket if isinstance(worker, OnBucket) else None
        self._on_gradient = worker.on_gradient if isinstance(worker, OnGradient) else None
        self._before_forward = worker.before_forward if isinstance(worker, BeforeForward) else None
        several = peers.size > 1 and len(replica.gradients.buckets) > 1
        self._bucketed = self._on_bucket is not None
        # In simulation backward takes no virtual time: buckets are passed on afterwards, at their times.
        # With several drivers a pass may reach any of them, in an order of its own on each worker.
        self._overlaps = self._bucketed and several and context.processes and alone
        self._observing = self._bucketed and several  # records the order in which gradients become ready
        self._by_hand = HandUpdates(worker, replica)
        self.check: ReplicaCheck | None = None
        self.writes: WriteCheck | None = None
        self.loads: LoadedParameters | None = None
        own_step = context.processes and not worker.strategy.traits.uses_servers
        self._hooks = StepHooks(replica.optimizer, own_step, context.install_random_state)
        self._complete = False  # backward is complete, and its step not yet taken
        self._exchanging = False  # the exchange of the gradient has begun
        self._exchanged = False  # that gradient has been exchanged
        self._accumulating = False
        self._depth = 0  # of nested backward passes
        self._settable = worker.strategy.traits.settable
        # With several optimizers a script often drops a gradient that has been exchanged. What a codec has
        # added to it from its residual must not be lost.
        self._may_drop = not alone and self._on_gradient is not None and _has_residual(worker.strategy)
        self._before_exchange: State | None = None  # of the worker, since the last step
        self.check_step: Callable[[], None] = lambda: None  # called when a step begins
        self.on_training: Callable[[], None] = lambda: None  # called before each backward pass and step
        self.on_backward: Callable[[], None] = lambda: None  # called before each backward pass
        self.check_exchange: Callable[[], None] = lambda: None  # called before the worker may wait for others
        self.exchanges = 0  # so far; in lockstep as many on all workers at the same point of the script
        self.after_step: Callable[[], None] | None = None

    def attach(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Replaces `optimizer.step`, and registers forward hooks if the worker has `before_forward`."""
        step = self._make_step(self._step_with if needs_closure(optimizer) else self._step_after)
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        if self._before_forward is not None:

            def begin(*_: object) -> None:
                if torch.is_grad_enabled():  # not in an evaluation
                    with torch.no_grad(), self._context.blocking():
                        self._begin_forward()

            for model in models:
                model.register_forward_pre_hook(Hook(begin))

    def disable_overlap(self) -> None:
        """Passes on buckets only after backward, because workers wait for each other inside backward."""
        self._overlaps = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _begin_forward(self) -> None:
        if self._before_forward is not None:
            with self.meter.exchange():
                self._before_forward()

    # --- around backward ----------------------------------------------------------------------------

    def before_backward(self) -> None:
        self.on_training()
        self.on_backward()
        self._by_hand.check()
        self._depth += 1
        gradients = self._replica.gradients
        if self._before_exchange is not None and not gradients.any():
            self._worker.load_state_dict(self._before_exchange)
            self._before_exchange = None
        if self._depth > 1:  # checkpointing nests backward, and may complete a gradient twice
            self._overlaps = False
            gradients.wait_for_the_end()
        else:
            overlap = self._overlaps and not self._observing and not self._accumulating
            gradients.before_backward(self._begin if overlap else None)

    def end_backward(self) -> bool:
        """True if the gradient is complete: the backward pass was not of another model, and not nested."""
        self._depth -= 1
        return bool(self._replica.gradients.touched) and not self._depth

    def backward_failed(self) -> None:
        """The script may catch the error and continue. If all workers do, only this gradient is lost."""
        self._depth -= 1
        if self._depth:
            return
        with torch.no_grad(), self._context.blocking():
            if self._replica.gradients.give_up(self._begin):
                if self._on_gradient is not None:
                    self._on_gradient()
                self._replica.gradients.recover()
            self._exchanging = False

    def sum_in_pass(self, tensor: Tensor) -> None:
        """Sums a tensor over all workers in the middle of a forward or backward pass."""
        device = self._replica.parameters[0].device.type

        def wait() -> None:
            # No autocast while other nodes run: in simulation they run on this thread.
            blocking = self._context.blocking()
            with self.meter.exchange(), torch.autocast(device, enabled=False), torch.no_grad(), blocking:
                self._node.everyone.all_reduce(tensor)

        self._context.wait_in_pass(wait)

    @property
    def exchanges_per_step(self) -> int:
        """How many exchanges a backward pass and its step count."""
        return 1 + (self._on_gradient is not None)

    def state_dict(self) -> State:
        """The worker's state. Gradients are not saved, so one that was exchanged is dropped."""
        if self._before_exchange is not None:
            return self._before_exchange
        with nullcontext() if self.writes is None else self.writes.saving():
            return self._worker.state_dict()

    def reattach(self) -> None:
        """Takes in parameters that the script has replaced, as by `p.data = ...`."""
        if not self._replica.attachment.intact:
            with self._node.lock(), torch.no_grad():
                self._replica.attachment.restore(self._settable)

    def complete(self, seconds: float) -> None:
        """Backward is complete; with the forward pass it has taken so long, in simulation."""
        self.reattach()
        self._replica.gradients.after_backward()
        self._complete, self._exchanged = True, False
        if self._accumulating:
            self._context.advance_time(seconds)
        else:
            self._exchange(seconds)

    def _exchange(self, seconds: float = 0.0) -> None:
        """Lets the worker exchange the gradient before the script uses it."""
        gradients = self._replica.gradients
        if self._on_gradient is not None:
            self._begin_exchange()
        if self._bucketed:
            # A third of a step is forward; the rest is divided among buckets by their elements.
            spans = [seconds * (bucket.share * 2 / 3) for bucket in gradients.buckets[1:]]
            for span in [seconds - sum(spans), *spans][gradients.begun :]:
                self._context.advance_time(span)
                gradients.hand_on(self._begin)
        else:
            self._context.advance_time(seconds)
        if self._may_drop and self._before_exchange is None:
            self._before_exchange = copy.deepcopy(self._worker.state_dict())
        if self._on_gradient is not None:
            with self.meter.exchange():
                self._on_gradient()
        gradients.bind()
        self._exchanged, self._exchanging = True, False
        if self._observing:
            self._observing = False
            rest = reversed(range(len(self._replica.layout.pieces)))
            order = torch.tensor(list(dict.fromkeys([*gradients.touched, *rest])))
            self._peers.broadcast(order)
            gradients.arrange(order.tolist())

    def _begin(self, bucket: Bucket) -> None:
        assert self._on_bucket is not None
        self._begin_exchange()
        with torch.no_grad():
            self._on_bucket(bucket.gradient, bucket is self._replica.gradients.buckets[-1])

    # --- the step -----------------------------------------------------------------------------------

    def _make_step(self, take: Callable[[Callable[[], Any] | None], Any]) -> Callable[..., Any]:
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self._depth:
                raise UsageError(IN_BACKWARD)
            self.on_training()
            loss = take(closure)
            self._replica.stepped()
            self._hooks.after_step(*_given(closure))
            if self.check is not None:
                with torch.no_grad(), self._context.blocking():
                    self.check.after_step()
            if self.after_step is not None:
                self.after_step()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
            self._node.stopping.after_step()
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or earlier schedulers would warn
        return step

    def _step_after(self, closure: Callable[[], Any] | None) -> Any:
        """A step of an optimizer that evaluates its closure once, before the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(closure)
        return loss

    def _step_with(self, closure: Callable[[], Any] | None) -> Any:
        """A step of an optimizer that calls its closure several times, such as LBFGS.

        All workers evaluate it together: gradient and loss are those of the union of their batches, so all
        optimizers take the same decisions.
        """
        if closure is None:
            raise UsageError("this optimizer needs a closure that computes the loss: optimizer.step(closure)")
        replica, losses = self._replica, []
        self._hooks.before_step(closure)

        def evaluate() -> Any:
            self._complete = False
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad(), self._context.blocking():
                self._finish_gradient()
            replica.check_finite(self._node.me, replica.steps)
            losses.append(self._mean_loss(loss))
            return losses[-1]

        with torch.no_grad(), self._context.blocking():
            replica.steps += 1
            replica.closure = evaluate
            self._count_exchange()
            self._node.stopping.before_step()
            try:
                self.meter.step(self._worker.step)
            except PeerLost as error:
                error.untouched = False  # the line search has moved the parameters
                raise
            self._complete = False
        return losses[0]

    def _mean_loss(self, loss: Any) -> Any:
        """The loss on the batches of all workers together."""
        scale = self._replica.gradients.scaling
        if self._peers.size == 1:
            return loss
        mean = torch.as_tensor(loss).detach().clone().reshape(1) * scale
        with torch.no_grad(), self._context.blocking(), self.meter.exchange():
            self._peers.all_reduce(mean, op="mean")
        return mean.reshape(()) if isinstance(loss, Tensor) else mean.item()

    def _step(self, closure: Callable[[], Any] | None) -> None:
        replica = self._replica
        with torch.no_grad(), self._context.blocking():
            self.reattach()
            self._finish_gradient()
            if self._hooks.before_step(*_given(closure)):
                replica.gradients.gather()
            self._complete, self._before_exchange = False, None
            replica.steps += 1
            self.check_step()
            replica.check_finite(self._node.me)
            if self.loads is not None:
                self.loads.check()
            if self.writes is not None:
                self.writes.check()
            self._count_exchange()
            self._node.stopping.before_step()
            self.meter.step(self._worker.step)
            if self.writes is not None:
                self.writes.written()

    def _begin_exchange(self) -> None:
        if not self._exchanging:  # or it began while backward ran
            self._exchanging = True
            self._count_exchange()

    def _count_exchange(self) -> None:
        self.exchanges += 1
        self.check_exchange()

    def _finish_gradient(self) -> None:
        """Exchanges the gradient, unless that was done at the end of backward."""
        gradients = self._replica.gradients
        if self._complete:
            gradients.gather()
        else:  # gradients that were set without `backward()`, or no gradients
            self._begin_forward()
            gradients.before_anything()
            self.complete(self._context.compute_time())
        if not self._exchanged:
            self._exchange()


def _given(closure: Callable[[], Any] | None) -> tuple[Any, ...]:
    """The arguments of `optimizer.step()`."""
    return () if closure is None else (closure,)


def _has_residual(strategy: Strategy) -> bool:
    """True if a codec keeps a part of each gradient, to send it later."""
    return any(
        part.codec is not None and part.codec.feedback and part.exchanges == "gradients"
        for part in strategy.parts
    )
