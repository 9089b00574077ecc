"""Every family: parts found by structure, gain measured, truncated models exact."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.families import D_MODEL, FAMILIES, NUM_LAYERS, VOCAB, tiny_model
from torch import Tensor, nn

from dragoman.errors import SubjectError
from dragoman.subjects import Compute, Subject, find_family, truncated_model
from dragoman.subjects.families import measure_gain
from dragoman.subjects.truncate import shares_weights

EXPECTED_GAIN = dict.fromkeys(FAMILIES, (1.0, 1.0)) | {
    "gemma3": (math.sqrt(D_MODEL), 1.0),
    "gemma3-wrapper": (math.sqrt(D_MODEL), 1.0),
    "gemma4": (math.sqrt(D_MODEL), 1.0),
    "gemma4-wrapper": (math.sqrt(D_MODEL), 1.0),
    "granite": (1.0, 12.0),
}


def random_ids(*shape: int) -> Tensor:
    """Fresh ids below the special ones of the tiny wrappers."""
    return torch.randint(3, 100, shape)


@torch.no_grad()
def block_output(model: Any, block: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What a plain hook on the untouched model sees."""
    seen: list[Tensor] = []
    hook = block.register_forward_hook(
        lambda _m, _a, out: seen.append(out if isinstance(out, Tensor) else out[0])
    )
    model(input_ids=ids, attention_mask=mask)
    hook.remove()
    return seen[0]


def test_all_blocks_run_in_the_order_of_their_index(tiny_family: Subject) -> None:
    order: list[int] = []
    hooks = [
        b.register_forward_hook(lambda *_, i=i: order.append(i)) for i, b in enumerate(tiny_family.blocks)
    ]
    tiny_family.model(input_ids=random_ids(1, 5))
    for hook in hooks:
        hook.remove()
    assert order == list(range(NUM_LAYERS))
    assert tiny_family.num_layers == NUM_LAYERS
    assert tiny_family.d_model == D_MODEL


@torch.no_grad()
def test_the_final_norm_turns_the_last_block_output_into_the_last_hidden_state(tiny_family: Subject) -> None:
    ids = random_ids(2, 9)
    last = block_output(tiny_family.model, tiny_family.blocks[-1], ids)
    whole = tiny_family.text_model(input_ids=ids).last_hidden_state
    assert torch.equal(tiny_family.final_norm(last), whole)
    assert not torch.allclose(last, whole, atol=1e-2)


def test_the_gain_is_measured_where_the_family_applies_it(tiny_family: Subject) -> None:
    inside, after = EXPECTED_GAIN[tiny_family.name]
    assert tiny_family.gain.inside == pytest.approx(inside, rel=1e-6)
    assert tiny_family.gain_after == pytest.approx(after, rel=1e-6)
    assert tiny_family.embedding_gain == pytest.approx(inside * after, rel=1e-6)


def test_the_gain_is_measured_in_bfloat16_too() -> None:
    for name in ("llama", "gemma3", "granite", "gpt2"):
        gain = measure_gain(find_family(tiny_model(name).to(torch.bfloat16)))
        inside, after = EXPECTED_GAIN[name]
        assert gain.total == pytest.approx(inside * after, rel=5e-3), name


@pytest.mark.parametrize("layer_index", range(NUM_LAYERS))
@torch.no_grad()
def test_a_truncated_model_equals_the_hooked_block_exactly(tiny_family: Subject, layer_index: int) -> None:
    ids = random_ids(3, 17)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    expected = block_output(tiny_family.model, tiny_family.blocks[layer_index], ids, mask)
    got = truncated_model(tiny_family, layer_index)(input_ids=ids, attention_mask=mask)
    assert torch.equal(got[mask.bool()], expected[mask.bool()])


