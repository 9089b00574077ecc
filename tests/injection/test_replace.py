"""What the replace injector lets in, and its gradients, against plain loops; the real SmolLM2 too."""

from __future__ import annotations

import pytest
import torch
from tests.injection.tiny import (
    MARKER,
    PROMPT,
    SIZES,
    WIDTH,
    injector_for,
    inputs_of_block_0,
    plain_embeddings,
    tiny_llama_model,
)
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
)

from dragoman.errors import InjectionError
from dragoman.injection import ReplaceInjector, choose_marker, find_sites, prompt_renderer
from dragoman.scaling import rescale


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama_model()


# ---------------------------------------------------------------- what enters


@pytest.mark.parametrize(
    ("ids", "sites_per_row"),
    [
        ([PROMPT, PROMPT, PROMPT], 1),
        ([PROMPT * 2, PROMPT * 2], 2),
        ([PROMPT * 3, PROMPT + [0] * 12], None),  # packed rows of different length
        ([[3, 7, 3, *PROMPT], [5, 7, 3, *PROMPT]], 1),  # the marker in user text
        ([[0, 0, 0, *PROMPT], [0, *PROMPT, 0, 0]], 1),  # padding on both sides
    ],
)
def test_logits_equal_those_of_embeddings_replaced_by_a_plain_loop(model, ids, sites_per_row) -> None:
    ids = torch.tensor(ids)
    vectors = torch.randn(len(find_sites(ids, MARKER)), WIDTH) * 100
    mask = (ids != 0).long()
    with torch.no_grad():
        with injector_for(model).inject(vectors, sites_per_row):
            injected = model(input_ids=ids, attention_mask=mask).logits
        embeddings = plain_embeddings(model.get_input_embeddings()(ids), ids, vectors, 4.0)
        expected = model(inputs_embeds=embeddings, attention_mask=mask).logits
        untouched = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(injected, expected, rtol=1e-5, atol=1e-5)
    assert (injected - untouched).abs().max() > 1e-2


def test_vectors_go_to_their_own_rows_in_order(model) -> None:
    ids = torch.tensor([PROMPT] * 4)
    vectors = torch.randn(4, WIDTH)
    order = torch.randperm(4)
    with torch.no_grad():
        with injector_for(model).inject(vectors):
            straight = model(input_ids=ids).logits
        with injector_for(model).inject(vectors[order]):
            permuted = model(input_ids=ids).logits
    torch.testing.assert_close(permuted, straight[order], rtol=1e-5, atol=1e-5)
    assert (straight[0] - straight[1]).abs().max() > 1e-3


@pytest.mark.parametrize("vector_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_in_bf16_block_0_sees_the_vector_rounded_once(model, vector_dtype) -> None:
    model = model.to(torch.bfloat16)
    vectors = (torch.randn(2, WIDTH) * 300).to(vector_dtype)
    with torch.no_grad(), inputs_of_block_0(model) as seen, injector_for(model, 250.0).inject(vectors):
        model(input_ids=torch.tensor([PROMPT, PROMPT]))
    exact = vectors.double() * 250 / vectors.double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(seen[0][:, 3], exact.float().to(torch.bfloat16), rtol=0, atol=0)
    assert seen[0].dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [None, "sqrt_d_model", 30.0])
def test_block_0_sees_the_vector_with_the_norm_of_the_scale_and_all_else_unchanged(model, scale) -> None:
    ids = torch.tensor([PROMPT])
    vectors = torch.randn(1, WIDTH) * 17
    with torch.no_grad(), inputs_of_block_0(model) as seen, injector_for(model, scale).inject(vectors):
        model(input_ids=ids)
    torch.testing.assert_close(seen[0][0, 3], rescale(vectors, scale)[0])
    others = [0, 1, 2, 4, 5]
    assert torch.equal(seen[0][0, others], model.get_input_embeddings()(ids)[0, others])


def test_a_gain_inside_the_embedding_module_does_not_touch_the_vector() -> None:
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)).eval()
    vectors = torch.randn(1, WIDTH)
    with torch.no_grad(), inputs_of_block_0(gemma) as seen, injector_for(gemma, 80_000.0).inject(vectors):
        gemma(input_ids=torch.tensor([PROMPT]))
    torch.testing.assert_close(seen[0][0, 3], rescale(vectors, 80_000.0)[0])


def test_a_gain_after_the_embedding_module_is_divided_out() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    granite = GraniteForCausalLM(GraniteConfig(**sizes, embedding_multiplier=12.0)).eval()
    vectors = torch.randn(1, WIDTH)
    injector = injector_for(granite, 30.0, gain_after=12.0)
    with torch.no_grad(), inputs_of_block_0(granite) as seen, injector.inject(vectors):
        granite(input_ids=torch.tensor([PROMPT]))
    torch.testing.assert_close(seen[0][0, 3], rescale(vectors, 30.0)[0])


def test_a_zero_vector_enters_as_zero_and_nothing_becomes_nan(model) -> None:
    with torch.no_grad(), injector_for(model).inject(torch.zeros(1, WIDTH)):
        assert torch.isfinite(model(input_ids=torch.tensor([PROMPT])).logits).all()


# ---------------------------------------------------------------- gradients


def test_gradients_of_embeddings_vectors_and_weights_equal_those_of_a_plain_loop(model) -> None:
    ids = torch.tensor([[3, 7, *PROMPT], [0, 0, *PROMPT]])
    values = torch.randn(2, WIDTH)
    gradients = []
    for injected in (True, False):
        model.zero_grad()
        vectors = values.clone().requires_grad_(True)
        if injected:
            with injector_for(model).inject(vectors):
                logits = model(input_ids=ids).logits
        else:
            embeddings = plain_embeddings(model.get_input_embeddings()(ids), ids, vectors, 4.0)
            logits = model(inputs_embeds=embeddings).logits
        logits.float().log_softmax(-1)[..., 9].sum().backward()
        gradients.append([vectors.grad, *(parameter.grad.clone() for parameter in model.parameters())])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert gradients[0][0].abs().max() > 0


