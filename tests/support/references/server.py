"""The parameter server, and the rules by which servers and workers treat updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.references.descent import SIZE, Outcome, Run, mean, zero


@dataclass(eq=False)
class Ask:
    """What a worker asks of the server: to take an update, if it has one, and to answer with parameters."""

    worker: int
    update: Tensor | None = None
    step: int = 0
    version: int = 0  # of the parameters that it was computed on
    fetch: bool = True
    staleness: int = 0
    told: bool = False  # the worker has its answer, or will have it as soon as it may read


Answer = tuple[Tensor, int]  # parameters and their version
Worker = Generator[Ask, Answer, None]


class Rule:
    """What a server does with updates: here the script's own SGD, b <- mu b + g + decay w; w <- w - lr b."""

    def __init__(self, run: Run) -> None:
        self.run, self.strategy, self.w, self.version = run, run.strategy, run.begin, 0
        self.mu, self.decay = run.descent.momentum, run.descent.decay
        self.b = self.zero = zero()

    def worker(self, rank: int, seen: list[Tensor]) -> Worker:
        x, version = yield Ask(rank)
        seen.append(x)
        ahead: Answer | None = None
        for step in range(1, self.run.count + 1):
            push = Ask(rank, self.outgoing(rank, x, self.run.gradient(rank, step)), step, version)
            if not self.strategy.prefetch:
                x, version = yield push
            else:  # the answer to this push is taken with the next one
                x, version = ahead or (x, version)
                ahead = yield push
            seen.append(x)

    def outgoing(self, rank: int, x: Tensor, g: Tensor) -> Tensor:
        return g

    def transform(self, push: Ask, update: Tensor) -> Tensor:
        return update

    def apply(self, update: Tensor, lr: Tensor) -> None:
        self.b = self.mu * self.b + update + self.decay * self.w
        self.w = self.w - lr * self.b

    def view(self, reader: Ask) -> Tensor:
        return self.w

    def forget(self, rank: int) -> None:
        """A worker has left."""


class Downpour(Rule):
    """Pushes the sum of `push_every` gradients, fetches every `fetch_every` steps, steps alone in between."""

    def worker(self, rank: int, seen: list[Tensor]) -> Worker:
        run, strategy = self.run, self.strategy
        if (strategy.push_every, strategy.fetch_every) == (1, 1):
            yield from super().worker(rank, seen)
            return
        x, version = yield Ask(rank)
        seen.append(x)
        accrued, base = self.zero, None
        for step in range(1, run.count + 1):
            g, base = run.gradient(rank, step), version if base is None else base
            accrued, x = accrued + g, x - run.rate(step) * g
            fetch = step % strategy.fetch_every == 0
            if step % strategy.push_every == 0:
                answer = yield Ask(rank, accrued, step, base, fetch)
                accrued, base = self.zero, None
                x, version = answer if fetch else (x, version)
            elif fetch:
                x, version = yield Ask(rank)
            seen.append(x)
        if base is not None:
            yield Ask(rank, accrued, run.count, base, fetch=False)


class DelayCompensated(Rule):
    """g <- g + lam g*g*(w - w_i); adaptive: lam / sqrt(ms + 1e-7), ms <- decay ms + (1 - decay) g*g."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.pulled: dict[int, Tensor] = {}
        self.ms = self.zero

    def transform(self, push: Ask, update: Tensor) -> Tensor:
        lam: Any = self.strategy.lam
        if self.strategy.adaptive:
            self.ms = self.strategy.decay * self.ms + (1 - self.strategy.decay) * update**2
            lam = lam / (self.ms + 1e-7).sqrt()
        return update + lam * update * update * (self.w - self.pulled[push.worker])

    def view(self, reader: Ask) -> Tensor:
        self.pulled[reader.worker] = self.w
        return self.w


class GapAware(DelayCompensated):
    """P = 1 + |w - w_i| / C, C = max lr (sqrt(mean of b*b) + 1e-8); g and decay are both divided by P."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.highest = self.zero

    def transform(self, push: Ask, update: Tensor) -> Tensor:
        count = self.version + 1
        self.ms = 0.999 * self.ms + 0.001 * (self.b if self.version else update) ** 2
        self.highest = torch.maximum(self.highest, self.run.rate(push.step))
        usual = self.highest * ((self.ms / (1 - 0.999**count)).sqrt() + 1e-8)
        penalty = 1 + (self.w - self.pulled[push.worker]).abs() / usual
        return (update + self.decay * self.w) / penalty - self.decay * self.w


class Plain(Rule):
    """Plain SGD on the server; weight decay is the worker's, at the parameters that it has."""

    def outgoing(self, rank: int, x: Tensor, g: Tensor) -> Tensor:
        return g + self.decay * x

    def apply(self, update: Tensor, lr: Tensor) -> None:
        self.w = self.w - lr * update


