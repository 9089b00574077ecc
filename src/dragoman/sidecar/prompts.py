"""Renders the sidecar's templates to token ids and checks them against a live tokenizer.

A tokenizer here is anything with the methods of a transformers tokenizer (`encode`, `decode`,
`apply_chat_template`, `convert_tokens_to_ids`, `unk_token_id`); transformers itself is not imported.
"""

from __future__ import annotations

import re
from typing import Any

from dragoman.errors import SidecarError
from dragoman.sidecar.schema import Sidecar, Tokens

_SLOTS = ("injection_char", "explanation")


def render_template(template: str, **slots: str) -> str:
    """The template with {injection_char} and {explanation} replaced literally, in one pass.

    Any other text in braces stays as it is ({{}}, {0.__class__}, JSON), and so does a slot's name inside a
    replaced text. `str.format` is never used: a template is data from a stranger.
    """
    assert slots and set(slots) <= set(_SLOTS), f"slots {sorted(slots)} are not among {_SLOTS}"
    pattern = "|".join(re.escape("{" + name + "}") for name in slots)
    return re.sub(pattern, lambda match: slots[match.group()[1:-1]], template)


def marker_token_id(tokenizer: Any, char: str) -> int | None:
    """The id of the one token that is `char`, or None when there is none (several tokens, UNK, another text).

    Byte-level tokenizers know a character only through `encode`; others rewrite it there (NFKC turns ㈜ into
    three characters) and know it only as an entry of the vocabulary. Both are asked, and the id found must
    decode to `char`, so that a tokenizer that turns ① into 1 gives None and not the id of the digit.
    """
    encoded = list(tokenizer.encode(char, add_special_tokens=False))
    entry = tokenizer.convert_tokens_to_ids(char)
    for candidate in (encoded[0] if len(encoded) == 1 else None, entry):
        if not isinstance(candidate, int) or candidate == tokenizer.unk_token_id:
            continue
        if tokenizer.decode([candidate]).strip() == char.strip():
            return candidate
    return None


def render_prompt_ids(
    tokenizer: Any, template: str, char: str, token_id: int, *, system_prompt: str | None = None
) -> list[int]:
    """Ids of the canonical AV prompt: chat template around the template, generation prompt added.

    Where the tokenizer rewrites the marker even by itself (it normalises the character, or splits special
    tokens), the text before and after it is encoded and the id put between: neighbours are what stands at the
    seams. A marker that only merges with its surroundings is not rescued so: other readers of the sidecar
    would not find it.

    Args:
        tokenizer: see the module.
        template: with the slot {injection_char}.
        char: the marker's text.
        token_id: the marker's id.
        system_prompt: None leaves the system message to the chat template, "" sends an empty one.

    Raises:
        SidecarError: the template has no slot, or the tokenizer has no chat template.
    """
    if "{injection_char}" not in template:
        raise SidecarError(
            f"the AV template {template[:120]!r} has no slot {{injection_char}}",
            expected="exactly one place for the vector",
            consequence="the verbalizer would be asked about no vector at all",
            remedy="put {injection_char} where the vector belongs",
        )
    text = _chat_text(tokenizer, render_template(template, injection_char=char), system_prompt)
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    rewritten = list(tokenizer.encode(char, add_special_tokens=False)) != [token_id]
    if token_id in ids or not rewritten or text.count(char) != 1:
        return ids
    before, _, after = text.partition(char)
    return [
        *tokenizer.encode(before, add_special_tokens=False),
        token_id,
        *tokenizer.encode(after, add_special_tokens=False),
    ]


def av_prompt_ids(sidecar: Sidecar, tokenizer: Any) -> list[int]:
    """Ids of the sidecar's canonical AV prompt (see `render_prompt_ids`).

    Raises:
        SidecarError: no tokens, no AV template, or no chat template.
    """
    tokens = sidecar.require_tokens()
    return render_prompt_ids(
        tokenizer,
        sidecar.require_template("av"),
        tokens.injection_char,
        tokens.injection_token_id,
        system_prompt=sidecar.system_prompt,
    )


def ar_prompt_ids(sidecar: Sidecar, tokenizer: Any, explanation: str) -> list[int]:
    """Ids of the AR prompt for an explanation, with the special tokens that the tokenizer adds by itself.

    The prompt is encoded as one text, as the public release does, so that the explanation's last character
    may merge with the template's next. Text that spells a special token never becomes one. The ids end in the
    suffix ids: where the explanation merges deeper into the suffix than its first token, the two are encoded
    apart.

    Raises:
        SidecarError: no AR template, no slot in it, or the tokenizer puts something after the text.
    """
    template = sidecar.require_template("ar")
    before, after = _ar_parts(template)
    suffix = list(sidecar.tokens.ar_suffix_ids) if sidecar.tokens else []
    ids = list(tokenizer.encode(before + explanation + after, split_special_tokens=True))
    if ids[len(ids) - len(suffix) :] == suffix:
        return ids
    apart = [
        *tokenizer.encode(before + explanation, split_special_tokens=True),
        *tokenizer.encode(after, add_special_tokens=False, split_special_tokens=True),
    ]
    if apart[len(apart) - len(suffix) :] == suffix:
        return apart
    raise _suffix_error(found=apart[-max(len(suffix), 1) :], stated=suffix)


