"""Models shared by all tests: loaded once a session, frozen, never changed by a test."""

from __future__ import annotations

import pytest
import tests.typecheck  # noqa: F401  (the hook below names it)
import torch
from jaxtyping import install_import_hook

# Shapes and types in the signatures of the rooms that handle tensors are checked at every call of every test.
CHECKED = [
    "dragoman.scaling",
    "dragoman.injection.marker",
    "dragoman.injection.sites",
    "dragoman.activations.capture",
    "dragoman.activations.positions",
    "dragoman.activations.reading",
    "dragoman.evaluation.fve",
    "dragoman.evaluation.retrieval",
    "dragoman.evaluation.stats",
    "dragoman.nla.heads",
    "dragoman.nla.vectors",
    "dragoman.training.batches",
    "dragoman.training.optimizer",
    "dragoman.training.rows",
]
install_import_hook(CHECKED, "tests.typecheck.checker")

from tests.families import FAMILIES, tiny_model  # noqa: E402

from dragoman.subjects import Compute, Subject, load_subject  # noqa: E402

CPU_FLOAT32 = Compute(torch.float32, "sdpa", torch.device("cpu"), "tests")


@pytest.fixture(scope="session")
def smollm2() -> Subject:
    """The embedded subject on the CPU, with the dtype and attention that users get by default."""
    return load_subject("smollm2-135m", device="cpu")


@pytest.fixture(scope="session")
def smollm2_fp32() -> Subject:
    """The embedded subject in float32, for tests that compare numbers exactly."""
    return load_subject("smollm2-135m", compute=CPU_FLOAT32)


@pytest.fixture(scope="session")
def tiny_llama(smollm2: Subject) -> Subject:
    """A random four-block Llama of width 32 with the real SmolLM2 tokenizer, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=smollm2.vocab_size,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    return Subject("tiny-llama", model, smollm2.tokenizer, CPU_FLOAT32)


@pytest.fixture(params=FAMILIES)
def tiny_family(request: pytest.FixtureRequest, smollm2: Subject) -> Subject:
    """A tiny random subject of each family; its tokenizer is SmolLM2's, so use ids below 100 only."""
    return Subject(request.param, tiny_model(request.param), smollm2.tokenizer, CPU_FLOAT32)
