"""FVE, centred cosine and retrieval against plain float64 loops and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import label_ranking_average_precision_score, r2_score, top_k_accuracy_score
from sklearn.metrics.pairwise import cosine_similarity

from dragoman import scaling
from dragoman.errors import VectorError
from dragoman.evaluation.fve import baselines, centred_cosine, centred_similarities, fve
from dragoman.evaluation.retrieval import chance, own_ranks, retrieval_ranks


def planted(n=200, d=24, shift=1.5, seed=None):
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.normal(size=(n, d)) + shift) * rng.uniform(1, 300, (n, 1))).float()


def unit64(rows):
    """Rows at norm sqrt(d), one at a time in Python floats."""
    out = []
    for row in rows.double().tolist():
        norm = math.sqrt(sum(x * x for x in row))
        out.append([x / norm * math.sqrt(len(row)) for x in row])
    return np.array(out)


def test_both_denominators_equal_plain_float64_loops():
    vectors = planted()
    unit = unit64(vectors)
    mean = [sum(column) / len(column) for column in unit.T]
    length = math.sqrt(sum(m * m for m in mean))
    direction = [m / length * math.sqrt(len(mean)) for m in mean]
    raw = sum(sum((x - m) ** 2 for x, m in zip(row, mean, strict=True)) / len(mean) for row in unit)
    turned = sum(sum((x - m) ** 2 for x, m in zip(row, direction, strict=True)) / len(mean) for row in unit)
    found = baselines(vectors)
    assert found.raw_variance == pytest.approx(raw / len(unit), rel=1e-5)
    assert found.normalised_mean == pytest.approx(turned / len(unit), rel=1e-5)
    assert found.normalised_mean > found.raw_variance
    assert found.n == 200


def test_raw_variance_equals_one_minus_the_squared_length_of_the_mean_direction():
    # For unit rows the total variance is 1 - |mean|^2, and predicting mean/|mean| costs 2(1 - |mean|).
    vectors = planted(shift=0.7)
    length = float(np.linalg.norm(unit64(vectors).mean(0)) / math.sqrt(24))
    found = baselines(vectors)
    assert found.raw_variance == pytest.approx(1 - length**2, rel=1e-5)
    assert found.normalised_mean == pytest.approx(2 * (1 - length), rel=1e-5)


def test_fve_equals_the_variance_weighted_r2_of_scikit_learn():
    target = planted()
    predicted = target + planted() * 0.2
    mse = scaling.normalised_mse(predicted, target)
    ours = float(fve(mse.double().mean(), baselines(target).raw_variance))
    theirs = r2_score(unit64(target), unit64(predicted), multioutput="variance_weighted")
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_fve_of_the_mean_direction_is_zero_by_the_kinder_denominator_and_below_zero_by_the_other():
    target = planted()
    base = baselines(target)
    predicted = base.centre.float().expand_as(target)
    mse = scaling.normalised_mse(predicted, target).double().mean()
    assert float(fve(mse, base.normalised_mean)) == pytest.approx(0.0, abs=1e-5)
    assert float(fve(mse, base.raw_variance)) < -0.01


def test_vectors_that_all_point_one_way_have_no_fve():
    with pytest.raises(VectorError, match="all in one direction"):
        baselines(torch.ones(5, 8) * torch.arange(1, 6)[:, None])


def test_a_vector_with_nan_is_named_by_its_row():
    vectors = planted()
    vectors[7, 3] = float("nan")
    with pytest.raises(VectorError, match="first is row 7"):
        baselines(vectors)


def test_centred_cosine_equals_scikit_learn_on_the_centred_unit_rows():
    target, predicted = planted(), planted()
    centre = baselines(target).centre
    theirs = cosine_similarity(unit64(predicted) - centre.numpy(), unit64(target) - centre.numpy())
    np.testing.assert_allclose(centred_similarities(predicted, target, centre), theirs, atol=1e-5)
    np.testing.assert_allclose(centred_cosine(predicted, target, centre), np.diag(theirs), atol=1e-5)


def test_centring_takes_away_what_the_mean_alone_explains():
    target = planted(shift=20.0)
    base = baselines(target)
    guess = base.centre.float() + 0.01 * torch.randn(200, 24)
    assert float(scaling.cosine(guess, target).mean()) > 0.99
    assert abs(float(centred_cosine(guess, target, base.centre).mean())) < 0.15


def test_ranks_in_one_pool_agree_with_scikit_learn():
    target = planted(n=64)
    predicted = target + planted(n=64) * 0.6
    centre = baselines(target).centre
    ranks = retrieval_ranks(predicted, target, centre, pool=64, seed=4)
    assert (ranks.pool, ranks.pools) == (64, 1)
    scores = centred_similarities(predicted, target, centre).numpy()
    labels = np.arange(64)
    assert ranks.top(1).mean() == pytest.approx(top_k_accuracy_score(labels, scores, k=1))
    assert ranks.top(5).mean() == pytest.approx(top_k_accuracy_score(labels, scores, k=5))
    # With a single relevant column, average precision is the reciprocal rank.
    theirs = label_ranking_average_precision_score(np.eye(64, dtype=int), scores)
    assert ranks.reciprocal().mean() == pytest.approx(theirs)
    assert 0.02 < ranks.top(1).mean() < 1.0


def test_pools_are_disjoint_and_rows_that_fill_no_pool_are_left_out():
    target = planted(n=70)
    ranks = retrieval_ranks(target, target, baselines(target).centre, pool=32, seed=0)
    assert (ranks.pools, len(ranks.rows), len(set(ranks.rows.tolist()))) == (2, 64, 64)
    assert (ranks.ranks == 1).all()


def test_fewer_rows_than_a_pool_say_the_smaller_pool():
    target = planted(n=40)
    assert retrieval_ranks(target, target, baselines(target).centre).pool == 40


def test_unrelated_predictions_find_their_vector_as_often_as_chance_says():
    target = planted(n=2560)
    ranks = retrieval_ranks(planted(n=2560), target, baselines(target).centre, pool=64)
    expected = chance(64)
    assert ranks.top(1).mean() == pytest.approx(expected.top1, abs=0.012)
    assert ranks.top(5).mean() == pytest.approx(expected.top5, abs=0.022)
    assert ranks.reciprocal().mean() == pytest.approx(expected.mrr, abs=0.02)


def test_a_tie_counts_against_the_own_vector():
    assert own_ranks(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).tolist() == [2, 1]


def test_a_collapsed_reconstructor_does_not_beat_chance():
    target = planted(n=128)
    collapsed = target[:1].expand_as(target)
    ranks = retrieval_ranks(collapsed, target, baselines(target).centre, pool=128)
    assert ranks.top(1).sum() <= 1
