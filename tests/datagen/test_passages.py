from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.datagen.corpora import Document
from dragoman.datagen.passages import CorpusCounts, cut_document, cut_passages
from dragoman.errors import ConfigError


def words(text: str) -> list[int]:
    """A stand-in tokenizer with a begin token: one id a word."""
    return [0, *(len(word) for word in text.split())]


def sentences(n: int) -> str:
    return " ".join(f"{'word ' * random.randint(2, 9)}end." for _ in range(n))


def test_passages_of_the_real_tokenizer_fit_and_hold_the_whole_text(smollm2):
    text = "\n\n".join(sentences(random.randint(1, 30)) for _ in range(12))
    passages = cut_document(Document("d", text), smollm2.encode, max_tokens=64, min_tokens=1)
    assert all(len(p.ids) <= 64 for p in passages)
    assert all(list(p.ids) == smollm2.encode(p.text) for p in passages)
    assert " ".join(p.text for p in passages).split() == text.split()
    assert [p.passage_id for p in passages] == [f"d#{k}" for k in range(len(passages))]


def test_cuts_fall_between_sentences():
    text = sentences(40)
    passages = cut_document(Document("d", text), words, max_tokens=40, min_tokens=5)
    assert len(passages) > 3
    assert all(p.text.endswith("end.") for p in passages)


def test_a_document_is_divided_evenly_instead_of_losing_its_rest():
    text = " ".join("one two three four five." for _ in range(21))  # 105 words at 100 a passage
    passages = cut_document(Document("d", text), words, max_tokens=101, min_tokens=20)
    assert sorted(len(p.ids) - 1 for p in passages) == [50, 55]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=600), st.integers(3, 40))
def test_no_text_is_lost_or_invented_whatever_it_is(text: str, max_tokens: int):
    def characters(part: str) -> list[int]:
        return [ord(c) for c in part if not c.isspace()]

    passages = cut_document(Document("d", text), characters, max_tokens=max_tokens, min_tokens=1)
    assert all(len(p.ids) <= max_tokens for p in passages)
    assert [i for p in passages for i in p.ids] == characters(text)


def test_text_without_white_space_is_still_cut(smollm2):
    passages = cut_document(Document("d", "字" * 3000), smollm2.encode, max_tokens=100, min_tokens=20)
    assert len(passages) > 10
    assert all(20 <= len(p.ids) <= 100 for p in passages)


def test_short_documents_are_skipped_and_counted():
    documents = [Document("a", "too short"), Document("b", sentences(30)), Document("c", "")]
    counts = CorpusCounts()
    passages = list(cut_passages(documents, words, max_tokens=60, min_tokens=30, counts=counts))
    assert {p.doc_id for p in passages} == {"b"}
    assert counts == CorpusCounts(3, 2, len(passages), sum(len(p.ids) for p in passages))


@pytest.mark.parametrize(("low", "high"), [(11, 10), (0, 10)])
def test_a_minimum_above_the_maximum_is_refused(low, high):
    with pytest.raises(ConfigError, match="every document would be skipped"):
        list(cut_passages([], words, max_tokens=high, min_tokens=low))