@torch.no_grad()
def test_a_truncated_model_shares_weights_and_leaves_the_subject_alone(tiny_family: Subject) -> None:
    ids = random_ids(2, 12)
    config_before = copy.deepcopy(tiny_family.text_config.to_dict())
    before = tiny_family.model(input_ids=ids).logits.clone()
    short = truncated_model(tiny_family, 1)
    short.eval()(input_ids=ids)
    assert shares_weights(short, tiny_family)
    assert sum(p.numel() for p in short.parameters()) < sum(p.numel() for p in tiny_family.model.parameters())
    assert len(tiny_family.blocks) == NUM_LAYERS
    assert tiny_family.text_config.to_dict() == config_before
    assert torch.equal(tiny_family.model(input_ids=ids).logits, before)


def test_adapters_and_hooks_on_a_truncated_model_do_not_reach_the_subject(tiny_llama: Subject) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    ids = random_ids(1, 8)
    before = tiny_llama.model(input_ids=ids).logits
    short = truncated_model(tiny_llama, 2)
    plain = short(input_ids=ids)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    inject_adapter_in_model(config, short.text_model)
    hook = short.embedding.register_forward_hook(lambda _m, _a, out: out * 0)
    assert not torch.allclose(short(input_ids=ids), plain)
    hook.remove()
    assert torch.equal(tiny_llama.model(input_ids=ids).logits, before)
    assert not any("lora" in name for name, _ in tiny_llama.model.named_parameters())


@torch.no_grad()
def test_a_truncated_gemma4_still_reads_its_per_layer_inputs() -> None:
    model = tiny_model("gemma4")
    subject = Subject("gemma4", model, None, Compute(torch.float32, "sdpa", torch.device("cpu"), "test"))
    ids = random_ids(1, 10)
    before = truncated_model(subject, 0)(input_ids=ids)
    model.model.embed_tokens_per_layer.weight[:, :8] += 1.0
    assert not torch.allclose(truncated_model(subject, 0)(input_ids=ids), before)


def test_gradients_flow_through_a_truncated_model_from_inputs_embeds(tiny_llama: Subject) -> None:
    short = truncated_model(tiny_llama, 1)
    embeds = tiny_llama.embedding(random_ids(1, 6)).detach().requires_grad_()
    short(inputs_embeds=embeds).sum().backward()
    assert embeds.grad is not None
    assert embeds.grad.abs().sum() > 0


@torch.no_grad()
def test_the_real_subject_cut_at_any_block_equals_its_hidden_states(smollm2_fp32: Subject) -> None:
    ids = torch.tensor(
        [smollm2_fp32.encode("The interpreter stood between the two courts and said nothing.")]
    )
    states = smollm2_fp32.model(input_ids=ids, output_hidden_states=True).hidden_states
    for layer_index in (0, 20):
        got = truncated_model(smollm2_fp32, layer_index)(input_ids=ids)
        assert torch.equal(got, states[layer_index + 1])
    # The last entry of hidden_states has been through the final norm; the block output has not.
    last = truncated_model(smollm2_fp32, 29)(input_ids=ids)
    assert torch.equal(smollm2_fp32.final_norm(last), states[30])


@pytest.mark.parametrize("layer_index", [-1, NUM_LAYERS, 99])
def test_a_block_that_does_not_exist_is_refused(tiny_llama: Subject, layer_index: int) -> None:
    with pytest.raises(SubjectError, match=f"layer_index {layer_index} .* 4 blocks"):
        truncated_model(tiny_llama, layer_index)


def test_an_encoder_decoder_model_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, d_kv=4, num_layers=2, num_heads=2)
    with pytest.raises(SubjectError, match="decoder-only"):
        find_family(T5ForConditionalGeneration(config))


def test_parallel_streams_of_gemma_3n_are_refused_by_name() -> None:
    from tests.families import _COMMON
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        **_COMMON,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        head_dim=8,
        num_kv_shared_layers=0,
        layer_types=["full_attention"] * NUM_LAYERS,
        activation_sparsity_pattern=[0.0] * NUM_LAYERS,
    )
    with pytest.raises(SubjectError, match="parallel streams"):
        find_family(Gemma3nForCausalLM(config))


def test_a_norm_between_embedding_and_block_0_is_noticed_by_the_gain() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(SubjectError, match="more than a factor"):
        measure_gain(find_family(model))
