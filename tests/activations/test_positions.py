from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.activations import PositionRule, parse_position_rule
from dragoman.errors import ConfigError, TextError

IDS = st.lists(st.integers(0, 30), min_size=0, max_size=200)
SPECIAL = st.frozensets(st.integers(0, 5), max_size=4)
RULES = st.one_of(
    st.sampled_from(["all", "last"]),
    st.integers(1, 60).map("every:{}".format),
    st.tuples(st.integers(1, 12), st.integers(0, 80)).map(lambda pair: f"sample:{pair[0]}@{pair[1]}"),
)


def selected(rule: PositionRule, ids: list[int], special: frozenset[int], **key) -> list[int]:
    try:
        return rule.select(ids, special, **key)
    except TextError:
        assert all(token in special for token in ids), "only a text without ordinary tokens may raise"
        return []


@given(RULES, IDS, SPECIAL, st.integers(0, 2**40), st.text(max_size=12))
def test_every_rule_selects_ascending_distinct_ordinary_positions_inside_the_text(
    text, ids, special, seed, doc_id
):
    chosen = selected(parse_position_rule(text), ids, special, seed=seed, doc_id=doc_id)
    assert chosen == sorted(set(chosen))
    assert all(0 <= p < len(ids) and ids[p] not in special for p in chosen)
    assert all(type(p) is int for p in chosen)


@given(RULES, IDS, SPECIAL)
def test_include_special_selects_what_a_text_without_special_tokens_would_give(text, ids, special):
    asked = parse_position_rule(text, include_special=True)
    assert selected(asked, ids, special, doc_id="d") == selected(
        parse_position_rule(text), ids, frozenset(), doc_id="d"
    )


@given(IDS, SPECIAL, st.integers(1, 12), st.integers(0, 80), st.integers(0, 9), st.text(max_size=8))
def test_a_sample_takes_as_many_as_there_are_up_to_n_and_contains_every_smaller_sample(
    ids, special, n, least, seed, doc_id
):
    eligible = [p for p, token in enumerate(ids) if p >= least and token not in special]
    larger = parse_position_rule(f"sample:{n + 1}@{least}").select(ids, special, seed=seed, doc_id=doc_id)
    smaller = parse_position_rule(f"sample:{n}@{least}").select(ids, special, seed=seed, doc_id=doc_id)
    assert len(smaller) == min(n, len(eligible))
    assert set(smaller) <= set(larger) <= set(eligible)


@given(st.lists(st.text(max_size=6), min_size=2, max_size=20, unique=True), st.randoms(use_true_random=False))
def test_order_and_sharding_of_documents_cannot_change_any_sample(doc_ids, random):
    rule, ids = parse_position_rule("sample:4@3"), list(range(60))
    straight = {d: rule.select(ids, frozenset(), seed=5, doc_id=d) for d in doc_ids}
    shuffled = list(doc_ids)
    random.shuffle(shuffled)
    half = len(shuffled) // 2
    for shard in (shuffled[half:], shuffled[:half]):
        for doc_id in shard:
            assert rule.select(ids, frozenset(), seed=5, doc_id=doc_id) == straight[doc_id]


def test_the_sample_of_a_known_document_is_the_one_drawn_when_this_was_written():
    # Pinned, computed in another process: a change here would silently re-draw every data set made before.
    chosen = parse_position_rule("sample:6").select([9] * 200, frozenset(), seed=7, doc_id="Ünïcode#3")
    assert chosen == [62, 71, 83, 95, 102, 111]


