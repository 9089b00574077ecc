"""Tokenizer details that a GGUF file names but transformers does not take over.

`tokenizer.ggml.pre` names the pre-tokenizer (llama.cpp: `llm_tokenizer_bpe`); without it "12345" of SmolLM2
would stay one word instead of five digits, and every id after a number would differ from training.
Token types (`tokenizer.ggml.token_type`): 3 is a control token, which becomes a special token.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from dragoman.errors import DragomanWarning

CONTROL = 3
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(True)])


def _split_by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, _byte_level(False)])


_BY_NAME = {
    "smollm": _split_digits,
    "starcoder": _split_digits,
    "refact": _split_digits,
    "command-r": _split_digits,
    "gpt-2": lambda: _byte_level(True),
    "phi-2": lambda: _byte_level(True),
    "olmo": lambda: _byte_level(True),
    "default": lambda: _byte_level(True),
    "llama-bpe": lambda: _split_by(_LLAMA3),
    "llama3": lambda: _split_by(_LLAMA3),
    "llama-v3": lambda: _split_by(_LLAMA3),
    "smaug-bpe": lambda: _split_by(_LLAMA3),
    "dbrx": lambda: _split_by(_LLAMA3),
    "qwen2": lambda: _split_by(_QWEN2),
    "deepseek-r1-qwen": lambda: _split_by(_QWEN2),
    "stablelm2": lambda: _split_by(_QWEN2),
}


def repaired_tokenizer(tokenizer: Any, metadata: dict[str, Any]) -> Any:
    """A converted tokenizer brought in line with the GGUF file's own words.

    Args:
        tokenizer: a fast transformers tokenizer; it may be changed.
        metadata: metadata of the GGUF header.

    Returns:
        The same tokenizer, or a new one where tokens had to be taken out.
    """
    tokenizer = _without_foreign_tokens(tokenizer, metadata)
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        _set_pre_tokenizer(tokenizer, str(metadata.get("tokenizer.ggml.pre", "default")))
    _mark_control_tokens(tokenizer, metadata)
    template = metadata.get("tokenizer.chat_template")
    if template and not tokenizer.chat_template:
        tokenizer.chat_template = template
    tokenizer.clean_up_tokenization_spaces = False
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if context:
        tokenizer.model_max_length = int(context)
    return tokenizer


def _without_foreign_tokens(tokenizer: Any, metadata: dict[str, Any]) -> Any:
    """Take out tokens that a tokenizer class adds by default and the model has no embedding for."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    own = [token for token in backend["added_tokens"] if token["id"] < len(tokens)]
    if not tokens or len(own) == len(backend["added_tokens"]):
        return tokenizer
    backend["added_tokens"] = own
    if backend["model"].get("unk_token") not in tokens:
        backend["model"]["unk_token"] = None
    from transformers import PreTrainedTokenizerFast

    named = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in _ROLES.items()
        if metadata.get(f"tokenizer.ggml.{key}_token_id", len(tokens)) < len(tokens)
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        chat_template=tokenizer.chat_template,
        **named,
    )


def _set_pre_tokenizer(tokenizer: Any, name: str) -> None:
    if name not in _BY_NAME:
        warnings.warn(
            f"the GGUF file names the pre-tokenizer {name!r}, which is not known here; token ids may differ "
            "from those the model was trained on. Safer: load the model's own folder or hf:ORG/NAME.",
            DragomanWarning,
            stacklevel=2,
        )
        return
    tokenizer.backend_tokenizer.pre_tokenizer = _BY_NAME[name]()


def _mark_control_tokens(tokenizer: Any, metadata: dict[str, Any]) -> None:
    types = metadata.get("tokenizer.ggml.token_type") or []
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    known = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    missing = [AddedToken(token, special=True, normalized=False) for token in control if token not in known]
    if missing:
        tokenizer.add_tokens(missing, special_tokens=True)
