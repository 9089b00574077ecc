"""Small tokenizers that treat a marker as those of Qwen2.5, Gemma 3 and Llama 3 do."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The shared pre-tokenising rule of GPT-2's descendants, with runs of punctuation kept together.
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _merge_up(text: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Adds the merges that make `text` (in byte-level letters) one token."""
    whole = text[0]
    for letter in text[1:]:
        if whole + letter not in vocabulary:
            vocabulary[whole + letter] = len(vocabulary)
            merges.append((whole, letter))
        whole += letter


def _byte_letters(text: str) -> str:
    (piece, _), *others = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert not others
    return piece


def byte_level(
    single_tokens: list[str],
    *,
    special: list[str],
    chat_template: str,
    bos: str | None = None,
    pad: str | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE: 256 bytes, the merges that make `single_tokens` single, `special` at the end."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for text in single_tokens:
        _merge_up(_byte_letters(text), vocabulary, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_GPT2_SPLIT), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=special[-1], pad_token=pad,
        chat_template=chat_template, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def qwen25(single_tokens: tuple[str, ...] = ("㈎", "㎡")) -> PreTrainedTokenizerFast:
    """Qwen2.5: byte-level, NFC, ㈎ is one token, no BOS."""
    return byte_level(
        [*single_tokens, "concept", "</"],
        special=["<|endoftext|>", "<|im_start|>", "<|image_pad|>", "<|fim_pad|>", "<|im_end|>"],
        chat_template=CHATML,
        pad="<|endoftext|>",
    )


def llama3() -> PreTrainedTokenizerFast:
    """Llama 3: byte-level, ㎡ is one token, reserved special tokens, BOS written by the template."""
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(4)]
    headers = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    return byte_level(
        ["㎡", "concept", "</"],
        special=[*headers, *reserved, "<|eot_id|>"],
        chat_template=LLAMA3,
        bos="<|begin_of_text|>",
    )


def gemma3() -> PreTrainedTokenizerFast:
    """Gemma 3 as transformers 5 loads it: entries are plain characters, but text is NFKC-normalised.

    ㈜ is an entry of the vocabulary, and encoding it gives the three characters (주).
    """
    letters = [chr(code) for code in range(32, 127) if chr(code) != " "]
    entries = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    entries += ["<unused0>", "<unused1>", "<image_soft_token>", "▁", "\n", *letters, "주", "㈜"]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    special = [entry for entry in entries[:9] if entry != "<unk>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        pad_token="<pad>", chat_template=GEMMA, clean_up_tokenization_spaces=False,
    )  # fmt: skip