@given(st.integers(-5, 2**70), st.text(max_size=9), st.integers(1, 9))
@settings(max_examples=30)
def test_the_sample_is_the_lowest_splitmix64_ranks_computed_with_plain_integers(seed, doc_id, n):
    def rank(position: int) -> int:
        key = int.from_bytes(
            hashlib.blake2b(f"{seed}\0{doc_id}".encode(), digest_size=8, person=b"dragoman-pos").digest(),
            "little",
        )
        z = (key + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    expected = sorted(sorted(range(50, 120), key=rank)[:n])
    assert (
        parse_position_rule(f"sample:{n}").select([9] * 120, frozenset(), seed=seed, doc_id=doc_id)
        == expected
    )


def test_seed_and_document_both_change_the_sample():
    rule, ids = parse_position_rule("sample:6"), list(range(400))
    samples = {
        tuple(rule.select(ids, frozenset(), seed=s, doc_id=d)) for s in range(20) for d in ("a", "b", "c")
    }
    assert len(samples) == 60


def test_samples_are_uniform_over_positions():
    rule, ids, hits = parse_position_rule("sample:5@0"), list(range(50)), [0] * 50
    for document in range(4000):
        for position in rule.select(ids, frozenset(), seed=1, doc_id=f"doc {document}"):
            hits[position] += 1
    # Expected 400 each with a deviation of 19; 49 degrees of freedom, 99.99% quantile of chi² is 96.
    assert sum((h - 400) ** 2 / 400 for h in hits) < 96


def test_special_tokens_elsewhere_do_not_move_the_sample():
    ids = [1] * 100
    rule = parse_position_rule("sample:5@0")
    before = rule.select(ids, frozenset({0}), doc_id="d")
    free = next(p for p in range(100) if p not in before)
    assert rule.select([0 if p == free else 1 for p in range(100)], frozenset({0}), doc_id="d") == before


def test_a_sample_of_a_text_that_is_too_short_is_empty_and_raises_nothing():
    assert parse_position_rule("sample:6").select(list(range(50)), frozenset()) == []
    assert parse_position_rule("sample:6").select([], frozenset()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", [1, 2, 4, 5, 6]), ("last", [6]), ("every:2", [1, 4, 6]), ("every:99", [1]), ("5, 2,5", [2, 5])],
)
def test_rules_on_a_small_chat_text(text, expected):
    assert parse_position_rule(text).select([0, 7, 8, 0, 9, 7, 5, 0], frozenset({0})) == expected


@pytest.mark.parametrize("text", ["all", "last", "every:3", "1"])
@pytest.mark.parametrize("ids", [[], [0, 0]])
def test_an_empty_text_is_refused_by_the_rules_a_person_asks_for(text, ids):
    with pytest.raises(TextError, match=r"no readable token.*To fix it"):
        parse_position_rule(text).select(ids, frozenset({0}))


def test_an_explicit_position_beyond_the_text_is_refused_with_both_numbers():
    with pytest.raises(TextError, match=r"osition 9 was asked for, but the text has 4 tokens.*0 to 3"):
        parse_position_rule("1,9").select([1, 2, 3, 4], frozenset())


def test_an_explicit_special_position_needs_include_special():
    with pytest.raises(TextError, match=r"osition 1 holds a special token \(id 0\)"):
        parse_position_rule("1").select([5, 0], frozenset({0}))
    assert parse_position_rule("1", include_special=True).select([5, 0], frozenset({0})) == [1]


@pytest.mark.parametrize(
    "text",
    ["", "some", "every:0", "every:-2", "every:", "sample:0", "sample:3@", "sample:x", "-1", "1,,2", "1.5",
     "٣", "every:9999999999", "all,last"],
)  # fmt: skip
def test_a_rule_that_cannot_be_read_names_the_forms_that_can(text):
    with pytest.raises(ConfigError, match=r"every:N, sample:N"):
        parse_position_rule(text)


@given(RULES | st.lists(st.integers(0, 99), min_size=1, max_size=5).map(lambda ps: ",".join(map(str, ps))))
@settings(max_examples=60)
def test_the_short_form_of_a_rule_reads_back_as_the_same_rule(text):
    rule = parse_position_rule(text)
    assert parse_position_rule(str(rule)) == rule
