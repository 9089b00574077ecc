from __future__ import annotations

import threading

import pytest
import torch
from tests.activations.plain_hooks import (
    hook_count,
    random_texts,
)
from tests.families import NUM_LAYERS

from dragoman.activations import capture
from dragoman.errors import ConfigError, ResourceError, SubjectError, TextError

# ------------------------------------------------------------------ what runs and what stays behind


@pytest.mark.parametrize("deepest", range(NUM_LAYERS))
def test_nothing_after_the_deepest_block_is_called_and_no_cache_is_built_in_every_family(
    tiny_family, deepest
):
    from transformers import Cache

    called, caches = [], []

    def before(name):
        def hook(_module, args, kwargs):
            called.append(name)
            caches.extend(value for value in (*args, *kwargs.values()) if isinstance(value, Cache))

        return hook

    parts = {str(k): block for k, block in enumerate(tiny_family.blocks)}
    parts |= {"norm": tiny_family.final_norm, "head": tiny_family.model.get_output_embeddings()}
    handles = [part.register_forward_pre_hook(before(name), with_kwargs=True) for name, part in parts.items()]
    try:
        capture(tiny_family, random_texts([6, 4]), sorted({0, deepest}), [[5], [3]])
    finally:
        for handle in handles:
            handle.remove()
    assert called == [str(k) for k in range(deepest + 1)]
    assert caches == []


def test_hooks_are_gone_after_a_capture_and_the_model_runs_to_its_end_again(tiny_family):
    before = hook_count(tiny_family)
    ids = torch.tensor(random_texts([6]))
    with torch.no_grad():
        expected = tiny_family.model(ids, use_cache=False).logits
        capture(tiny_family, ids.tolist(), [1], [[2]])
        assert hook_count(tiny_family) == before
        assert torch.equal(tiny_family.model(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_hooks_are_gone_after_an_exception_in_the_forward_and_others_stay(tiny_llama, error):
    def fail(*_):
        raise error

    handle = tiny_llama.blocks[1].mlp.register_forward_hook(fail)
    before = hook_count(tiny_llama)
    try:
        with pytest.raises(error):
            capture(tiny_llama, random_texts([6]), [0, 3], [[2]])
        assert hook_count(tiny_llama) == before
    finally:
        handle.remove()


def test_another_threads_forward_through_the_same_model_is_neither_read_nor_stopped(tiny_llama):
    ids, outcome = torch.tensor(random_texts([7])), []
    with torch.no_grad():
        expected = tiny_llama.model(ids).logits

    def other_forward():
        with torch.no_grad():
            outcome.append(tiny_llama.model(ids).logits)

    def run_other(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=other_forward)
            thread.start()
            thread.join()

    mine = random_texts([9])
    alone = capture(tiny_llama, mine, [2], [[8]])[0].vectors[2]
    handle = tiny_llama.blocks[0].register_forward_hook(run_other)
    try:
        beside = capture(tiny_llama, mine, [2], [[8]])[0].vectors[2]
    finally:
        handle.remove()
    assert torch.equal(outcome[0], expected)
    assert torch.equal(beside, alone)


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("layers", [[4], [-1], [0, 99], []])
def test_a_layer_that_the_subject_does_not_have_is_refused_with_the_range(tiny_llama, layers):
    with pytest.raises(ConfigError, match=r"blocks 0 to 3 of tiny-llama"):
        capture(tiny_llama, random_texts([4]), layers, [[0]])


@pytest.mark.parametrize("positions", [[[4]], [[-1]], [[0, 9, 1]]])
def test_a_position_outside_its_text_is_refused_with_the_range(tiny_llama, positions):
    with pytest.raises(TextError, match=r"sequence 0 of 4 tokens.*positions from 0 to 3"):
        capture(tiny_llama, random_texts([4]), [0], positions)


def test_an_empty_text_with_a_position_is_refused(tiny_llama):
    with pytest.raises(TextError, match=r"a text that is not empty"):
        capture(tiny_llama, [[]], [0], [[0]])


def test_as_many_lists_of_positions_as_texts_are_needed(tiny_llama):
    with pytest.raises(TextError, match=r"2 sequences came with 1 lists"):
        capture(tiny_llama, random_texts([4, 4]), [0], [[0]])


def test_a_text_longer_than_the_model_takes_is_refused_before_anything_runs(tiny_llama):
    with pytest.raises(TextError, match=r"equence 1 has 513 tokens.*at most 512"):
        capture(tiny_llama, random_texts([4, 513]), [0], [[0], [0]])


@pytest.mark.parametrize("token", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(tiny_llama, token):
    with pytest.raises(TextError, match=rf"oken id {token} is in the text"):
        capture(tiny_llama, [[1, token, 2]], [0], [[0]])


def test_a_batch_budget_below_one_is_refused(tiny_llama):
    with pytest.raises(ConfigError, match=r"atch_tokens is 0"):
        capture(tiny_llama, random_texts([4]), [0], [[0]], batch_tokens=0)


def test_a_model_in_training_mode_is_refused(tiny_llama):
    tiny_llama.text_model.train()
    try:
        with pytest.raises(SubjectError, match=r"in training mode.*dropout"):
            capture(tiny_llama, random_texts([4]), [0], [[0]])
    finally:
        tiny_llama.text_model.eval()


def test_a_block_that_returns_no_hidden_state_is_refused_and_its_hook_removed(tiny_llama):
    handle = tiny_llama.blocks[0].register_forward_hook(lambda _m, _a, out: out.unsqueeze(0))
    before = hook_count(tiny_llama)
    try:
        with pytest.raises(SubjectError, match=r"lock 0 returns"):
            capture(tiny_llama, random_texts([4]), [0], [[0]])
        assert hook_count(tiny_llama) == before
    finally:
        handle.remove()


def test_too_little_accelerator_memory_is_a_resource_error_that_names_the_batch(tiny_llama):
    def full(*_):
        raise torch.OutOfMemoryError("out of memory")

    handle = tiny_llama.blocks[0].register_forward_pre_hook(full)
    try:
        with pytest.raises(ResourceError, match=r"2 × 7 tokens.*lower batch_tokens"):
            capture(tiny_llama, random_texts([4, 7]), [0], [[0], [0]])
    finally:
        handle.remove()
