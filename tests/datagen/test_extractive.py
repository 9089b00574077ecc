from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.datagen.extractive import HALF_LIFE_WORDS, Extractor
from dragoman.datagen.stop_words import STOP_WORDS
from dragoman.errors import CorpusError

TEXTS = [
    "The ship left the harbour with a cargo of salt.",
    "A ship needs a captain and a crew, the captain said.",
    "Salt and pepper stood on the table in the harbour.",
]
FORM = re.compile(r'Ends in "[^\n]*": "[^"\n]*"\.(?: Topic: [^\s,]+(?:, [^\s,]+){0,2}\.)?')


@pytest.fixture
def extractor() -> Extractor:
    return Extractor.fit(TEXTS)


@pytest.mark.parametrize(
    ("text", "token", "expected"),
    [
        (
            "The captain of the old ship saw the harbour of Genoa and the gov",
            " gov",
            'Ends in "gov": "ship saw the harbour of Genoa and the gov".',
        ),
        (
            'He said "stop" and\nleft, "at once."',
            '."',
            'Ends in "once."": "He said \'stop\' and left, \'at once.\'".',
        ),
        ("One ship.\n\n", "\n\n", r'Ends in "\n\n": "One ship.\n\n".'),
        ("One ship.\n", ".\n", r'Ends in "ship.\n": "One ship.\n".'),
        ("One ship\t", "\t", r'Ends in "\t": "One ship\t".'),
        ("One ship.\n\nTwo", "Two", 'Ends in "Two": "One ship. Two".'),
        ("One ship ", " ", 'Ends in " ": "One ship ".'),
        ("caf\ufffd", "\ufffd", 'Ends in "caf": "caf".'),
        ("", "", 'Ends in "": "".'),
        ("a \x1b[31mred", "red", r'Ends in "\x1b[31mred": "a \x1b[31mred".'),
        ("x" * 100, "x", f'Ends in "…{"x" * 39}": "…{"x" * 39}".'),
    ],
)
def test_the_form_is_exactly_as_promised(extractor, text, token, expected):
    explanation = extractor.explain(text, token)
    assert explanation.startswith(expected)
    assert FORM.fullmatch(explanation)


def test_eight_words_at_most_stand_before_the_last():
    explanation = Extractor.fit(TEXTS).explain("a b c d e f g h i j k", " k")
    assert explanation.startswith('Ends in "k": "c d e f g h i j k".')


def test_topics_equal_an_independent_computation(extractor):
    text = "salt ship captain salt table harbour the crew of ships pepper cargo and salt"
    words = text.split()
    containing = {w: sum(w in re.findall(r"[a-z]+", t.lower()) for t in TEXTS) for w in set(words)}
    score: dict[str, float] = {}
    for distance, word in enumerate(reversed(words)):
        if word not in {"the", "of", "and"}:
            idf = math.log((1 + 3) / (1 + containing[word])) + 1
            score[word] = score.get(word, 0.0) + idf * math.exp(-math.log(2) * distance / HALF_LIFE_WORDS)
    score.pop("ships" if score["ships"] < score["ship"] else "ship")
    assert extractor.topics(text) == sorted(score, key=lambda w: -score[w])[:3]


def test_recent_words_outrank_equally_rare_remote_ones():
    filler = " ".join(["and"] * HALF_LIFE_WORDS)
    assert Extractor.fit(["zebra walrus"]).topics(f"zebra {filler} walrus") == ["walrus", "zebra"]


def test_a_word_of_many_texts_ranks_below_a_rare_one():
    extractor = Extractor.fit(["common rare", "common", "common thing"])
    assert extractor.topics("rare common") == ["rare", "common"]


def test_the_last_chunk_is_no_topic_since_it_can_be_a_fragment():
    assert "govern" not in Extractor.fit(["x"]).explain("the ship may govern", " govern").split("Topic")[1]


def test_topics_hold_no_stop_words_no_short_words_no_digits_and_at_most_three():
    topics = Extractor.fit(["x"]).topics(
        "The of and it's don't ox 1234 a1 Rhine Danube Elbe Oder Volga Thames"
    )
    assert len(topics) == 3
    assert all(word.islower() and len(word) >= 3 and word not in STOP_WORDS for word in topics)


def test_there_is_no_topic_sentence_without_topics(extractor):
    assert extractor.explain("of the and", " and") == 'Ends in "and": "of the and".'


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200), st.integers(0, 5))
def test_any_text_gives_one_printable_line_and_always_the_same(text: str, token_length: int):
    token = text[len(text) - token_length :] if token_length else ""
    explanation = Extractor.fit(TEXTS).explain(text, token)
    assert explanation.isprintable()
    assert explanation == Extractor.fit(reversed(TEXTS)).explain(text, token)


def test_fitting_on_nothing_is_refused():
    with pytest.raises(CorpusError, match="no training text"):
        Extractor.fit([])
