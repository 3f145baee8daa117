"""ExternalTraining: a session whose script trains by another tool than `prepare`, such as torch.distributed.

The run then has no strategy, no shared data and no result of its own: the script saves what it has trained.
Steps of optimizers are counted, metrics are logged, and a dead worker ends the run.
"""

from __future__ import annotations

from polyrhythm.core.errors import UsageError
from polyrhythm.core.requests import LastStep, LeaveRun, TrainedBy
from polyrhythm.core.strategy import Strategy
from polyrhythm.session.context import WorldContext

PLAIN = "allreduce"  # the strategy of a run that was not given one


class ExternalTraining:
    """The steps of this worker's optimizers."""

    def __init__(self, context: WorldContext, strategy: Strategy, tool: str) -> None:
        if strategy.traits.uses_servers:
            raise UsageError(f"{tool} has no servers, but {strategy} starts some: leave out --strategy")
        self._context, self._strategy, self._tool = context, strategy, tool
        self.steps = 0
        context.request(TrainedBy(tool))

    def on_step(self) -> None:
        """Called before each step of an optimizer, in a script that has not called `prepare`."""
        if not self.steps:
            self._check()
        self.steps += 1
        self._report()

    def close(self) -> None:
        """The script is over: this worker leaves without a result."""
        self._report()
        self._context.flush()
        self._context.request(LastStep(0))
        self._context.request(LeaveRun(result=False))

    def _check(self) -> None:
        """Raises if the run was asked for something that only `prepare` can do."""
        plan, asked = self._context.plan, ""
        if str(self._strategy) != PLAIN:
            asked = f"--strategy {self._strategy}"
        elif plan.balance:
            asked = "--balance"
        elif plan.batch_norm is not None:
            asked = f"--batch-norm {plan.batch_norm}"
        if asked:
            raise UsageError(
                f"{asked} has no effect: the script trains by {self._tool}; leave it out, or call "
                "session.prepare(model, optimizer, loader)"
            )

    def _report(self) -> None:
        self._context.node.totals(steps=self.steps, samples=0, compute_s=0.0, wait_s=0.0)