def test_the_marker_s_own_embedding_gets_no_gradient_from_its_site(model) -> None:
    with injector_for(model).inject(torch.randn(1, WIDTH)):
        model(input_ids=torch.tensor([PROMPT])).logits.square().sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert gradient[7].abs().max() == 0
    assert gradient[5].abs().max() > 0


# ---------------------------------------------------------------- several forwards


def test_cached_generation_equals_generation_from_replaced_embeddings(model) -> None:
    ids = torch.tensor([PROMPT, PROMPT])
    vectors = torch.randn(2, WIDTH)
    options = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [7], "pad_token_id": 0}
    mask = torch.ones_like(ids)
    with torch.no_grad():
        with injector_for(model).inject(vectors):
            ours = model.generate(ids, attention_mask=mask, **options)
        embeddings = plain_embeddings(model.get_input_embeddings()(ids), ids, vectors, 4.0)
        plain = model.generate(inputs_embeds=embeddings, attention_mask=mask, **options)
    assert ours[:, ids.shape[1] :].tolist() == plain.tolist()
    assert ours[0].tolist() != ours[1].tolist()


@pytest.mark.parametrize("prefix_length", [1, 2, 3])
@pytest.mark.parametrize("prefix_inside", [True, False])
def test_a_prompt_split_before_the_marker_gives_the_same_as_a_whole_one(
    model, prefix_length: int, prefix_inside: bool
) -> None:
    ids = torch.tensor([PROMPT])
    vectors = torch.randn(1, WIDTH)
    prefix, rest = ids[:, :prefix_length], ids[:, prefix_length:]
    with torch.no_grad():
        with injector_for(model).inject(vectors):
            whole = model(input_ids=ids).logits
        if prefix_inside:
            with injector_for(model).inject(vectors):
                cache = model(input_ids=prefix, use_cache=True).past_key_values
                split = model(input_ids=rest, past_key_values=cache).logits
        else:
            cache = model(input_ids=prefix, use_cache=True).past_key_values
            with injector_for(model).inject(vectors, left_context=int(prefix[0, -1])):
                split = model(input_ids=rest, past_key_values=cache).logits
    torch.testing.assert_close(split, whole[:, prefix_length:], rtol=1e-4, atol=1e-5)


def test_a_prefix_of_one_row_is_the_left_context_of_every_row_of_the_batch(model) -> None:
    embedding = model.get_input_embeddings()
    with torch.no_grad(), injector_for(model).inject(torch.randn(3, WIDTH)):
        embedding(torch.tensor([[1, 9, 5]]))
        embedded = embedding(torch.tensor([[7, 6, 8]] * 3))
    torch.testing.assert_close(embedded[:, 0].norm(dim=1), torch.full((3,), 4.0))


def test_a_right_neighbour_cut_off_by_the_split_is_refused_and_not_skipped(model) -> None:
    with (
        pytest.raises(InjectionError, match="stands between 5 and the edge"),
        torch.no_grad(),
        injector_for(model).inject(torch.randn(1, WIDTH)),
    ):
        model(input_ids=torch.tensor([PROMPT[:4]]))


def test_a_second_prompt_in_one_block_is_refused(model) -> None:
    with (
        pytest.raises(InjectionError, match="Forward pass 2 holds an injection site"),
        torch.no_grad(),
        injector_for(model).inject(torch.randn(1, WIDTH)),
    ):
        model(input_ids=torch.tensor([PROMPT]))
        model(input_ids=torch.tensor([PROMPT]))


def test_a_marker_generated_later_between_other_words_passes(model) -> None:
    with torch.no_grad(), injector_for(model).inject(torch.randn(1, WIDTH)):
        model(input_ids=torch.tensor([PROMPT]))
        model(input_ids=torch.tensor([[7]]))


def test_a_site_completed_one_token_at_a_time_is_not_missed_as_left_context(model) -> None:
    # Decoding one id at a time: the right neighbour arrives in a later forward, which is no site by itself.
    with torch.no_grad(), injector_for(model).inject(torch.randn(1, WIDTH)):
        model(input_ids=torch.tensor([PROMPT]))
        for token in (5, 7, 6):
            model(input_ids=torch.tensor([[token]]))


# ---------------------------------------------------------------- the real model


def test_on_the_real_smollm2_block_0_reads_the_vector_at_the_marker_and_the_text_elsewhere(smollm2) -> None:
    render = prompt_renderer(
        smollm2.tokenizer, "Explain <concept>{injection_char}</concept>", system_prompt=""
    )
    marker = choose_marker(smollm2.tokenizer, render)
    ids = torch.tensor([render(marker.char)], device=smollm2.compute.device)
    vectors = torch.randn(1, smollm2.d_model) * 10
    injector = ReplaceInjector(smollm2.embedding, marker, 250.0, gain_after=smollm2.gain_after)
    with torch.no_grad(), inputs_of_block_0(smollm2.model) as seen, injector.inject(vectors):
        logits = smollm2.model(input_ids=ids).logits
    place = ids[0].tolist().index(marker.token_id)
    expected = rescale(vectors, 250.0)[0].to(seen[0].dtype).to(seen[0].device)
    torch.testing.assert_close(seen[0][0, place], expected, rtol=0, atol=0)
    others = torch.arange(ids.shape[1]) != place
    assert torch.equal(seen[0][0, others], smollm2.embedding(ids)[0, others])
    assert torch.isfinite(logits).all()
