"""Templates, prompts and markers against the real SmolLM2 tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sidecar.examples import AR_TEMPLATE, AV_TEMPLATE, a_sidecar, with_tokens

from dragoman.errors import DragomanError, SidecarError
from dragoman.sidecar import (
    Extraction,
    Sidecar,
    Templates,
    ar_prompt_ids,
    av_prompt_ids,
    compute_suffix_ids,
    marker_token_id,
    render_template,
    verify_tokens,
)

L2 = {"norm": "l2"}

# ---------------------------------------------------------------- templates


@pytest.mark.parametrize(
    "literal",
    ["{0.__class__}", "{}", "{{}}", "{{{", "}", "{injection_char.__class__}", "{injection_char!r}",
     "{ injection_char }", "{explanation:>99999999}", '{"json": {"a": 1}}', "%s", "$injection_char",
     "\\1", "\\g<0>"],
)  # fmt: skip
def test_any_other_text_in_braces_stays_literal(literal: str) -> None:
    assert render_template(f"a {literal} b {{injection_char}}", injection_char="㈎") == f"a {literal} b ㈎"


def test_double_braces_around_a_slot_are_not_an_escape() -> None:
    assert render_template("{{injection_char}}", injection_char="x") == "{x}"


def test_slots_that_stand_side_by_side_are_replaced_in_one_pass() -> None:
    assert (
        render_template(
            "{injection_char}{explanation}{injection_char}",
            injection_char="{explanation}",
            explanation="{injection_char}",
        )
        == "{explanation}{injection_char}{explanation}"
    )


def test_a_slot_that_is_not_given_stays_as_it_is() -> None:
    assert render_template("{explanation} {injection_char}", explanation="e") == "e {injection_char}"


@given(st.lists(st.text(alphabet="{}!:.[]_0ax\\", max_size=12)), st.text(), st.text())
def test_rendering_is_splitting_at_the_slots_and_joining_again(
    pieces: list[str], marker: str, explanation: str
) -> None:
    # Pieces that would spell a slot together with a neighbour are no independent formulation.
    slots = ["{injection_char}", "{explanation}"]
    template, expected = "", ""
    for number, piece in enumerate(pieces):
        template += piece + slots[number % 2]
        expected += piece + (marker, explanation)[number % 2]
    assert render_template(template, injection_char=marker, explanation=explanation) == expected


# ---------------------------------------------------------------- the real tokenizer


@pytest.fixture
def tokenizer(smollm2) -> Any:
    return smollm2.tokenizer


def test_the_canonical_prompt_has_the_marker_once_with_its_neighbours_in_24_tokens(tokenizer) -> None:
    sidecar = a_sidecar()
    ids = av_prompt_ids(sidecar, tokenizer)
    assert len(ids) <= 24
    assert ids.count(3) == 1
    place = ids.index(3)
    assert (ids[place - 1], ids[place + 1]) == (46, 9617)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nExplain <concept><repo_name></concept><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    verify_tokens(sidecar, tokenizer)


def test_the_prompt_is_what_apply_chat_template_gives_where_the_tokenizer_keeps_the_marker(tokenizer) -> None:
    sidecar = a_sidecar(system_prompt=None)
    content = AV_TEMPLATE.replace("{injection_char}", "<repo_name>")
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert av_prompt_ids(sidecar, tokenizer) == list(expected)


def test_no_system_prompt_leaves_it_to_the_chat_template_and_an_empty_one_is_sent(tokenizer) -> None:
    default = tokenizer.decode(av_prompt_ids(a_sidecar(system_prompt=None), tokenizer))
    assert "You are a helpful AI assistant named SmolLM" in default
    assert "named SmolLM" not in tokenizer.decode(av_prompt_ids(a_sidecar(system_prompt=""), tokenizer))
    assert "system\nBe brief<" in tokenizer.decode(
        av_prompt_ids(a_sidecar(system_prompt="Be brief"), tokenizer)
    )


@pytest.mark.parametrize(
    ("sidecar", "message"),
    [
        (with_tokens(injection_char="㈎"), r"'㈎' becomes \d tokens \[.*the one token 3 of the sidecar"),
        (with_tokens(injection_char="two words"), r"becomes 2 tokens"),
        (with_tokens(injection_token_id=4), r"'<repo_name>' is the token 3 .*the one token 4 of the sidecar"),
        (with_tokens(injection_left_neighbor_id=1), r"left neighbour is the token 46.*the token 1 of"),
        (with_tokens(injection_right_neighbor_id=1), r"right neighbour is the token 9617.*the token 1 of"),
        (with_tokens(ar_suffix_ids=(1, 2, 3)), r"end in the tokens \[2692.*suffix ids \[1, 2, 3\]"),
        (with_tokens(injection_char="<|endoftext|>", injection_token_id=0), r"is unknown \(UNK, token 0\)"),
        (a_sidecar(tokens=None), r"has no tokens"),
        (a_sidecar(prompt_templates=Templates(ar=AR_TEMPLATE)), r"has no prompt_templates\.av"),
        (a_sidecar(prompt_templates=Templates(av="no slot")), r"'no slot' has no slot \{injection_char\}"),
        (
            a_sidecar(prompt_templates=Templates(av="<a>{injection_char}</a> <b>{injection_char}</b>")),
            r"stands 2 times in the canonical prompt.*exactly once",
        ),
        (a_sidecar(extraction=Extraction(layer_index=20)), r"no extraction\.injection_scale"),
        (
            a_sidecar(extraction=Extraction(layer_index=2, injection_scale=1.0).model_copy(update=L2)),
            r"norm 'l2'",
        ),
    ],
)  # fmt: skip
def test_a_sidecar_of_another_tokenizer_or_prompt_is_refused_with_found_and_expected(
    tokenizer, sidecar: Sidecar, message: str
) -> None:
    with pytest.raises(SidecarError, match=message):
        verify_tokens(sidecar, tokenizer)


def test_an_ar_needs_no_injection_scale_and_raw_is_a_statement(tokenizer) -> None:
    verify_tokens(a_sidecar(role="ar", extraction=Extraction(layer_index=20)), tokenizer)
    verify_tokens(a_sidecar(extraction=Extraction(layer_index=20, injection_scale=None)), tokenizer)


@pytest.mark.parametrize(
    ("char", "token_id"),
    [
        ("<repo_name>", 3),
        ("㈎", None),
        ("<|endoftext|>", None),
        ("two words", None),
        ("号", 48980),
        ("", None),
    ],
)
def test_a_marker_is_one_token_of_that_very_text_or_none(tokenizer, char: str, token_id: int | None) -> None:
    assert marker_token_id(tokenizer, char) == token_id


def test_a_tokenizer_without_chat_template_is_named_with_the_way_out(tokenizer) -> None:
    class Bare:
        chat_template = None
        name_or_path = "base-model"
        unk_token_id = None

    with pytest.raises(SidecarError, match=r"base-model has no chat template.*load_subject"):
        av_prompt_ids(a_sidecar(), Bare())


# ---------------------------------------------------------------- AR prompts


def ar_sidecar(tokenizer) -> Sidecar:
    return with_tokens(ar_suffix_ids=compute_suffix_ids(tokenizer, AR_TEMPLATE))


@pytest.mark.parametrize(
    "explanation",
    ["Ends in \"the\".", "", " ", "\n", "words <", "a </", "</text>", "x <|im_end|><repo_name> y", "㈎ é 🙂",
     "</text> <summary>", "tab\t", "{injection_char} {explanation} {0.__class__}"],
)  # fmt: skip
def test_every_ar_prompt_ends_in_the_suffix_and_reads_as_the_template_filled_in(
    tokenizer, explanation: str
) -> None:
    sidecar = ar_sidecar(tokenizer)
    ids = ar_prompt_ids(sidecar, tokenizer, explanation)
    suffix = sidecar.require_tokens().ar_suffix_ids
    assert tuple(ids[-len(suffix) :]) == suffix
    assert tokenizer.decode(ids) == AR_TEMPLATE.replace("{explanation}", explanation)


def test_text_that_spells_a_special_token_never_becomes_one(tokenizer) -> None:
    ids = ar_prompt_ids(ar_sidecar(tokenizer), tokenizer, "say <|im_end|> and <repo_name>")
    assert not {0, 1, 2, 3} & set(ids)


def test_the_ar_prompt_is_encoded_as_one_text_as_the_release_does(tokenizer) -> None:
    text = AR_TEMPLATE.replace("{explanation}", "The end.")
    assert ar_prompt_ids(ar_sidecar(tokenizer), tokenizer, "The end.") == tokenizer(text)["input_ids"]


def test_the_suffix_is_stable_under_every_last_character(tokenizer) -> None:
    suffix = list(compute_suffix_ids(tokenizer, AR_TEMPLATE))
    assert len(suffix) == 5
    for ending in map(chr, range(32, 127)):
        ids = tokenizer.encode(AR_TEMPLATE.replace("{explanation}", f"word{ending}"))
        if ending != "<":  # merges into "<</", deeper than the first token on some vocabularies
            assert ids[-5:] == suffix


@pytest.mark.parametrize("template", ["no slot", "{explanation} and {explanation}"])
def test_an_ar_template_without_exactly_one_slot_is_refused(tokenizer, template: str) -> None:
    with pytest.raises(SidecarError, match=r"slots \{explanation\}.*exactly one"):
        ar_prompt_ids(a_sidecar(prompt_templates=Templates(ar=template)), tokenizer, "x")


def test_suffix_ids_of_another_tokenizer_are_refused_with_both(tokenizer) -> None:
    with pytest.raises(SidecarError, match=r"end in the tokens \[.*\].*suffix ids \[9, 9\]"):
        ar_prompt_ids(with_tokens(ar_suffix_ids=(9, 9)), tokenizer, "x")


def test_every_refusal_here_is_a_user_error() -> None:
    assert issubclass(SidecarError, DragomanError)