class DanaZero(Plain):
    """v_i <- mu v_i + g, w <- w - lr v_i; the worker is shown w - lr mu sum_j v_j."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.v: dict[int, Tensor] = {}
        self.lr = self.zero

    def transform(self, push: Ask, update: Tensor) -> Tensor:
        self.lr = self.run.rate(push.step)
        self.v[push.worker] = self.mu * self.v.get(push.worker, self.zero) + update
        return self.v[push.worker]

    def view(self, reader: Ask) -> Tensor:
        return self.w - self.lr * self.mu * sum(self.v.values(), self.zero)

    def forget(self, rank: int) -> None:
        self.v.pop(rank, None)


class DanaSlim(Plain):
    """The worker keeps v_i <- mu v_i + g, and pushes g + mu v_i."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.v = [self.zero] * run.workers

    def outgoing(self, rank: int, x: Tensor, g: Tensor) -> Tensor:
        d = g + self.decay * x
        self.v[rank] = self.mu * self.v[rank] + d
        return d + self.mu * self.v[rank]


class OrderedMomentum(Plain):
    """Rounds of N versions: one begins with u <- mu u, w <- w - lr u. A gradient that is d rounds late adds
    mu^d g to u, and takes lr (1 + mu + ... + mu^d) g from w."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.u, self.round = self.zero, 0

    def transform(self, push: Ask, update: Tensor) -> Tensor:
        now, own = self.version // self.run.workers, push.version // self.run.workers
        begun, self.round = now > self.round, now
        self.u = self.mu * self.u if begun else self.u
        direction = self.u if begun else self.zero
        self.u = self.u + self.mu ** (now - own) * update
        return direction + sum(self.mu**power for power in range(now - own + 1)) * update


class Elastic(Rule):
    """Every `period` steps d = alpha (x_i - c), x_i <- x_i - d, c <- c + d; otherwise local SGD."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        alpha = self.strategy.alpha
        self.alpha = 0.9 / run.workers if alpha is None else alpha
        self.d: dict[int, Tensor] = {}

    def worker(self, rank: int, seen: list[Tensor]) -> Worker:
        x, version = yield Ask(rank)
        seen.append(x)
        b = self.zero
        for step in range(1, self.run.count + 1):
            if step % self.strategy.period == 0:
                d, version = yield Ask(rank, x, step, version)
                x = x - d
            x, b = self.run.sgd(x, b, self.run.gradient(rank, step), step)
            seen.append(x)

    def transform(self, push: Ask, update: Tensor) -> Tensor:
        self.d[push.worker] = self.alpha * (update - self.w)
        return self.d[push.worker]

    def apply(self, update: Tensor, lr: Tensor) -> None:
        self.w = self.w + update

    def view(self, reader: Ask) -> Tensor:
        return self.w if reader.update is None else self.d[reader.worker]


