"""Tiny random models of every family that is tested: no download, a few thousand parameters each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCAB = 128
D_MODEL = 32
NUM_LAYERS = 4

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": D_MODEL,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON))


def _qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_COMMON, tie_word_embeddings=True))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=8))


def _qwen3_5_text_config() -> dict[str, Any]:
    # Three linear-attention blocks, then one of full attention, as in the released models.
    return {
        **_COMMON,
        "head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    }


def _qwen3_5() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_qwen3_5_text_config()))


def _qwen3_5_wrapper() -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": D_MODEL,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=_qwen3_5_text_config(),
            vision_config=vision,
            image_token_id=120,
            video_token_id=121,
            vision_start_token_id=122,
            vision_end_token_id=123,
        )
    )


def _gemma3_text_config() -> dict[str, Any]:
    return {
        **_COMMON,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    }


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**_gemma3_text_config()))


def _gemma3_wrapper() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=_gemma3_text_config(),
            vision_config=_TINY_VISION,
            mm_tokens_per_image=4,
            image_token_index=120,
            boi_token_index=121,
            eoi_token_index=122,
        )
    )


def _gemma4_text_config() -> dict[str, Any]:
    # Per-layer inputs and two blocks that reuse the keys and values of earlier ones, as in E2B / E4B.
    return {
        **_COMMON,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    }


def _gemma4() -> Any:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    return Gemma4ForCausalLM(Gemma4TextConfig(**_gemma4_text_config()))


def _gemma4_wrapper() -> Any:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    vision = {**_TINY_VISION, "head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 8}
    return Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config=_gemma4_text_config(),
            vision_config=vision,
            image_token_id=120,
            video_token_id=121,
            audio_token_id=122,
            boi_token_id=123,
            eoi_token_id=124,
            boa_token_id=125,
            eoa_token_id=126,
        )
    )


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=D_MODEL, n_layer=NUM_LAYERS, n_head=4, n_positions=128)
    )


def _gpt_neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    unused = {"num_key_value_heads"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{k: v for k, v in _COMMON.items() if k not in unused}))


def _granite() -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(
        GraniteConfig(
            **_COMMON, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1
        )
    )


def _mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_COMMON, sliding_window=8))


def _phi3() -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**_COMMON))


def _olmo2() -> Any:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**_COMMON))


_BUILDERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3.5": _qwen3_5,
    "qwen3.5-wrapper": _qwen3_5_wrapper,
    "gemma3": _gemma3,
    "gemma3-wrapper": _gemma3_wrapper,
    "gemma4": _gemma4,
    "gemma4-wrapper": _gemma4_wrapper,
    "gpt2": _gpt2,
    "gpt-neox": _gpt_neox,
    "granite": _granite,
    "mistral": _mistral,
    "phi3": _phi3,
    "olmo2": _olmo2,
}

FAMILIES: list[str] = list(_BUILDERS)


def tiny_model(family_name: str, *, seed: int = 0) -> Any:
    """A random float32 model in eval mode; weights are spread so that every block changes the stream."""
    torch.manual_seed(seed)
    model = _BUILDERS[family_name]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
            elif "norm" in name or "ln_" in name:
                # Norms start at one (or zero); a norm that is skipped or doubled must show.
                parameter.add_(0.3 * torch.rand_like(parameter))
    return model
