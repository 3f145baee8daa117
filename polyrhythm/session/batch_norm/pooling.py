"""Mean and variance of a union of sets, from those of each set: the law of total variance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SumOverWorkers = Callable[[Tensor], None]  # replaces a flat tensor by its sum over all workers


def pooled(means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance of the union; one row per set, weighted by its size.

    A set of size 0 is left out, because its mean may be NaN. If all sizes are 0, all sets count equally.

    mean = E[m_i], variance = E[v_i] + Var[m_i]. The form E[v_i + m_i^2] - mean^2 would cancel, and the
    average of the variances alone would leave out the variance between the means.

    >>> mean, variance = pooled(torch.tensor([[0.0], [4.0]]), torch.tensor([[1.0], [1.0]]), torch.ones(2))
    >>> mean.item(), variance.item()
    (2.0, 5.0)
    """
    some = weights > 0
    if some.any():
        means, variances, weights = means[some], variances[some], weights[some]
    else:
        weights = torch.ones_like(weights)
    share = (weights / weights.sum()).unsqueeze(1)
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0)


def pool(
    all_reduce: SumOverWorkers, rank: int, workers: int, mean: Tensor, variance: Tensor, weight: float
) -> tuple[Tensor, Tensor, float]:
    """The mean and variance over all workers, and the sum of the weights; the same bits on each worker.

    One all-reduce sums a table in which each worker fills its row: for short vectors a second round trip
    would cost more than the extra bytes. In float64, so that weights are exact.
    """
    size = mean.numel()
    table = torch.zeros(workers, 2 * size + 1, dtype=torch.float64)
    table[rank, 0] = weight
    table[rank, 1 : size + 1] = mean.detach().cpu()
    table[rank, size + 1 :] = variance.detach().cpu()
    all_reduce(table.view(-1))
    weights = table[:, 0]
    union = pooled(table[:, 1 : size + 1], table[:, size + 1 :], weights)
    return *union, float(weights.sum())
