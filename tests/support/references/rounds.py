"""Workers in step: means of gradients, means of parameters, outer optimizers; one level or two."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tests.support.references.descent import SIZE, Outcome, Run, mean, zero


class Exchange:
    """Every `period` steps the units, workers or whole sites, become the mean of all, or what is made of it.

    local: w <- mean_j w_j.  average: w <- sum n_j w_j / sum n_j.
    slowmo: u <- beta u + (w_prev - mean) / lr, w <- w_prev - alpha lr u.
    diloco: delta = theta - mean, m <- beta m + delta, theta <- theta - lr (delta + beta m).
    bmuf: m <- momentum m + mean - theta, theta <- theta + m.
    """

    def __init__(self, run: Run, rule: Any, units: list[list[int]]) -> None:
        self.run, self.rule, self.units = run, rule, units
        self.theta, self.m, self.since = run.begin, zero(), 0

    def due(self, step: int) -> bool:
        period = self.rule.shortest if self.rule.period == "auto" else self.rule.period
        return bool(step - self.since == period)

    def before(self, step: int, x: list[Tensor]) -> None:
        if step == self.since + 1:
            self.theta = x[self.units[0][0]]

    def __call__(self, step: int, x: list[Tensor], b: list[Tensor]) -> None:
        rule, units = self.rule, self.units
        counts = [self.run.trained_on(unit, self.since, step) for unit in units]
        if rule.name != "average":
            counts = [1.0] * len(units)

        def mean(vectors: list[Tensor]) -> Tensor:
            parts = [count * vectors[unit[0]] for count, unit in zip(counts, units, strict=True)]
            return torch.stack(parts).sum(0) / sum(counts)

        y = mean(x)
        if rule.name == "slowmo":
            lr = self.run.rate(step)
            self.m = rule.beta * self.m + (self.theta - y) / lr
            y = self.theta - rule.alpha * lr * self.m
        elif rule.name == "diloco":
            delta = self.theta - y
            self.m = rule.beta * self.m + delta
            y = self.theta - rule.lr * (delta + rule.beta * self.m)
        elif rule.name == "bmuf":
            self.m = rule.momentum * self.m + y - self.theta
            y = self.theta + self.m
        policy = getattr(rule, "momentum", "keep") if rule.name != "bmuf" else "keep"
        momentum = mean(b) if policy == "average" else zero()
        for rank in itertools.chain(*units):
            x[rank] = y
            b[rank] = b[rank] if policy == "keep" else momentum
        self.since = step

    finish = __call__


class Streaming(Exchange):
    """DiLoCo by fragments: begun every H/P steps, joined `overlap` steps later, and then mixed in.

    theta_p makes its outer step by the delta of when it was begun; w_p <- (1 - mix) theta_p + mix w_p.
    """

    def __init__(self, run: Run, rule: Any, units: list[list[int]]) -> None:
        super().__init__(run, rule, units)
        self.every, self.under_way = rule.period // rule.fragments, -1
        self.delta = zero()

    def before(self, step: int, x: list[Tensor]) -> None:
        pass

    def due(self, step: int) -> bool:
        return True

    def fragment(self, number: int) -> slice:
        size = SIZE // self.rule.fragments
        return slice(number * size, (number + 1) * size)

    def outer(self, number: int) -> None:
        part, rule = self.fragment(number), self.rule
        theta, m, delta = self.theta.clone(), self.m.clone(), self.delta[part]
        m[part] = rule.beta * m[part] + delta
        theta[part] -= rule.lr * (delta + rule.beta * m[part])
        self.theta, self.m = theta, m

    def __call__(self, step: int, x: list[Tensor], b: list[Tensor]) -> None:
        if step % self.every == 0:
            self.under_way = (step // self.every - 1) % self.rule.fragments
            self.delta = self.measure(x)
        if self.under_way >= 0 and step % self.every == self.rule.overlap:
            self.join(x)

    def measure(self, x: list[Tensor]) -> Tensor:
        return self.theta - mean([x[unit[0]] for unit in self.units])

    def join(self, x: list[Tensor]) -> None:
        part, mix = self.fragment(self.under_way), self.rule.mix
        self.outer(self.under_way)
        for rank in itertools.chain(*self.units):
            x[rank] = x[rank].clone()
            x[rank][part] = (1 - mix) * self.theta[part] + mix * x[rank][part]
        self.under_way = -1

    def finish(self, step: int, x: list[Tensor], b: list[Tensor]) -> None:
        """What is under way is joined, and all that was not just exchanged makes one more outer step."""
        if self.under_way >= 0:
            self.join(x)
        self.delta = self.measure(x)
        latest = (step // self.every - 1) % self.rule.fragments if step % self.every == 0 else -1
        for number in range(self.rule.fragments):
            if number != latest:
                self.outer(number)
        for rank in itertools.chain(*self.units):
            x[rank] = self.theta


def synchronous_rounds(run: Run) -> Outcome:
    """Workers in step: inside a site they average gradients or parameters, and sites exchange in rounds.

    A single level is the same with one site for all (`allreduce`), or with a site for each worker.
    """
    everybody, alone = [list(run.ranks)], [[rank] for rank in run.ranks]
    inside: Any
    between: Any
    *above, between = run.strategy.parts
    inside, sites = (above[0], run.sites) if above else (None, alone)
    if between.name == "allreduce":
        inside, between, sites = between, None, everybody
    averages_gradients = inside is not None and inside.name == "allreduce"
    exchanges: list[Exchange] = []
    if inside is not None and not averages_gradients:
        exchanges += [Exchange(run, inside, [[rank] for rank in site]) for site in sites]
    if between is not None:
        kind = Streaming if between.name == "streaming-diloco" else Exchange
        exchanges.append(kind(run, between, sites))
    last_together = _last_together(run) if run.strategy.parts[0].name == "postlocal" else 0

    x, b = [run.begin] * run.workers, [zero()] * run.workers
    seen = [[run.begin] for _ in run.ranks]
    for step in range(1, run.count + 1):
        for exchange in exchanges:
            exchange.since = max(exchange.since, min(step - 1, last_together))
            exchange.before(step, x)
        together = sites if averages_gradients else alone
        for group in everybody if step <= last_together else together:
            g = mean([run.gradient(rank, step) for rank in group])
            for rank in group:
                x[rank], b[rank] = run.sgd(x[rank], b[rank], g, step)
        for exchange in exchanges:
            if step > last_together and exchange.due(step):
                exchange(step, x, b)
        for rank in run.ranks:
            seen[rank].append(x[rank])
    for exchange in exchanges:
        if exchange.since < run.count:
            exchange.finish(run.count, x, b)
    return Outcome(x[0], seen)


def _last_together(run: Run) -> int:
    """postlocal averages gradients for `after` steps, or through the first step with a lower rate."""
    strategy: Any = run.strategy
    rates = [run.descent.rate(step) for step in range(1, run.count + 1)]
    falls = [step for step, (one, two) in enumerate(itertools.pairwise(rates), 2) if two < one]
    return strategy.after or min(falls, default=run.count)
