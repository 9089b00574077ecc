from __future__ import annotations

import pytest

from dragoman.errors import ConfigError
from dragoman.nla import Decoding
from dragoman.nla.explanation import parse_response, render_response

TEXTS = ['Ends in "x".', "a < b > c & </b>", "two\nlines", "ü 漢字 \u202e", "{0.__class__}"]


@pytest.mark.parametrize("text", TEXTS)
def test_parsing_undoes_rendering(text: str) -> None:
    assert parse_response(render_response(text)) == (text, True)


def test_an_answer_without_closing_tag_keeps_its_text_and_is_not_closed() -> None:
    assert parse_response("<explanation>\nhalf a senten") == ("half a senten", False)


def test_a_missing_opening_tag_is_forgiven_and_what_follows_the_closing_tag_is_dropped() -> None:
    assert parse_response("words</explanation> more") == ("words", True)
    assert parse_response("") == ("", False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_new_tokens": 0},
        {"best_of": 0},
        {"best_of": 4},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Decoding(**wrong)
