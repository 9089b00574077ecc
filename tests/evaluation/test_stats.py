"""Intervals, shuffled controls and the `low-score` threshold."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_curve

from dragoman.errors import VectorError
from dragoman.evaluation.stats import bootstrap_by_group, calibrate_threshold, derange_across_groups

RNG = np.random.default_rng()


def ragged_groups(rng, documents=30, longest=6):
    return [f"doc{d}" for d in range(documents) for _ in range(rng.integers(1, longest + 1))]


def test_bootstrap_interval_agrees_with_a_plain_loop_that_redraws_documents():
    groups = ragged_groups(RNG)
    top = RNG.normal(2.0, 1.0, len(groups))
    below = RNG.uniform(1.0, 3.0, len(groups))
    estimate = bootstrap_by_group(top, groups, denominator=below, resamples=4000, seed=1)

    names = sorted(set(groups))
    rows_of = {name: [i for i, g in enumerate(groups) if g == name] for name in names}
    drawn = []
    for _ in range(4000):
        rows = [i for name in RNG.choice(names, len(names)) for i in rows_of[name]]
        drawn.append(sum(top[i] for i in rows) / sum(below[i] for i in rows))
    spread = np.std(drawn)
    assert estimate.value == pytest.approx(top.sum() / below.sum(), rel=1e-12)
    assert estimate.low == pytest.approx(np.quantile(drawn, 0.025), abs=0.2 * spread)
    assert estimate.high == pytest.approx(np.quantile(drawn, 0.975), abs=0.2 * spread)
    assert (estimate.n, estimate.documents) == (len(groups), 30)


def test_interval_by_document_covers_the_truth_where_an_interval_by_row_does_not():
    rng = np.random.default_rng(5)
    covered = {"document": 0, "row": 0}
    trials = 200
    for trial in range(trials):
        effect = np.repeat(rng.normal(0, 1, 40), 8)
        values = effect + rng.normal(0, 0.2, 320)
        by = {"document": [str(i // 8) for i in range(320)], "row": [str(i) for i in range(320)]}
        for name, groups in by.items():
            estimate = bootstrap_by_group(values, groups, resamples=300, seed=trial)
            covered[name] += estimate.low < 0 < estimate.high
    assert covered["document"] > 0.87 * trials
    assert covered["row"] < 0.75 * trials


def test_one_document_gives_a_value_without_an_interval():
    estimate = bootstrap_by_group(np.array([1.0, 3.0]), ["a", "a"])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, None, None)


def test_one_minus_swaps_the_ends_of_the_interval():
    groups = ragged_groups(RNG)
    values = RNG.normal(size=len(groups))
    plain = bootstrap_by_group(values, groups, seed=3)
    turned = plain.one_minus()
    assert turned.low == 1 - plain.high and turned.high == 1 - plain.low
    assert turned.low <= turned.value <= turned.high


def test_a_value_that_is_not_finite_is_refused_not_averaged():
    with pytest.raises(VectorError, match="1 of 3 values"):
        bootstrap_by_group(np.array([1.0, np.nan, 2.0]), ["a", "b", "c"])


@pytest.mark.parametrize("trial", range(50))
def test_derangement_is_a_permutation_that_never_stays_inside_a_document(trial):
    groups = ragged_groups(np.random.default_rng(trial), documents=4 + trial, longest=3)
    # Every other draw has a document with exactly half of the rows, where few permutations are left.
    groups += ["half"] * (len(groups) if trial % 2 else 0)
    np.random.default_rng(trial).shuffle(groups)
    partner = derange_across_groups(groups, seed=trial)
    assert sorted(partner) == list(range(len(groups)))
    assert all(groups[i] != groups[j] for i, j in enumerate(partner))


def test_derangement_depends_on_the_seed_and_on_nothing_else():
    groups = ragged_groups(RNG)
    assert (derange_across_groups(groups, seed=1) == derange_across_groups(groups, seed=1)).all()
    assert (derange_across_groups(groups, seed=1) != derange_across_groups(groups, seed=2)).any()


def test_one_document_with_more_than_half_of_the_rows_has_no_shuffled_control():
    with pytest.raises(VectorError, match="3 of 5 rows come from one document"):
        derange_across_groups(["a", "a", "a", "b", "c"])


@pytest.mark.parametrize("decimals", [1, 12])
def test_threshold_has_the_best_youden_j_of_the_roc_curve_of_scikit_learn(decimals):
    real = RNG.normal(0.3, 0.4, 400).round(decimals)
    shuffled = RNG.normal(-0.5, 0.4, 300).round(decimals)
    found = calibrate_threshold(real, shuffled)
    labels = np.r_[np.ones(400), np.zeros(300)]
    false_positive, true_positive, _ = roc_curve(labels, np.r_[real, shuffled], drop_intermediate=False)
    assert found.youden_j == pytest.approx((true_positive - false_positive).max(), abs=1e-12)
    assert found.kept_real == pytest.approx((real >= found.threshold).mean(), abs=1e-12)
    assert found.passed_shuffled == pytest.approx((shuffled >= found.threshold).mean(), abs=1e-12)


def test_perfectly_separated_scores_put_the_threshold_in_the_middle_of_the_gap():
    found = calibrate_threshold(np.array([1.0, 2.0]), np.array([-3.0, 0.0]))
    assert (found.threshold, found.youden_j) == (0.5, 1.0)


def test_threshold_refuses_an_empty_side():
    with pytest.raises(VectorError, match="0 shuffled"):
        calibrate_threshold(np.array([1.0]), np.array([]))
