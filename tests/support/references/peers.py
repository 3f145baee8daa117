"""Workers that talk to each other: on graphs, in pairs, to all, or by shared memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from polyrhythm.strategies.decentralized.topology import pairs
from tests.support.references.descent import Outcome, Run, mean, zero


def edges(topology: str, workers: int, turn: int) -> list[tuple[int, int]]:
    """Who is whose neighbour: as listed, or at these distances on a circle of all workers."""
    if topology[0].isdigit():
        return [(int(one), int(other)) for one, other in (each.split("-") for each in topology.split("/"))]
    powers = [1 << power for power in range((workers - 1).bit_length())]
    distances = {
        "ring": [1], "complete": range(1, workers), "exponential-all": powers,
        "exponential": [powers[turn % len(powers)]],
    }[topology]  # fmt: skip
    return [(rank, (rank + far) % workers) for rank in range(workers) for far in distances]


def weights(topology: str, workers: int, turn: int) -> Tensor:
    """W_ij = 1 / (1 + max(d_i, d_j)) between neighbours, the rest of each row on the diagonal."""
    near = torch.zeros(workers, workers).double()
    for one, other in edges(topology, workers, turn):
        near[one, other] = near[other, one] = 1
    degrees = near.sum(1)
    w = near / (1 + torch.maximum(degrees[:, None], degrees[None, :]))
    return w + torch.diag(1 - w.sum(1))


def gossip(run: Run) -> Outcome:
    """D-PSGD: x_i <- sum_j W_ij x_j - lr b_i; with order=step-then-mix, x_i <- sum_j W_ij (x_j - lr b_j).

    CHOCO-SGD without a codec: y_i = x_i - lr b_i, x_i <- y_i + gamma sum_j W_ij (y_j - y_i).
    """
    strategy: Any = run.strategy
    gamma = 1.0 if strategy.name == "gossip" or strategy.gamma == "auto" else strategy.gamma
    mixes_first = strategy.name == "gossip" and strategy.order == "mix-while-computing"
    x, b = torch.stack([run.begin] * run.workers), torch.stack([zero()] * run.workers)
    seen = [[run.begin] for _ in run.ranks]
    for step in range(1, run.count + 1):
        if mixes_first and step > 1:  # at first all are equal
            x = weights(strategy.topology, run.workers, step - 2) @ x
        stepped = [run.sgd(x[rank], b[rank], run.gradient(rank, step), step) for rank in run.ranks]
        x, b = torch.stack([each for each, _ in stepped]), torch.stack([each for _, each in stepped])
        if not mixes_first:
            x = x + gamma * (weights(strategy.topology, run.workers, step - 1) @ x - x)
        for rank in run.ranks:
            seen[rank].append(x[rank])
    return Outcome(x.mean(0), seen)


def gradient_push(run: Run) -> Outcome:
    """x_i <- x_i - lr b_i with the gradient at z_i = x_i / omega_i. In round t a share of 1 / (F + 1) of x_i
    and omega_i goes to each of F receivers, 1, 2, 4, ... places further in turn, and arrives `ahead` rounds
    later."""
    strategy: Any = run.strategy
    x, omega, b = [run.begin] * run.workers, [1.0] * run.workers, [zero()] * run.workers
    seen = [[run.begin] for _ in run.ranks]
    powers = (run.workers - 1).bit_length()
    fanout = min(strategy.fanout, powers)
    under_way: list[list[tuple[int, Tensor, float]]] = []  # by round: to whom, and what

    def arrive() -> None:
        for to, given, weight in under_way.pop(0):
            x[to], omega[to] = x[to] + given, omega[to] + weight

    for step in range(1, run.count + 1):
        under_way.append([])
        for rank in run.ranks:
            z = x[rank] / omega[rank]
            moved, b[rank] = run.sgd(z, b[rank], run.gradient(rank, step), step)
            x[rank] = (x[rank] + moved - z) / (fanout + 1)
            omega[rank] = omega[rank] / (fanout + 1)
            for number in range(fanout):
                distance = 1 << ((step - 1) * fanout + number) % powers
                under_way[-1].append(((rank + distance) % run.workers, x[rank], omega[rank]))
        if len(under_way) > strategy.ahead:
            arrive()
        for rank in run.ranks:
            seen[rank].append(x[rank] / omega[rank])
    while under_way:
        arrive()
    return Outcome(mean([x[rank] / omega[rank] for rank in run.ranks]), seen)


def noloco(run: Run) -> Outcome:
    """m_i <- mu m_i + lr mean(theta - phi) + lr (mean phi - phi_i), phi_i <- phi_i + m_i, theta_i <- phi_i,
    with means over the two of a pair. Who meets whom is drawn by the package."""
    strategy: Any = run.strategy
    theta, phi = [run.begin] * run.workers, [run.begin] * run.workers
    m, b = [zero()] * run.workers, [zero()] * run.workers
    seen = [[run.begin] for _ in run.ranks]
    for step in range(1, run.count + 1):
        for rank in run.ranks:
            theta[rank], b[rank] = run.sgd(theta[rank], b[rank], run.gradient(rank, step), step)
        if step % strategy.period == 0:
            groups = [list(pair) for pair in pairs(run.workers, 0, step // strategy.period - 1)]
            groups += [[rank] for rank in run.ranks if rank not in itertools.chain(*groups)]
            for group in groups:
                delta, middle = mean([theta[i] - phi[i] for i in group]), mean([phi[i] for i in group])
                for i in group:
                    m[i] = strategy.mu * m[i] + strategy.lr * delta + strategy.lr * (middle - phi[i])
            phi = [phi[rank] + m[rank] for rank in run.ranks]
            theta = list(phi)
        for rank in run.ranks:
            seen[rank].append(theta[rank])
    return Outcome(mean(theta), seen)


def ad_psgd(run: Run) -> Outcome:
    """The worker that is asked computes d = (x_i - x_j) / 2 and gains it, the one that asks loses it.

    A model does not change while its gradient is computed: what it gained or lost meanwhile is added before
    its step. The log says in which order averages and steps came.
    """
    x, b, drift = [run.begin] * run.workers, [zero()] * run.workers, [zero()] * run.workers
    asked = [run.begin] * run.workers  # the parameters that each has sent to another
    seen = [[run.begin] for _ in run.ranks]
    for line in run.log:
        if line.get("kind") == "average":
            i, j = int(line["sender"].split()[1]), int(line["node"].split()[1])
            d = (asked[i] - (x[j] + drift[j])) / 2
            drift[j] = drift[j] + d
            drift[i] = drift[i] - d
        elif line["event"] == "apply":
            i = int(line["node"].split()[1])
            step = len(seen[i])
            x[i], b[i] = run.sgd(x[i] + drift[i], b[i], run.gradient(i, step), step)
            drift[i], asked[i] = zero(), x[i]
            seen[i].append(x[i])
    return Outcome(mean([x[rank] + drift[rank] for rank in run.ranks]), seen)


def hogwild(run: Run) -> Outcome:
    """One w for all, and a momentum for each worker. The log says in which order steps came."""
    w, b = run.begin, [zero()] * run.workers
    seen = [[run.begin] for _ in run.ranks]
    for line in run.log:
        if line["event"] == "step":
            rank = int(line["node"].split()[1])
            w, b[rank] = run.sgd(w, b[rank], run.gradient(rank, line["step"]), line["step"])
            seen[rank].append(w)
    return Outcome(w, seen)


def threshold_broadcast(run: Run) -> Outcome:
    """r <- r + u; where |r| >= tau a worker sends pulses of +-tau and takes them out of r; w = w0 + tau times
    the pulses of all.

    How much a worker has heard of the others is not logged. But it must be the pulses of the first so many
    steps of each, no fewer than before.
    """
    strategy: Any = run.strategy
    tau = 2.0 ** round(math.log2(strategy.tau))
    count = run.workers if strategy.reduce == "mean" else 1
    pulses = []
    for rank in run.ranks:
        r, b, sent = zero(), zero(), [zero()]
        for step in range(1, run.count + 1):
            before = run.descent.seen[rank][step - 1]
            after, b = run.sgd(before, b, run.gradient(rank, step), step)
            r = r + (after - before) / count
            due = (r / tau).trunc()
            due = due if strategy.pulses == "many" else due.sign()
            r = r - tau * due
            sent.append(sent[-1] + due)
        pulses.append(torch.stack(sent))
    seen: list[list[Tensor]] = [[] for _ in run.ranks]
    for rank in run.ranks:
        others = [pulses[other] for other in run.ranks if other != rank]
        for step, found in enumerate(run.descent.seen[rank]):
            sums = zero()
            for each in others:
                sums = sums[..., None, :] + each
            theirs = (found - run.begin) / tau - pulses[rank][step]
            fitting = (sums - theirs).abs().amax(-1).lt(1e-6).nonzero()
            heard = fitting[0].tolist() if len(fitting) else [0] * len(others)
            others = [each[least:] for each, least in zip(others, heard, strict=True)]
            known = torch.stack([each[0] for each in others]).sum(0)
            seen[rank].append(run.begin + tau * (pulses[rank][step] + known))
    return Outcome(run.begin + tau * sum(sent[-1] for sent in pulses), seen)
