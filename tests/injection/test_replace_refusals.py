"""What the replace injector refuses, and that its hook is gone afterwards."""

from __future__ import annotations

import pytest
import torch
from tests.injection.tiny import MARKER, PROMPT, SIZES, WIDTH, injector_for, tiny_llama_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from dragoman.errors import InjectionError, ScaleError, VectorError
from dragoman.injection import ReplaceInjector


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama_model()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("ids", "count", "options", "message"),
    [
        ([PROMPT, PROMPT], 3, {}, r"Found 2 .*Expected: 3"),
        ([PROMPT, PROMPT], 1, {}, r"Found 2 .*Expected: 1"),
        ([[1, 5, 7, 3, 3, 3]], 1, {}, r"between 5 and 3, the sidecar says between 5 and 6"),
        ([PROMPT * 2, [1] * 12], 2, {}, r"Row 0 has 2"),
        ([[1, 2, 3]], 1, {}, r"1 forward pass .*none held the marker '㈎'"),
        ([PROMPT], 1, {"sites_per_row": 2}, r"Row 0 has 1 .*2 in every row"),
    ],
)
def test_a_count_that_does_not_match_is_refused_before_any_number_appears(
    model, ids, count, options, message
) -> None:
    with (
        pytest.raises(InjectionError, match=message),
        torch.no_grad(),
        injector_for(model).inject(torch.randn(count, WIDTH), **options),
    ):
        model(input_ids=torch.tensor(ids))


def test_vectors_that_no_forward_consumed_are_an_error_at_the_end_of_the_block(model) -> None:
    with (
        pytest.raises(InjectionError, match=r"0 forward passes .*Expected: one with 2 injection sites"),
        injector_for(model).inject(torch.randn(2, WIDTH)),
    ):
        pass


def test_a_forward_with_embeddings_instead_of_ids_is_an_error(model) -> None:
    with (
        pytest.raises(InjectionError, match="not inputs_embeds"),
        torch.no_grad(),
        injector_for(model).inject(torch.randn(1, WIDTH)),
    ):
        model(inputs_embeds=torch.randn(1, 6, WIDTH))


def test_the_wrong_module_is_named_by_what_it_received(model) -> None:
    injector = ReplaceInjector(model.model.layers[0].mlp, MARKER, 1.0)
    with (
        pytest.raises(InjectionError, match=r"argument of shape \(1, 6, 24\)"),
        torch.no_grad(),
        injector.inject(torch.randn(1, WIDTH)),
    ):
        model(input_ids=torch.tensor([PROMPT]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_vector_that_is_not_finite_is_refused_by_its_row(model, bad: float) -> None:
    vectors = torch.randn(3, WIDTH)
    vectors[1, 4] = bad
    with (
        pytest.raises(VectorError, match=r"1 of 3 vectors hold NaN or infinities, first row 1"),
        injector_for(model).inject(vectors),
    ):
        pass


def test_vectors_of_another_width_are_refused_with_both_widths(model) -> None:
    with (
        pytest.raises(VectorError, match=r"Vectors have 16 numbers.*24"),
        torch.no_grad(),
        injector_for(model).inject(torch.randn(1, 16)),
    ):
        model(input_ids=torch.tensor([PROMPT]))


@pytest.mark.parametrize("vectors", [torch.randn(WIDTH), torch.ones(1, WIDTH, dtype=torch.int64)])
def test_what_is_not_a_matrix_of_floats_is_refused(model, vectors: torch.Tensor) -> None:
    with pytest.raises(VectorError, match=r"\[n d_model\]"), injector_for(model).inject(vectors):
        pass


def test_a_scale_that_means_nothing_is_refused_before_the_forward(model) -> None:
    with pytest.raises(ScaleError), injector_for(model, float("nan")).inject(torch.randn(1, WIDTH)):
        raise AssertionError("the block must not run")


def test_an_exception_inside_the_block_passes_unchanged_and_removes_the_hook(model) -> None:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with pytest.raises(KeyboardInterrupt), injector_for(model).inject(torch.randn(1, WIDTH)):
            raise KeyboardInterrupt
        assert torch.equal(model(input_ids=ids).logits, before)
        with injector_for(model).inject(torch.randn(1, WIDTH)):  # and a new block can be opened
            assert not torch.equal(model(input_ids=ids).logits, before)
        assert torch.equal(model(input_ids=ids).logits, before)
    assert not model.get_input_embeddings()._forward_hooks


def test_nested_injection_into_one_module_is_refused_and_leaves_the_outer_one_working(model) -> None:
    ids = torch.tensor([PROMPT])
    vectors = torch.randn(1, WIDTH)
    with torch.no_grad(), injector_for(model).inject(vectors):
        inner_block = injector_for(model).inject(vectors)
        with pytest.raises(InjectionError, match="active already"), inner_block:
            raise AssertionError("the inner block must not run")
        inner = model(input_ids=ids).logits
    with torch.no_grad(), injector_for(model).inject(vectors):
        assert torch.equal(model(input_ids=ids).logits, inner)


def test_two_models_may_be_injected_into_at_the_same_time(model) -> None:
    other = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ids = torch.tensor([PROMPT])
    with (
        torch.no_grad(),
        injector_for(model).inject(torch.randn(1, WIDTH)),
        injector_for(other).inject(torch.randn(1, WIDTH)),
    ):
        model(input_ids=ids)
        other(input_ids=ids)
