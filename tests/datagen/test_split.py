from __future__ import annotations

import random
import secrets

import pytest

from dragoman.datagen.split import assign_split, keyed_uniform
from dragoman.errors import ConfigError

FRACTIONS = {"av_sft": 0.4, "ar_sft": 0.4, "refit": 0.1, "test": 0.1}


def test_the_split_depends_on_seed_and_document_and_on_nothing_else():
    ids = [secrets.token_hex(8) for _ in range(500)]
    first = {doc: assign_split(doc, FRACTIONS, 7) for doc in ids}
    random.shuffle(ids)
    turned = dict(reversed(FRACTIONS.items()))
    assert {doc: assign_split(doc, turned, 7) for doc in ids} == first
    assert {doc: assign_split(doc, FRACTIONS, 8) for doc in ids} != first


def test_shares_come_out_as_asked():
    counts = dict.fromkeys(FRACTIONS, 0)
    for _ in range(20_000):
        counts[assign_split(secrets.token_hex(8), FRACTIONS, 0)] += 1
    for split, share in FRACTIONS.items():
        # five standard deviations of a binomial
        assert abs(counts[split] / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_a_split_without_share_receives_nothing():
    assert {assign_split(str(i), {"a": 1.0, "z": 0.0}, 0) for i in range(1000)} == {"a"}


def test_ranks_are_uniform_and_independent_between_purposes():
    x = [keyed_uniform(0, "split", secrets.token_hex(8)) for _ in range(5000)]
    assert min(x) >= 0.0 and max(x) < 1.0
    assert abs(sum(x) / len(x) - 0.5) < 5 * (1 / 12 / 5000) ** 0.5
    assert keyed_uniform(0, "split", "d") != keyed_uniform(0, "passage", "d")


@pytest.mark.parametrize(
    "fractions", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": float("nan")}, {"a": 0.7, "b": 0.7}]
)
def test_fractions_that_do_not_divide_a_whole_are_refused(fractions):
    with pytest.raises(ConfigError, match="sum to 1"):
        assign_split("d", fractions, 0)