def compute_suffix_ids(tokenizer: Any, template: str) -> tuple[int, ...]:
    """Ids in which every AR prompt of `template` ends: those of the text after the slot, minus the first.

    The first can merge with the explanation's last character. When the text after the slot is a single token,
    nothing is stable, and () is returned.

    Raises:
        SidecarError: the template has no slot {explanation}.
    """
    _, after = _ar_parts(template)
    return tuple(tokenizer.encode(after, add_special_tokens=False, split_special_tokens=True)[1:])


def verify_tokens(sidecar: Sidecar, tokenizer: Any) -> None:
    """Refuses a sidecar that does not fit this tokenizer, before a wrong number can appear.

    Raises:
        SidecarError: the marker is not exactly one token or is UNK; its id differs; it does not stand exactly
            once in the canonical prompt; a neighbour differs; an AV has no injection scale; the norm is not
            none; the AR's suffix ids differ. Found and expected stand in the message.
    """
    tokens = sidecar.require_tokens()
    _check_extraction(sidecar)
    _check_marker(tokens, tokenizer)
    if sidecar.role != "ar" or sidecar.prompt_templates.av is not None:
        _check_site(tokens, av_prompt_ids(sidecar, tokenizer))
    template = sidecar.prompt_templates.ar
    if template is not None and tokens.ar_suffix_ids:
        live = list(compute_suffix_ids(tokenizer, template))
        if live != list(tokens.ar_suffix_ids):
            raise _suffix_error(found=live, stated=list(tokens.ar_suffix_ids))


def _check_extraction(sidecar: Sidecar) -> None:
    extraction = sidecar.extraction
    if extraction.norm != "none":
        raise SidecarError(
            f"the sidecar says that vectors are stored with norm {extraction.norm!r}",
            expected="norm 'none': vectors on disk are raw",
            consequence="their length would be changed twice or compared with raw ones",
            remedy="capture the vectors again without normalising them",
        )
    if sidecar.role == "av" and "injection_scale" not in extraction.model_fields_set:
        raise SidecarError(
            "the sidecar of this verbalizer has no extraction.injection_scale",
            expected='a norm, "sqrt_d_model", or an explicit null for raw vectors',
            consequence="vectors would enter with a norm that the verbalizer never saw and cannot read",
            remedy="add the scale that the verbalizer was trained with",
        )


def _check_marker(tokens: Tokens, tokenizer: Any) -> None:
    live = marker_token_id(tokenizer, tokens.injection_char)
    if live == tokens.injection_token_id:
        return
    encoded = list(tokenizer.encode(tokens.injection_char, add_special_tokens=False))
    if live is not None:
        found = f"the marker {tokens.injection_char!r} is the token {live} of this tokenizer"
    elif encoded == [tokenizer.unk_token_id]:
        found = f"the marker {tokens.injection_char!r} is unknown (UNK, token {encoded[0]}) to this tokenizer"
    else:
        found = (
            f"the marker {tokens.injection_char!r} becomes {len(encoded)} tokens {encoded} in this tokenizer"
        )
    raise _drift(found, f"the one token {tokens.injection_token_id} of the sidecar")


def _check_site(tokens: Tokens, ids: list[int]) -> None:
    places = [place for place, token in enumerate(ids) if token == tokens.injection_token_id]
    if len(places) != 1 or not 0 < places[0] < len(ids) - 1:
        where = f", at the prompt's edge (position {places[0]} of {len(ids)})" if len(places) == 1 else ""
        raise _drift(
            f"the marker {tokens.injection_char!r} (token {tokens.injection_token_id}) stands {len(places)} "
            f"times in the canonical prompt{where}",
            "exactly once, with a token on either side",
        )
    for side, place, stated in (
        ("left", places[0] - 1, tokens.injection_left_neighbor_id),
        ("right", places[0] + 1, tokens.injection_right_neighbor_id),
    ):
        if ids[place] != stated:
            raise _drift(
                f"the marker's {side} neighbour is the token {ids[place]}",
                f"the token {stated} of the sidecar",
            )


def _chat_text(tokenizer: Any, content: str, system_prompt: str | None) -> str:
    messages = [{"role": "user", "content": content}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    if not getattr(tokenizer, "chat_template", None):
        raise SidecarError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or 'given'} has no chat template",
            expected="one to put the prompt in",
            consequence="the verbalizer would be asked in a form it was not trained on",
            remedy="load the model with `load_subject`, which supplies one, or set tokenizer.chat_template",
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str), f"apply_chat_template(tokenize=False) gave {type(text).__name__}"
    return text


def _ar_parts(template: str) -> tuple[str, str]:
    before, slot, after = template.partition("{explanation}")
    if not slot or "{explanation}" in after:
        raise SidecarError(
            f"the AR template {template[:120]!r} has {template.count('{explanation}')} slots {{explanation}}",
            expected="exactly one",
            consequence="the reconstructor would read no explanation, or one it was not trained on",
            remedy="use the template that came with the model",
        )
    return before, after


def _drift(found: str, expected: str) -> SidecarError:
    return SidecarError(
        found,
        expected=expected,
        consequence="the vector would enter at a wrong place or not at all, and the marker be put into words",
        remedy="use the tokenizer and the chat template that the sidecar was made with",
    )


def _suffix_error(found: list[int], stated: list[int]) -> SidecarError:
    return SidecarError(
        f"AR prompts end in the tokens {found} with this tokenizer",
        expected=f"the suffix ids {stated} of the sidecar",
        consequence="the reconstructor would read the vector at a token it was not trained to read",
        remedy="use the tokenizer and the template that the sidecar was made with",
    )
