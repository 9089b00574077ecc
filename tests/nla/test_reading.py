from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
from tests.nla.conftest import MakeSidecar

from dragoman.activations import capture
from dragoman.errors import ConfigError, TextError, VectorError
from dragoman.nla import Decoding, Explanation, Pair, Reconstructor, Verbalizer, read_text, read_vectors
from dragoman.nla.reading import COLUMNS, flags_of
from dragoman.subjects import Subject

TEXT = "The tower of Pisa leans, and so did many others before they fell."
SHORT = Decoding(max_new_tokens=4)


@pytest.fixture
def pair(tiny_llama: Subject, make_sidecar: MakeSidecar) -> Pair:
    verbalizer = Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama, "av"))
    return Pair(
        verbalizer, Reconstructor.from_subject(tiny_llama, 2, make_sidecar(tiny_llama, "ar")), name="p"
    )


def explained(text: str = "words", fve: float | None = 0.5) -> Explanation:
    return Explanation(text=text, token_ids=[1], truncated=False, fve=fve)


def test_a_text_is_read_as_its_captured_vectors_are(pair: Pair) -> None:
    ids = pair.subject.encode(TEXT)
    reading = read_text(pair, TEXT, "2,5,11", decoding=SHORT)
    vectors = capture(pair.subject, [ids], [2], [[2, 5, 11]])[0].vectors[2]
    expected = pair.explain(vectors, SHORT)
    assert [row.position for row in reading] == [2, 5, 11]
    assert [row.token_id for row in reading] == [ids[p] for p in (2, 5, 11)]
    assert [row.explanation for row in reading] == [e.text for e in expected]
    assert [row.fve for row in reading] == [e.fve for e in expected]
    torch.testing.assert_close(torch.tensor([row.norm for row in reading]), vectors.norm(dim=1))
    assert "".join(reading.tokens) == TEXT and len(reading.tokens) == len(ids)
    assert ["early-position" in row.flags for row in reading] == [True, True, False]


def test_ids_are_read_exactly_as_given(pair: Pair) -> None:
    ids = pair.subject.encode(TEXT)
    assert (
        read_text(pair, ids, "last", decoding=SHORT).rows
        == read_text(pair, TEXT, "last", decoding=SHORT).rows
    )


def test_special_tokens_are_not_read_unless_asked(pair: Pair) -> None:
    ids = [pair.subject.tokenizer.bos_token_id, *pair.subject.encode("a b c")]
    assert [row.position for row in read_text(pair, ids, decoding=SHORT, score=False)] == [1, 2, 3]
    with pytest.raises(TextError):
        read_text(pair, ids[:1], decoding=SHORT)


def test_vectors_without_a_text_are_numbered(pair: Pair) -> None:
    vectors = torch.randn(2, pair.subject.d_model)
    reading = read_vectors(pair, vectors, decoding=SHORT)
    assert [(row.position, row.token, row.token_id) for row in reading] == [(0, None, None), (1, None, None)]
    assert reading.tokens == ()
    assert list(reading[0].to_json()) == list(COLUMNS)
    with pytest.raises(VectorError):
        read_vectors(pair, vectors[:, :3])


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_text_is_refused(pair: Pair, text: str) -> None:
    with pytest.raises(TextError, match="empty"):
        read_text(pair, text)


def test_a_text_beyond_the_models_positions_or_a_position_beyond_the_text_is_refused(pair: Pair) -> None:
    with pytest.raises(TextError, match="512"):
        read_text(pair, "word " * 600)
    with pytest.raises(TextError):
        read_text(pair, "short", "40")


def test_flags_say_why_to_distrust_and_are_silent_without_figures(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    bare = make_sidecar(tiny_llama)
    known = make_sidecar(
        tiny_llama, norm_quantiles={"p001": 5.0, "p50": 10.0, "p999": 20.0}, score_threshold=0.1
    )
    assert flags_of(bare, 1e9, explained(fve=-3.0)) == ()
    assert flags_of(known, 10.0, explained()) == ()
    assert flags_of(known, 4.9, explained()) == flags_of(known, 20.1, explained()) == ("outlier-norm",)
    assert flags_of(known, 10.0, explained(fve=0.09)) == ("low-score",)
    assert flags_of(known, 10.0, explained(fve=None)) == ()
    for text in ("漢字", "かな", "한국", "mixed 中 in"):
        assert flags_of(bare, 1.0, explained(text)) == ("cjk",)
    assert flags_of(bare, 1.0, explained("naïve café Ω ☃ “x”")) == ()


def test_a_notebook_shows_a_table_in_which_nothing_is_executed(pair: Pair) -> None:
    reading = read_text(pair, "<script>alert(1)</script> & <b>", decoding=SHORT)
    shown = reading._repr_html_()
    assert "<script" not in shown and "<b>" not in shown and "&lt;" in shown
    assert shown.count("<tr>") == len(reading) + 1


def test_a_reading_turns_into_a_dataframe_of_its_rows(pair: Pair) -> None:
    reading = read_text(pair, TEXT, "2,5", decoding=SHORT)
    frame = reading.to_dataframe()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["explanation"].tolist() == [row.explanation for row in reading]


def test_without_pandas_the_error_says_how_to_get_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = read_vectors(pair, torch.randn(1, pair.subject.d_model), decoding=SHORT)
    real = builtins.__import__

    def without_pandas(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ConfigError, match="pip install pandas"):
        reading.to_dataframe()
