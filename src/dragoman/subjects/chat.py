"""Chat templates for models that have none.

A base model was never trained on turns; the template only gives prompts a stable shape. Where the
vocabulary holds the turn tokens of a family (Gemma, ChatML), those are used, so that the tuned sibling of
the model would read the same prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

CHATML = (
    "{{ bos }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Gemma has no system role: its words open the first user turn.
GEMMA = (
    "{{ bos }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{% if message['content'] %}{% set ns.system = message['content'] + '\n\n' %}{% endif %}"
    "{% else %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else 'user' }}\n"
    "{{ ns.system }}{{ message['content'] }}<end_of_turn>\n{% set ns.system = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PLAIN = (
    "{{ bos }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% if message['content'] %}{{ message['content'] }}\n\n{% endif %}"
    "{% else %}{{ 'Assistant' if message['role'] == 'assistant' else 'User' }}: {{ message['content'] }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_BY_TURN_TOKEN = (("<start_of_turn>", "gemma", GEMMA), ("<|im_start|>", "chatml", CHATML))


def supply_chat_template(tokenizer: Any) -> str:
    """Give the tokenizer a chat template if it has none, in place.

    Returns:
        "own", or the name of the supplied template: "gemma", "chatml" or "plain".
    """
    if tokenizer.chat_template:
        return "own"
    name, template = _choose(tokenizer.get_vocab())
    # apply_chat_template adds no special tokens itself, so the template must begin as plain text does.
    bos = "{{ bos_token }}" if _adds_bos(tokenizer) else ""
    tokenizer.chat_template = template.replace("{{ bos }}", bos)
    return name


def _choose(vocabulary: dict[str, int]) -> tuple[str, str]:
    for token, name, template in _BY_TURN_TOKEN:
        if token in vocabulary:
            return name, template
    return "plain", PLAIN


def _adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def encode_conversation(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of messages in the chat template, without a generation prompt.

    Text in a message that spells a special token ("<|im_end|>" in a log) must not become one: it would end
    the turn. Where a message holds such text, the template is rendered around stand-ins, and each message is
    encoded by itself with its special tokens split; otherwise the template's own way is taken.
    """
    plain = [dict(message) for message in messages]
    specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if not any(special in message["content"] for message in plain for special in specials):
        return list(tokenizer.apply_chat_template(plain, add_generation_prompt=False, return_dict=False))
    stand_ins = [f"STANDIN{number}X" for number in range(len(plain))]
    contents = {name: message["content"] for name, message in zip(stand_ins, plain, strict=True)}
    shown = [{**message, "content": name} for name, message in zip(stand_ins, plain, strict=True)]
    text = tokenizer.apply_chat_template(shown, add_generation_prompt=False, tokenize=False)
    ids: list[int] = []
    for part in re.split(r"(STANDIN\d+X)", text):
        content = contents.get(part)
        # What the template itself wrote keeps its special tokens.
        encoded = tokenizer(
            part if content is None else content,
            add_special_tokens=False,
            split_special_tokens=content is not None,
        )
        ids += encoded["input_ids"]
    return ids
