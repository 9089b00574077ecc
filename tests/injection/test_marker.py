"""The marker search on the real SmolLM2 vocabulary and on stand-ins for Qwen2.5, Gemma 3 and Llama 3."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from tests.injection.vocabularies import CHATML, byte_level, gemma3, llama3, qwen25

from dragoman.errors import InjectionError
from dragoman.injection import Marker, choose_marker, prompt_renderer
from dragoman.sidecar import (
    Extraction,
    Sidecar,
    Templates,
    Tokens,
    av_prompt_ids,
    marker_token_id,
    verify_tokens,
)

TEMPLATE = "Explain <concept>{injection_char}</concept>"
STAND_INS: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen2.5": (qwen25, "㈎"),
    "gemma3": (gemma3, "㈜"),
    "llama3": (llama3, "㎡"),
}


def sidecar_with(marker: Marker, *, system_prompt: str | None = None) -> Sidecar:
    return Sidecar(
        kind="nla_model",
        role="av",
        d_model=8,
        extraction=Extraction(layer_index=0, injection_scale=1.0),
        tokens=Tokens(
            injection_char=marker.char,
            injection_token_id=marker.token_id,
            injection_left_neighbor_id=marker.left_id,
            injection_right_neighbor_id=marker.right_id,
        ),
        prompt_templates=Templates(av=TEMPLATE),
        system_prompt=system_prompt,
    )


@pytest.mark.parametrize("name", STAND_INS)
def test_the_search_finds_the_marker_of_the_public_release(name: str) -> None:
    make, char = STAND_INS[name]
    tokenizer = make()
    marker = choose_marker(tokenizer, prompt_renderer(tokenizer, TEMPLATE))
    assert marker.char == char
    assert tokenizer.decode([marker.token_id]) == char
    assert tokenizer.decode([marker.left_id, marker.token_id, marker.right_id]).startswith(f">{char}<")


@pytest.mark.parametrize("name", [*STAND_INS, "smollm2"])
def test_the_marker_found_passes_the_check_of_the_sidecar_it_is_saved_in(name: str, smollm2) -> None:
    tokenizer = smollm2.tokenizer if name == "smollm2" else STAND_INS[name][0]()
    marker = choose_marker(tokenizer, prompt_renderer(tokenizer, TEMPLATE))
    sidecar = sidecar_with(marker)
    verify_tokens(sidecar, tokenizer)
    ids = av_prompt_ids(sidecar, tokenizer)
    place = ids.index(marker.token_id)
    assert (ids.count(marker.token_id), ids[place - 1], ids[place + 1]) == (
        1,
        marker.left_id,
        marker.right_id,
    )
    assert Marker.from_tokens(sidecar.require_tokens()) == marker


def test_smollm2_has_no_single_cjk_character_and_gets_an_unused_special_token(smollm2) -> None:
    tokenizer = smollm2.tokenizer
    assert all(marker_token_id(tokenizer, chr(code)) is None for code in range(0x3200, 0x3400))
    marker = choose_marker(tokenizer, prompt_renderer(tokenizer, TEMPLATE, system_prompt=""))
    assert marker == Marker(char="<repo_name>", token_id=3, left_id=46, right_id=9617)


def test_text_cannot_contain_a_marker_that_is_a_special_token(smollm2) -> None:
    marker = choose_marker(smollm2.tokenizer, prompt_renderer(smollm2.tokenizer, TEMPLATE))
    assert marker.token_id not in smollm2.encode(f"a text that quotes <concept>{marker.char}</concept>")


def test_gemma_normalises_the_marker_away_so_its_id_is_spliced_in() -> None:
    tokenizer = gemma3()
    token_id = marker_token_id(tokenizer, "㈜")
    assert unicodedata.normalize("NFKC", "㈜") == "(주)"
    assert tokenizer.encode("㈜", add_special_tokens=False) != [token_id]
    ids = prompt_renderer(tokenizer, TEMPLATE)("㈜")
    assert ids.count(token_id) == 1
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": TEMPLATE.replace("{injection_char}", "\x00")}],
        tokenize=False,
        add_generation_prompt=True,
    )
    before, after = whole.split("\x00")
    place = ids.index(token_id)
    assert ids[:place] == tokenizer.encode(before, add_special_tokens=False)
    assert ids[place + 1 :] == tokenizer.encode(after, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_character_that_normalises_to_an_ordinary_one_is_no_marker() -> None:
    # NFKC turns ① into 1: its encoding is one token, of the digit.
    tokenizer = gemma3()
    assert len(tokenizer.encode("①", add_special_tokens=False)) == 1
    assert marker_token_id(tokenizer, "①") is None


def test_a_character_that_merges_with_the_template_is_passed_over() -> None:
    # ㈎ is one token alone, but ">" takes its first byte first, so in the template it vanishes; so does ㎡.
    tokenizer = qwen25((">㈎", "㈎", "㎡"))
    token_id = marker_token_id(tokenizer, "㈎")
    assert tokenizer.encode("㈎", add_special_tokens=False) == [token_id]
    assert token_id not in prompt_renderer(tokenizer, TEMPLATE)("㈎")
    assert choose_marker(tokenizer, prompt_renderer(tokenizer, TEMPLATE)).char == "<|fim_pad|>"


def test_a_character_that_the_template_already_holds_is_passed_over() -> None:
    tokenizer = qwen25()
    marker = choose_marker(tokenizer, prompt_renderer(tokenizer, f"㈎ {TEMPLATE}"))
    assert marker.char == "㎡"


def test_reserved_tokens_go_before_other_special_tokens_and_those_in_use_are_left_out() -> None:
    tokenizer = byte_level(
        [],
        special=[
            "<|im_start|>",
            "<|image_pad|>",
            "<|fim_middle|>",
            "<|reserved_7|>",
            "<|pad|>",
            "<|im_end|>",
        ],
        chat_template=CHATML,
        pad="<|pad|>",
    )
    assert choose_marker(tokenizer, prompt_renderer(tokenizer, TEMPLATE)).char == "<|reserved_7|>"


def test_without_special_tokens_the_rarest_single_character_is_taken() -> None:
    tokenizer = byte_level(["é", "ж", "Ω"], special=["<|im_start|>", "<|im_end|>"], chat_template=CHATML)
    assert choose_marker(tokenizer, prompt_renderer(tokenizer, TEMPLATE)).char == "Ω"


def test_a_vocabulary_without_any_marker_is_refused() -> None:
    tokenizer = byte_level([], special=["<|im_start|>", "<|im_end|>"], chat_template=CHATML)
    with pytest.raises(InjectionError, match="None of 0 candidate markers"):
        choose_marker(tokenizer, prompt_renderer(tokenizer, TEMPLATE))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids, place: ids[:place] + ids[place + 1 :],  # the template drops it
        lambda ids, place: ids + ids[place : place + 1],  # the template repeats it
        lambda ids, place: ids[place:],  # it stands at the left edge
        lambda ids, place: ids[: place + 1],  # it stands at the right edge
    ],
)
def test_a_prompt_that_does_not_hold_the_marker_once_inside_is_refused(smollm2, spoil) -> None:
    render = prompt_renderer(smollm2.tokenizer, TEMPLATE)

    def spoiled(char: str) -> list[int]:
        ids = render(char)
        token_id = marker_token_id(smollm2.tokenizer, char)
        assert token_id is not None
        return spoil(ids, ids.index(token_id))

    with pytest.raises(InjectionError, match=r"candidate markers .*first: '<repo_name>', '<reponame>'"):
        choose_marker(smollm2.tokenizer, spoiled)


def test_neighbours_that_change_from_one_rendering_to_the_next_are_not_accepted(smollm2) -> None:
    render = prompt_renderer(smollm2.tokenizer, TEMPLATE)
    turn = iter(range(10**6))

    def changing(char: str) -> list[int]:
        ids = render(char)
        place = ids.index(marker_token_id(smollm2.tokenizer, char))
        return [*ids[:place], *ids[place : place + 1], 500 + next(turn) % 2, *ids[place + 1 :]]

    with pytest.raises(InjectionError):
        choose_marker(smollm2.tokenizer, changing)