class DelayedNesterov(Rule):
    """d = w_pulled - w_i after local steps. Each push: w <- w - lr d / N; every N-th: m <- beta m + mean d,
    w <- w - lr beta m."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.m = self.total = self.zero

    def worker(self, rank: int, seen: list[Tensor]) -> Worker:
        run, period = self.run, self.strategy.period
        chosen = {
            line["step"]: line["steps"]
            for line in run.log
            if line["event"] == "local steps" and line["node"] == f"worker {rank}"
        }
        pulled, version = yield Ask(rank)
        seen.append(pulled)
        x, b, since = pulled, self.zero, 0
        for step in range(1, run.count + 1):
            x, b = run.sgd(x, b, run.gradient(rank, step), step)
            if step - since == period:
                pulled, version = yield Ask(rank, pulled - x, step, version)
                x, since, period = pulled, step, chosen.get(step, period)
            seen.append(x)
        if since < run.count:
            yield Ask(rank, pulled - x, run.count, version)

    def apply(self, update: Tensor, lr: Tensor) -> None:
        count, outer, beta = self.run.workers, self.strategy.lr, self.strategy.beta
        self.w, self.total = self.w - outer * update / count, self.total + update
        if (self.version + 1) % count == 0:
            self.m = beta * self.m + self.total / count
            self.w, self.total = self.w - outer * beta * self.m, self.zero


class Server:
    """A parameter server that is told in which order asks arrive and who leaves when, and decides the rest:

    on PULL(i):  wait until i is at most `max_staleness` steps ahead of the slowest; answer VIEW(i)
    on PUSH(i):  drop it if its staleness is `discard` or more; collect TRANSFORM(weight(staleness) update)
                 once there are enough, w <- APPLY(w, mean or sum of the group), version += 1
    """

    def __init__(self, run: Run, rule: Rule) -> None:
        self.run, self.rule, self.strategy = run, rule, run.strategy
        self.seen: list[list[Tensor]] = [[] for _ in run.ranks]
        self.workers = [rule.worker(rank, self.seen[rank]) for rank in run.ranks]
        self.requests: list[Ask | None] = [next(worker) for worker in self.workers]
        self.clocks = dict.fromkeys(run.ranks, 0)
        self.readers: list[Ask] = []
        self.group: list[Ask] = []
        self.applied: list[tuple[int, ...]] = []
        self.dropped: list[tuple[int, ...]] = []

    def replay(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            if line["event"] == "left":
                rank = int(line["peer"].split()[1])
                del self.clocks[rank]
                self.rule.forget(rank)
            else:
                request = self.requests[int(line["sender"].split()[1])]
                assert request is not None and line["kind"] == (
                    "pull" if request.update is None else "push"
                ), line
                self.hear(request)
            if self.group and len(self.group) >= self.quorum():
                self.apply()
            self.reply()
        if self.group:
            self.apply()

    def quorum(self) -> int:
        wanted = self.strategy.wait_for
        if self.strategy.name == "backup":
            wanted = self.run.workers - self.strategy.spare
        elif wanted == 0 or (wanted == 1 and self.strategy.max_staleness == 0):
            wanted = self.run.workers
        return min(wanted, len(self.clocks))

    def hear(self, request: Ask) -> None:
        if request.update is None:
            self.readers.append(request)
            return
        self.clocks[request.worker] += 1
        request.staleness = self.rule.version - request.version
        if request.staleness >= self.strategy.discard:
            self.dropped.append((request.worker, request.step, self.rule.version, request.staleness))
            self.readers.append(request)
            return
        self.group.append(request)
        if self.strategy.pull == "at-once" and self.strategy.max_staleness > 0 and self.quorum() > 1:
            request.told = True
            self.readers.append(request)

    def apply(self) -> None:
        rule, strategy = self.rule, self.strategy
        group = sorted(self.group, key=lambda push: push.worker)
        self.group = []
        updates = [rule.transform(push, self.weighed(push)) for push in group]
        update = mean(updates) if strategy.reduce == "mean" else torch.stack(updates).sum(0)
        if strategy.wait_for != 1 or strategy.max_staleness == 0:
            update = clipped(update, strategy.clip)
        rule.apply(update, self.run.rate(group[0].step))
        rule.version += 1
        for push in group:
            self.applied.append((push.worker, push.step, rule.version, push.staleness))
            if not push.told:
                self.readers.append(push)

    def weighed(self, push: Ask) -> Tensor:
        assert push.update is not None
        tau, strategy = push.staleness, self.strategy
        weight = {"1": 1.0, "1/tau": 1 / max(1, tau), "exp": math.exp(-strategy.damping * tau)}
        update = push.update
        if strategy.wait_for == 1 and strategy.max_staleness > 0:
            update = clipped(update, strategy.clip)
        return weight[strategy.weight] * update

    def reply(self) -> None:
        readers, self.readers = self.readers, []
        for reader in readers:
            ahead = self.clocks[reader.worker] - min(self.clocks.values())
            if reader.fetch and ahead > self.strategy.max_staleness:
                self.readers.append(reader)
                continue
            try:
                given = self.rule.view(reader) if reader.fetch else self.rule.zero, self.rule.version
                self.requests[reader.worker] = self.workers[reader.worker].send(given)
            except StopIteration:
                self.requests[reader.worker] = None


RULES: dict[str, type[Rule]] = {
    "async": Downpour, "dc-asgd": DelayCompensated, "gap-aware": GapAware, "dana-zero": DanaZero,
    "dana-slim": DanaSlim, "ormo": OrderedMomentum, "easgd": Elastic, "delayed-nesterov": DelayedNesterov,
}  # fmt: skip


def parameter_server(run: Run) -> Outcome:
    """Each server holds an equal range, and hears of asks in its own order; the rule is element-wise."""
    result, seen = run.begin.clone(), [[run.begin.clone() for _ in range(run.count + 1)] for _ in run.ranks]
    count = run.summary["servers"]
    for number in range(count):
        # Where groups are held until they are applied, the first server decides for all what a group is.
        heard = 0 if run.strategy.pull == "next-version" else number
        server = Server(run, RULES.get(run.strategy.name, Rule)(run))
        server.replay([
            line for line in run.log
            if line["node"] == f"server {heard}" and
            (line["event"] == "left" or (line.get("kind") in ("pull", "push") and line["event"] == "deliver"))
        ])  # fmt: skip
        for event, expected in (("apply", server.applied), ("drop", server.dropped)):
            logged = [
                (line["worker"], line["step"], line["version"], line["staleness"])
                for line in run.log
                if line["event"] == event and line["node"] == f"server {number}"
            ]
            assert logged == expected, f"server {number}: {event}"
        part = slice(SIZE * number // count, SIZE * (number + 1) // count)
        result[part] = server.rule.w[part]
        for rank, step in itertools.product(run.ranks, range(run.count + 1)):
            seen[rank][step][part] = server.seen[rank][step][part]
    return Outcome(result, seen)


def clipped(update: Tensor, most: float) -> Tensor:
    length = float(update.norm())
    return update * (most / (length + 1e-6)) if length > most else update
