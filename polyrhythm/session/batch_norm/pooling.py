"""The statistics of several sets of numbers together, from those of each: the law of total variance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Total = Callable[[Tensor], None]  # replaces a flat tensor by its sum over all workers


def pooled(means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance of the union; one row per set, weighted by its size.

    A set of size 0 is left out, for what it has may not even be a number; if all are, they count alike.

    mean = E[m_i], variance = E[v_i] + Var[m_i]. Never as E[v_i + m_i^2] - mean^2: that cancels. The average
    of the variances alone would be too small by what the means differ.

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
    total: Total, rank: int, workers: int, mean: Tensor, variance: Tensor, weight: float
) -> tuple[Tensor, Tensor, float]:
    """The same over workers, each of which brings its own, and the sum of the weights; for all the same bits.

    It is one sum over a table in which every worker fills its row, for a second round would cost more than
    the bytes of short vectors. In float64, so that weights are exact.
    """
    size = mean.numel()
    table = torch.zeros(workers, 2 * size + 1, dtype=torch.float64)
    table[rank, 0] = weight
    table[rank, 1 : size + 1] = mean.detach().cpu()
    table[rank, size + 1 :] = variance.detach().cpu()
    total(table.view(-1))
    weights = table[:, 0]
    union = pooled(table[:, 1 : size + 1], table[:, size + 1 :], weights)
    return *union, float(weights.sum())
