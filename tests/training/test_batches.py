from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.training.batches import plan_steps


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=120),
    examples=st.integers(1, 400),
    batch_size=st.integers(1, 40),
    seed=st.integers(-(2**40), 2**40),
)
def test_a_plan_has_the_asked_number_of_full_batches_of_existing_distinct_rows(
    lengths, examples, batch_size, seed
):
    steps = plan_steps(lengths, examples=examples, batch_size=batch_size, seed=seed)
    size = min(batch_size, len(lengths))
    assert len(steps) == max(1, examples // size)
    for rows in steps:
        assert len(rows) == size == len(set(rows.tolist()))
        assert rows.min() >= 0 and rows.max() < len(lengths)


def test_every_row_is_seen_before_any_is_seen_again():
    lengths = np.random.default_rng().integers(1, 300, size=160).tolist()
    steps = plan_steps(lengths, examples=320, batch_size=16, seed=3)
    assert sorted(np.concatenate(steps[:10]).tolist()) == list(range(160))
    assert sorted(np.concatenate(steps[10:]).tolist()) == list(range(160))
    assert not np.array_equal(np.concatenate(steps[:10]), np.concatenate(steps[10:]))


def test_rows_of_like_length_share_a_batch_so_that_little_is_padding():
    lengths = np.random.default_rng().integers(10, 200, size=2048)
    steps = plan_steps(lengths.tolist(), examples=2048, batch_size=16, seed=0)
    padded = sum(int(lengths[rows].max()) * len(rows) for rows in steps)
    assert padded < 1.12 * lengths.sum()


def test_the_plan_depends_on_the_seed_and_on_nothing_else():
    lengths = np.random.default_rng().integers(10, 200, size=100).tolist()
    first = plan_steps(lengths, examples=64, batch_size=8, seed=5)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(first, plan_steps(lengths, examples=64, batch_size=8, seed=5), strict=True)
    )
    other = plan_steps(lengths, examples=64, batch_size=8, seed=6)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    longer = plan_steps(lengths, examples=96, batch_size=8, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(first, longer, strict=False))
