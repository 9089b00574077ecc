"""Which rows make which step: a pure function of (seed, lengths, step), so that a run resumes exactly.

Rows of like length share a batch, since padding to the longest row is otherwise a fifth of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

BUCKET_BATCHES = 16
"""Batches whose rows are sorted together: enough to cut padding, few enough to stay well mixed."""


def plan_steps(lengths: Sequence[int], *, examples: int, batch_size: int, seed: int) -> list[np.ndarray]:
    """Row numbers of every step of a run.

    Args:
        lengths: tokens (or characters) of each row, only compared with each other.
        examples: rows to be seen in all; the set is reshuffled whenever it is used up.
        batch_size: rows a step; a last incomplete batch is dropped.
        seed: of the shuffles.

    Returns:
        int64 arrays of `batch_size` row numbers (fewer when the set itself is smaller).
    """
    assert len(lengths) > 0, "an empty set is refused before planning"
    order = np.asarray(lengths)
    size = min(batch_size, len(order))
    wanted = max(1, examples // size)
    steps: list[np.ndarray] = []
    for epoch in _epochs(order, size, seed):
        steps.extend(epoch[: wanted - len(steps)])
        if len(steps) == wanted:
            break
    return steps


def _epochs(lengths: np.ndarray, batch_size: int, seed: int) -> Iterator[list[np.ndarray]]:
    epoch = 0
    while True:
        rng = np.random.default_rng([seed & 0x7FFFFFFF, epoch])
        rows = rng.permutation(len(lengths))
        batches: list[np.ndarray] = []
        for start in range(0, len(rows), batch_size * BUCKET_BATCHES):
            bucket = rows[start : start + batch_size * BUCKET_BATCHES]
            bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
            batches.extend(
                bucket[i : i + batch_size] for i in range(0, len(bucket) - batch_size + 1, batch_size)
            )
        yield [batches[i] for i in rng.permutation(len(batches))]
        epoch += 1
