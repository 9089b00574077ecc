"""Retrieval: does a reconstruction find its own vector among many?

FVE asks how near a reconstruction is; retrieval asks whether it is nearer to its own vector than to
others, which a reconstruction pulled towards the mean can still be. Similarities are mean-centred
cosines (see fve.py), otherwise one vector near the mean would win every comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dragoman.evaluation.fve import centred_similarities
from dragoman.shapes import Vectors

POOL = 256


@dataclass(frozen=True)
class Chance:
    """What guessing gives in a pool: top-1, top-5 (shares) and mean reciprocal rank."""

    top1: float
    top5: float
    mrr: float


def chance(pool: int) -> Chance:
    """Expected figures of a random ranking of `pool` vectors: 1/P, min(5, P)/P, H_P/P."""
    return Chance(1.0 / pool, min(5, pool) / pool, float(sum(1.0 / r for r in range(1, pool + 1)) / pool))


@dataclass(frozen=True)
class Ranks:
    """Rank of the own vector for each row that stood in a pool.

    Attributes:
        rows: indices of the rows that took part, pool after pool.
        ranks: 1 is found first.
        pool: vectors in a pool.
        pools: disjoint pools averaged over.
    """

    rows: Int[np.ndarray, " rows"]
    ranks: Int[np.ndarray, " rows"]
    pool: int
    pools: int

    def top(self, k: int) -> Float[np.ndarray, " rows"]:
        """1.0 where the own vector is among the first k, else 0.0."""
        return (self.ranks <= k).astype(np.float64)

    def reciprocal(self) -> Float[np.ndarray, " rows"]:
        """1 / rank."""
        return 1.0 / self.ranks


def own_ranks(similarities: Float[Tensor, "n n"]) -> Int[np.ndarray, " n"]:
    """Rank of column i in row i, the highest similarity first; 1 is best.

    Ties count against: every other column that is as similar stands before the own one, so that a
    collapsed reconstructor cannot score by being equally near to all.
    """
    own = similarities.diagonal()[:, None]
    # The own column equals itself, so counting >= over all columns already adds the 1 of a 1-based rank.
    return (similarities >= own).sum(dim=1).cpu().numpy()


def retrieval_ranks(
    predicted: Vectors,
    target: Vectors,
    centre: Float[Tensor, " d_model"],
    *,
    pool: int = POOL,
    seed: int = 0,
) -> Ranks:
    """Ranks in random disjoint pools of held-out vectors.

    Args:
        predicted: reconstructions, row i belongs to target row i.
        target: raw vectors.
        centre: mean of the normalised targets, taken from both sides.
        pool: vectors in a pool. With fewer rows one pool of all rows is used (the result says so);
            with 2 * pool rows or more the ranks of several disjoint pools come back; rows that fill no
            whole pool are left out.
        seed: which rows meet in which pool.
    """
    n = len(target)
    size = min(pool, n)
    pools = n // size
    order = np.random.default_rng(seed).permutation(n)[: pools * size]
    ranks: list[Int[np.ndarray, " pool"]] = []
    for rows in order.reshape(pools, size):
        chosen = torch.from_numpy(rows)
        ranks.append(own_ranks(centred_similarities(predicted[chosen], target[chosen], centre)))
    return Ranks(order, np.concatenate(ranks), size, pools)
