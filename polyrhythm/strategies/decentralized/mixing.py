"""Mixing matrices: how much each worker counts in the mean that its neighbors take, and that mean itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import BLOCK
from polyrhythm.strategies.decentralized.topology import Graph, Topology, check_connected, regraph

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


def metropolis(neighbors: Graph) -> tuple[tuple[float, ...], ...]:
    """The weight of each neighbor of each place: W_ij = 1 / (1 + max(d_i, d_j)) (Metropolis, Hastings).

    W_ii is the rest, and never below 1 / (1 + d_i). So W is symmetric and its rows and columns sum to 1:
    mixing with it preserves the mean.
    """
    degrees = [len(each) for each in neighbors]
    return tuple(
        tuple(1 / (1 + max(degrees[place], degrees[other])) for other in near)
        for place, near in enumerate(neighbors)
    )


def matrix(neighbors: Graph) -> NDArray[np.float64]:
    """W as a matrix."""
    import numpy as np

    size = len(neighbors)
    weights = np.zeros((size, size))
    for place, (near, given) in enumerate(zip(neighbors, metropolis(neighbors), strict=True)):
        weights[place, list(near)] = given
        weights[place, place] = 1 - math.fsum(given)
    return weights


def check_weights(weights: NDArray[np.float64], whole: bool = True) -> None:
    """Raises UsageError unless mixing with these weights converges to the mean of all and preserves it.

    `whole`: the graph must be connected; the graph of a single turn need not be.
    """
    import numpy as np

    near = 1e-12
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        raise UsageError(f"the mixing matrix must be square, not {weights.shape}")
    if not np.isfinite(weights).all() or weights.min() < 0:
        raise UsageError("unbalanced topology: a weight is negative or not finite")
    if np.abs(weights - weights.T).max() > near:
        one, other = np.unravel_index(np.abs(weights - weights.T).argmax(), weights.shape)
        raise UsageError(
            f"the mixing matrix is not symmetric: W[{one},{other}] = {weights[one, other]:g}, "
            f"W[{other},{one}] = {weights[other, one]:g}"
        )
    if np.abs(weights.sum(1) - 1).max() > near:
        place = int(np.abs(weights.sum(1) - 1).argmax())
        total = float(weights[place].sum())
        raise UsageError(f"unbalanced topology: the weights of worker {place} add up to {total:g}, not 1")
    if whole:
        check_connected(tuple(tuple(np.flatnonzero(row).tolist()) for row in weights))


def contraction(weights: NDArray[np.float64]) -> float:
    """rho, W's second largest |eigenvalue|: mixing leaves at most this share of the distance to the mean."""
    import numpy as np

    if len(weights) == 1:
        return 0.0
    return float(np.sort(np.abs(np.linalg.eigvalsh(weights)))[-2])


@lru_cache(maxsize=8)
def weights_by_turn(
    topology: Topology, ranks: tuple[int, ...], seed: int
) -> Sequence[Mapping[int, Mapping[int, float]]]:
    """For each turn of the topology: the weight of each neighbor of each of these workers, checked.

    Cached because in simulation all workers need the same.
    """
    place = {rank: number for number, rank in enumerate(ranks)}
    turns = []
    for turn in range(topology.turns(len(ranks))):
        near = regraph(topology, ranks, seed, turn)
        weights = matrix(tuple(tuple(place[rank] for rank in near[own]) for own in ranks))
        check_weights(weights, whole=False)
        turns.append(
            {own: {rank: float(weights[place[own], place[rank]]) for rank in near[own]} for own in ranks}
        )
    return turns


def mix(
    own: Sequence[Tensor],
    published: Sequence[Tensor] | None,
    given: Sequence[tuple[float, Sequence[Tensor]]],
) -> None:
    """own <- own + sum_j W_ij (published_j - published_i), in rank order.

    In this form vectors that are equal everywhere stay equal to the last bit. If `published` is None, the
    differences themselves are given. Works in blocks that stay in the cache, so each vector is read once.
    16-bit numbers are summed in 32 bits and rounded once.
    """
    import torch

    if not given:
        return
    for part, target in enumerate(own):
        exact = torch.promote_types(target.dtype, torch.float32)
        spare = torch.empty(min(BLOCK, target.numel()), dtype=exact, device=target.device)
        for start in range(0, target.numel(), BLOCK):
            here = slice(start, start + BLOCK)
            total = target[here].to(exact)  # no copies, if they are exact
            base = None if published is None else published[part][here].to(exact)
            for weight, theirs in given:
                difference = theirs[part][here]
                if base is not None:
                    difference = torch.sub(difference, base, out=spare[: total.numel()])
                total.add_(difference, alpha=weight)
            if target.dtype != exact:
                target[here].copy_(total)
