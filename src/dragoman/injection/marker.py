"""Chooses the token whose embedding gives way to the vector.

A marker is one token that ordinary text never contains and that stands exactly once in the rendered prompt,
between two neighbours that do not depend on it. Three sources are searched in order:

1. a character of U+3200 to U+33FF that is one token. The public release takes these (Qwen2.5 ㈎,
   Gemma 3 ㈜, Llama 3 ㎡), so its choice comes out again on its vocabularies.
2. a special token that no template uses, such as <|reserved_special_token_0|> or SmolLM2's <repo_name>. Text
   is encoded with split_special_tokens here, so text cannot contain it: of all markers it is the safest.
   Tokens that a model fills by itself (images, audio) are left out.
3. a rare single character: the last merges of a vocabulary, tried from the end.

Where encoding the prompt would lose the marker (NFKC, split special tokens), its id is spliced in between the
text before and after; `render` does that, see `dragoman.sidecar.render_prompt_ids`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dragoman.errors import InjectionError
from dragoman.sidecar import Tokens, marker_token_id, render_prompt_ids

_FIRST_CJK, _LAST_CJK = 0x3200, 0x33FF
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NEVER_USED = re.compile(r"reserved|unused|extra_id|placeholder", re.IGNORECASE)
_FILLED_BY_THE_MODEL = re.compile(r"image|img|video|audio|vision|speech|box|quad|object", re.IGNORECASE)
_RARE_CANDIDATES = 64
"""Rare characters tried in the template before giving up; a template that breaks this many breaks all."""


@dataclass(frozen=True)
class Marker:
    """The marker and what must stand beside it.

    Attributes:
        char: its text in the template, one character or the spelling of a special token.
        token_id: its id.
        left_id: id of the token before it in the canonical prompt.
        right_id: id of the token after it.
    """

    char: str
    token_id: int
    left_id: int
    right_id: int

    @classmethod
    def from_tokens(cls, tokens: Tokens) -> Marker:
        """The marker of a sidecar."""
        return cls(
            char=tokens.injection_char,
            token_id=tokens.injection_token_id,
            left_id=tokens.injection_left_neighbor_id,
            right_id=tokens.injection_right_neighbor_id,
        )


def choose_marker(tokenizer: Any, render: Callable[[str], list[int]]) -> Marker:
    """The first marker of the search (see the module) that the template keeps whole.

    Args:
        tokenizer: a transformers tokenizer, or anything that behaves like one.
        render: ids of the whole prompt with this text as the marker; `prompt_renderer` makes one.

    Raises:
        InjectionError: no token of this vocabulary survives the template.
    """
    tried: list[str] = []
    for char, token_id in _candidates(tokenizer):
        marker = _confirm(char, token_id, render)
        if marker is not None:
            return marker
        tried.append(char)
    raise InjectionError(
        f"none of {len(tried)} candidate markers stands exactly once in the rendered prompt; tried first: "
        f"{', '.join(map(repr, tried[:5])) or 'nothing, as the vocabulary has no candidate'}",
        expected="one token that the prompt template keeps whole, with a token on either side",
        consequence="there would be no place for the vector to enter",
        remedy="put {injection_char} between plain words or tags, away from the edges of the prompt",
    )


def prompt_renderer(
    tokenizer: Any, template: str, *, system_prompt: str | None = None
) -> Callable[[str], list[int]]:
    """The `render` of `choose_marker` for an AV template with the slot {injection_char}."""

    def render(char: str) -> list[int]:
        token_id = marker_token_id(tokenizer, char)
        assert token_id is not None, f"{char!r} is offered as a marker but is no single token"
        return render_prompt_ids(tokenizer, template, char, token_id, system_prompt=system_prompt)

    return render


def _candidates(tokenizer: Any) -> Iterator[tuple[str, int]]:
    yield from _cjk_characters(tokenizer)
    yield from _unused_special_tokens(tokenizer)
    yield from _rare_characters(tokenizer)


def _cjk_characters(tokenizer: Any) -> Iterator[tuple[str, int]]:
    for code_point in range(_FIRST_CJK, _LAST_CJK + 1):
        char = chr(code_point)
        token_id = marker_token_id(tokenizer, char)
        if token_id is not None:
            yield char, token_id


def _unused_special_tokens(tokenizer: Any) -> Iterator[tuple[str, int]]:
    in_use = {getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
    chat_template = str(getattr(tokenizer, "chat_template", None) or "")
    spellings = {
        int(token_id): str(token)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    free = [
        (token_id, spelling)
        for token_id, spelling in spellings.items()
        if token_id not in in_use
        and spelling not in chat_template
        and not _FILLED_BY_THE_MODEL.search(spelling)
    ]
    for token_id, spelling in sorted(free, key=lambda entry: (not _NEVER_USED.search(entry[1]), entry[0])):
        if marker_token_id(tokenizer, spelling) == token_id:
            yield spelling, token_id


def _rare_characters(tokenizer: Any) -> Iterator[tuple[str, int]]:
    found = 0
    for token_id in range(len(tokenizer) - 1, -1, -1):
        char = str(tokenizer.decode([token_id]))
        # U+FFFD is half a character of a byte-level vocabulary.
        if len(char) != 1 or char.isascii() or not char.isprintable() or char == "\ufffd":
            continue
        if marker_token_id(tokenizer, char) == token_id:
            yield char, token_id
            found += 1
            if found == _RARE_CANDIDATES:
                return


def _confirm(char: str, token_id: int, render: Callable[[str], list[int]]) -> Marker | None:
    """The marker when it stands once, inside the prompt, with the same neighbours each time; else None."""
    neighbours: set[tuple[int, int]] = set()
    for ids in (render(char), render(char)):
        places = [place for place, found in enumerate(ids) if found == token_id]
        if len(places) != 1 or not 0 < places[0] < len(ids) - 1:
            return None
        neighbours.add((ids[places[0] - 1], ids[places[0] + 1]))
    if len(neighbours) != 1:
        return None
    ((left_id, right_id),) = neighbours
    return Marker(char=char, token_id=token_id, left_id=left_id, right_id=right_id)
