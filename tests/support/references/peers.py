"""Workers that talk to each other: on graphs, in pairs, to all, or by shared memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from polyrhythm.topology import pairs
from tests.support.references.descent import SIZE, Outcome, Run, mean


def distances(topology: str, workers: int, turn: int) -> list[int]:
    """How far away the neighbours are on a circle of all workers."""
    powers = [1 << power for power in range((workers - 1).bit_length())]
    return {
        "ring": [1], "complete": list(range(1, workers)), "exponential-all": powers,
        "exponential": [powers[turn % len(powers)]],
    }[topology]  # fmt: skip


def weights(topology: str, workers: int, turn: int) -> Tensor:
    """W_ij = 1 / (1 + max(d_i, d_j)) between neighbours, the rest of each row on the diagonal."""
    near = torch.zeros(workers, workers).double()
    for rank, far in itertools.product(range(workers), distances(topology, workers, turn)):
        near[rank, (rank + far) % workers] = near[(rank + far) % workers, rank] = 1
    degrees = near.sum(1)
    w = near / (1 + torch.maximum(degrees[:, None], degrees[None, :]))
    return w + torch.diag(1 - w.sum(1))


def mixed(run: Run) -> Outcome:
    """gossip: x_i <- sum_j W_ij x_j - lr b_i, or the mean of (x_j - lr b_j) if the step comes first.

    choco, without a codec: y_i = x_i - lr b_i, x_i <- y_i + gamma sum_j W_ij (y_j - y_i).
    """
    strategy: Any = run.strategy
    gamma = (1.0 if strategy.gamma == "auto" else strategy.gamma) if strategy.name == "choco" else 1.0
    first = strategy.name == "gossip" and strategy.order == "mix-while-computing"
    x, b = torch.stack([run.begin] * run.workers), torch.zeros(run.workers, SIZE).double()
    seen = [[run.begin] for _ in run.ranks]
    for step in range(1, run.count + 1):
        if first and step > 1:
            x = weights(strategy.topology, run.workers, step - 2) @ x
        stepped = [run.sgd(x[rank], b[rank], run.gradient(rank, step), step) for rank in run.ranks]
        x, b = torch.stack([each for each, _ in stepped]), torch.stack([each for _, each in stepped])
        if not first:
            x = x + gamma * (weights(strategy.topology, run.workers, step - 1) @ x - x)
        for rank in run.ranks:
            seen[rank].append(x[rank])
    return Outcome(x.mean(0), seen)


def pushed(run: Run) -> Outcome:
    """x_i <- x_i - lr b_i with the gradient at z_i = x_i / omega_i; 1 / (F + 1) of both goes to each of F
    receivers, and arrives `ahead` rounds later."""
    strategy: Any = run.strategy
    x, omega, b = [run.begin] * run.workers, [1.0] * run.workers, [torch.zeros(SIZE).double()] * run.workers
    seen = [[run.begin] for _ in run.ranks]
    under_way: list[list[tuple[int, Tensor, float]]] = []

    def arrive() -> None:
        for to, given, weight in under_way.pop(0):
            x[to], omega[to] = x[to] + given, omega[to] + weight

    powers = (run.workers - 1).bit_length()
    for step in range(1, run.count + 1):
        for rank in run.ranks:
            z = x[rank] / omega[rank]
            new, b[rank] = run.sgd(z, b[rank], run.gradient(rank, step), step)
            x[rank] = x[rank] + new - z
        fanout, given = min(strategy.fanout, powers), []
        for rank, number in itertools.product(run.ranks, range(fanout)):
            to = (rank + (1 << ((step - 1) * fanout + number) % powers)) % run.workers
            given.append((to, x[rank] / (fanout + 1), omega[rank] / (fanout + 1)))
        under_way.append(given)
        for rank in run.ranks:
            x[rank], omega[rank] = x[rank] / (fanout + 1), omega[rank] / (fanout + 1)
        if len(under_way) > strategy.ahead:
            arrive()
        for rank in run.ranks:
            seen[rank].append(x[rank] / omega[rank])
    while under_way:
        arrive()
    return Outcome(mean([x[rank] / omega[rank] for rank in run.ranks]), seen)


def met(run: Run) -> Outcome:
    """m_i <- mu m_i + lr mean(theta - phi) + lr (mean phi - phi_i), phi_i <- phi_i + m_i, over pairs."""
    strategy: Any = run.strategy
    theta, phi = [run.begin] * run.workers, [run.begin] * run.workers
    m = b = [torch.zeros(SIZE).double()] * run.workers
    b, m, seen = list(b), list(m), [[run.begin] for _ in run.ranks]
    for step in range(1, run.count + 1):
        for rank in run.ranks:
            theta[rank], b[rank] = run.sgd(theta[rank], b[rank], run.gradient(rank, step), step)
        turn, over = divmod(step, strategy.period)
        if not over:
            together = [list(pair) for pair in pairs(run.workers, 0, turn - 1)]
            together += [[rank] for rank in run.ranks if rank not in itertools.chain(*together)]
            for group in together:
                way, middle = mean([theta[i] - phi[i] for i in group]), mean([phi[i] for i in group])
                for i in group:
                    m[i] = strategy.mu * m[i] + strategy.lr * way + strategy.lr * (middle - phi[i])
            theta = phi = [phi[rank] + m[rank] for rank in run.ranks]
            theta = list(theta)
        for rank in run.ranks:
            seen[rank].append(theta[rank])
    return Outcome(mean(theta), seen)


def averaged(run: Run) -> Outcome:
    """AD-PSGD: whoever is asked computes d = (x_i - x_j) / 2 and adds it to its own; the other subtracts it,
    when its next gradient is there, and then both take their steps. Averages come in the order of the log."""
    zero = torch.zeros(SIZE).double()
    x, b, drift = [run.begin] * run.workers, [zero] * run.workers, [zero] * run.workers
    seen = [[run.begin] for _ in run.ranks]
    shown, owed = [run.begin] * run.workers, [zero] * run.workers
    for line in run.log:
        if line.get("kind") == "average":
            rank, other = int(line["node"].split()[1]), int(line["sender"].split()[1])
            owed[other] = (shown[other] - x[rank] - drift[rank]) / 2
            drift[rank] = drift[rank] + owed[other]
        elif line["event"] == "apply":
            rank = int(line["node"].split()[1])
            step = len(seen[rank])
            there = x[rank] - owed[rank] + drift[rank]
            x[rank], b[rank] = run.sgd(there, b[rank], run.gradient(rank, step), step)
            owed[rank] = drift[rank] = zero
            shown[rank] = x[rank]
            seen[rank].append(x[rank])
    return Outcome(mean([x[i] - owed[i] + drift[i] for i in run.ranks]), seen)


def shared(run: Run) -> Outcome:
    """HogWild!: one w for all, each worker with a momentum of its own; steps in the order of the log."""
    w, b = run.begin, [torch.zeros(SIZE).double()] * run.workers
    seen = [[run.begin] for _ in run.ranks]
    for line in run.log:
        if line["event"] == "step":
            rank = int(line["node"].split()[1])
            w, b[rank] = run.sgd(w, b[rank], run.gradient(rank, line["step"]), line["step"])
            seen[rank].append(w)
    return Outcome(w, seen)


def pulsed(run: Run) -> Outcome:
    """r <- r + u; where |r| >= tau a worker sends pulses of +-tau and takes them out of r; w = w0 + tau times
    the pulses of all. Of each of the others a worker has seen the first so many, and more with each step."""
    strategy: Any = run.strategy
    tau = 2.0 ** round(math.log2(strategy.tau))
    count = run.workers if strategy.reduce == "mean" else 1
    pulses = []
    for rank in run.ranks:
        r = b = torch.zeros(SIZE).double()
        sent = [torch.zeros(SIZE).double()]
        for step in range(1, run.count + 1):
            before = run.descent.seen[rank][step - 1]
            after, b = run.sgd(before, b, run.gradient(rank, step), step)
            r = r + (after - before) / count
            due = (r / tau).trunc()
            due = due if strategy.pulses == "many" else due.sign()
            r = r - tau * due
            sent.append(sent[-1] + due)
        pulses.append(sent)
    seen: list[list[Tensor]] = []
    for rank in run.ranks:
        others = [torch.stack(pulses[other]) for other in run.ranks if other != rank]
        heard = [0] * len(others)
        seen.append([])
        for step, found in enumerate(run.descent.seen[rank]):
            theirs = (found - run.begin) / tau - pulses[rank][step]
            choices = itertools.product(*(range(least, run.count + 1) for least in heard))
            fitting = (
                heard
                for heard in choices
                if torch.equal(sum(each[n] for each, n in zip(others, heard, strict=True)), theirs.round())
            )
            heard = list(next(fitting, heard))
            known = sum(each[number] for each, number in zip(others, heard, strict=True))
            seen[-1].append(run.begin + tau * (pulses[rank][step] + known))
    return Outcome(run.begin + tau * sum(sent[-1] for sent in pulses), seen)
