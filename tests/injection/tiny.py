"""A marker, a prompt, tiny models, and injection written as a plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from dragoman.injection import Marker, ReplaceInjector

MARKER = Marker(char="㈎", token_id=7, left_id=5, right_id=6)
PROMPT = [1, 9, 5, 7, 6, 8]
WIDTH = 24
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def injector_for(model: nn.Module, scale: Any = 4.0, **options: Any) -> ReplaceInjector:
    return ReplaceInjector(model.get_input_embeddings(), MARKER, scale, **options)


def plain_embeddings(
    embeddings: torch.Tensor, ids: torch.Tensor, vectors: torch.Tensor, scale: float
) -> torch.Tensor:
    """Row by row, token by token, without indexing by position: the independent formulation."""
    remaining = iter(vectors)
    rows = []
    for row_ids, row in zip(ids.tolist(), embeddings, strict=True):
        tokens = []
        for place, (token, embedded) in enumerate(zip(row_ids, row, strict=True)):
            around = (row_ids[place - 1] if place else None, token, (*row_ids, None)[place + 1])
            if around == (5, 7, 6):
                vector = next(remaining)
                tokens.append((vector * scale / vector.double().norm()).to(embedded.dtype))
            else:
                tokens.append(embedded)
        rows.append(torch.stack(tokens))
    assert next(remaining, None) is None
    return torch.stack(rows)


@contextlib.contextmanager
def inputs_of_block_0(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    text_model = model.model
    handle = text_model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).detach()),
        with_kwargs=True,
    )
    try:
        yield seen
    finally:
        handle.remove()


def tiny_llama_model() -> LlamaForCausalLM:
    """A fresh random Llama of three blocks."""
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).eval()
