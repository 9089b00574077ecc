from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tests.nla.conftest import MakeSidecar
from torch import nn
from transformers.cache_utils import DynamicLayer

from dragoman.injection import Marker, ReplaceInjector
from dragoman.nla import Decoding, Verbalizer, adapters
from dragoman.nla.decoder import Decoder
from dragoman.nla.generation import Generator, PreallocatedLayer, expanded_cache, sample_tokens
from dragoman.scaling import rescale
from dragoman.sidecar import av_prompt_ids
from dragoman.subjects import Subject

SCALE = 5.0
PROMPT = [11, 12, 13, 14, 77, 15, 16]
MARKER = Marker("x", 77, 14, 15)


def generator_for(
    subject: Subject, *, limit: int = 12, stops: Sequence[int] = (2,), shared: int = 4
) -> Generator:
    decoder = Decoder(subject, adapters.share_structure(subject.model))
    injector = ReplaceInjector(decoder.embedding, MARKER, SCALE, gain_after=subject.gain_after)
    return Generator(
        decoder,
        injector,
        prompt=PROMPT,
        shared=shared,
        stop_ids=frozenset(stops),
        suppressed=[77, 0, 1],
        max_new_tokens=limit,
    )


@torch.no_grad()
def plain_greedy(
    subject: Subject, vector: torch.Tensor, *, limit: int, stops: Sequence[int]
) -> tuple[list[int], list[float]]:
    """One row, no cache: the whole model on the whole sequence for every token, the vector by a hook."""
    placed = rescale(vector[None], SCALE)[0] / subject.gain_after

    def put(_module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[0, PROMPT.index(77)] = placed
        return output

    said: list[int] = []
    logprobs: list[float] = []
    handle = subject.embedding.register_forward_hook(put)
    try:
        for _ in range(limit):
            logits = (
                subject.model(input_ids=torch.tensor([PROMPT + said]), use_cache=False).logits[0, -1].double()
            )
            allowed = logits.clone()
            allowed[[77, 0, 1]] = -torch.inf
            said.append(int(allowed.argmax()))
            logprobs.append(float(logits.log_softmax(-1)[said[-1]]))
            if said[-1] in stops:
                break
    finally:
        handle.remove()
    return said, logprobs


def test_every_family_decodes_the_tokens_of_a_loop_without_cache(tiny_family: Subject) -> None:
    vectors = torch.randn(3, tiny_family.d_model)
    expected = [plain_greedy(tiny_family, vector, limit=6, stops=(2,)) for vector in vectors]
    # A token that some row says early makes the batch shrink on the way.
    stops = (2, expected[0][0][1])
    expected = [plain_greedy(tiny_family, vector, limit=6, stops=stops) for vector in vectors]
    rows = generator_for(tiny_family, limit=6, stops=stops).generate(
        vectors, number=1, decoding=Decoding(), batch_size=2
    )
    for (answer,), (said, logprobs) in zip(rows, expected, strict=True):
        assert answer.token_ids == said
        assert answer.ended == (said[-1] in stops)
        torch.testing.assert_close(
            torch.tensor(answer.logprobs), torch.tensor(logprobs), atol=1e-4, rtol=1e-4
        )


def test_on_the_real_model_greedy_equals_hf_generate_token_for_token(
    smollm2_fp32: Subject, make_sidecar: MakeSidecar
) -> None:
    subject = smollm2_fp32
    verbalizer = Verbalizer.from_subject(subject, make_sidecar(subject, layer_index=20, scale=250.0))
    vectors = torch.randn(3, subject.d_model) * 10
    explanations = verbalizer.explain(vectors, decoding=Decoding(max_new_tokens=12))
    prompt = av_prompt_ids(verbalizer.sidecar, subject.tokenizer)
    embeds = subject.embedding(torch.tensor([prompt] * 3))
    assert verbalizer.sidecar.tokens is not None
    embeds[:, prompt.index(verbalizer.sidecar.tokens.injection_token_id)] = rescale(vectors, 250.0)
    said = subject.model.generate(
        inputs_embeds=embeds,
        attention_mask=torch.ones(3, len(prompt), dtype=torch.long),
        max_new_tokens=12,
        do_sample=False,
        suppress_tokens=verbalizer.suppressed_ids(),
    )
    for explanation, row in zip(explanations, said.tolist(), strict=True):
        stop = row.index(2) + 1 if 2 in row else len(row)
        assert explanation.token_ids == row[:stop]
        assert explanation.truncated and explanation.text, (
            "the untrained model writes no tags, and no word is lost"
        )


def test_the_shared_prefix_changes_nothing(tiny_llama: Subject) -> None:
    vectors = torch.randn(2, tiny_llama.d_model)
    shared, whole = (
        generator_for(tiny_llama, shared=shared).generate(
            vectors, number=1, decoding=Decoding(), batch_size=2
        )
        for shared in (4, 0)
    )
    assert [row[0].token_ids for row in shared] == [row[0].token_ids for row in whole]


def test_a_sample_depends_on_seed_number_and_vector_and_not_on_its_batch_mates(tiny_llama: Subject) -> None:
    generator = generator_for(tiny_llama, limit=8)
    vectors = torch.randn(5, tiny_llama.d_model)

    def run(rows: list[int], batch_size: int, number: int = 1, seed: int = 5) -> list[list[list[int]]]:
        answers = generator.generate(
            vectors[rows],
            number=number,
            decoding=Decoding(temperature=1.0, top_p=0.9, seed=seed),
            batch_size=batch_size,
        )
        return [[answer.token_ids for answer in row] for row in answers]

    together = run([0, 1, 2, 3, 4], 5, number=2)
    assert [row[0] for row in run([4, 2, 0], 2)] == [together[4][0], together[2][0], together[0][0]]
    assert all(row[0] != row[1] for row in together)
    assert run([0], 1, seed=6)[0][0] != together[0][0]


def test_marker_and_suppressed_tokens_are_never_said(tiny_llama: Subject) -> None:
    generator = generator_for(tiny_llama, limit=40)
    hot = Decoding(temperature=50.0)
    answers = generator.generate(torch.randn(20, tiny_llama.d_model), number=1, decoding=hot, batch_size=20)
    said = {token for row in answers for token in row[0].token_ids}
    assert len(said) > 300 and not said & {77, 0, 1}


def test_top_p_equals_an_independent_loop_in_float64() -> None:
    generator = np.random.default_rng()
    probabilities = torch.softmax(torch.randn(40, 900) * 2, dim=-1)
    draws = torch.from_numpy(generator.random(40))
    for top_p in (0.05, 0.5, 0.95, 0.9999, 1.0):
        found = sample_tokens(probabilities, draws, top_p)
        for row in range(40):
            values = probabilities[row].double().numpy()
            order = np.argsort(-values, kind="stable") if top_p < 1 else np.arange(900)
            kept: list[int] = []
            mass = 0.0
            for token in order:
                kept.append(int(token))
                mass += values[token]
                if top_p < 1 and mass >= top_p:
                    break
            edges = np.cumsum(values[kept]) / values[kept].sum()
            wanted = float(draws[row])
            chosen = kept.index(int(found[row]))
            low = edges[chosen - 1] if chosen else 0.0
            assert low - 1e-5 <= wanted <= edges[chosen] + 1e-5


def test_samples_follow_the_distribution() -> None:
    probabilities = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).expand(20000, 4)
    draws = torch.from_numpy(np.random.default_rng().random(20000))
    counts = torch.bincount(sample_tokens(probabilities, draws, 1.0), minlength=4) / 20000
    torch.testing.assert_close(counts, torch.tensor([0.5, 0.0, 0.3, 0.2]), atol=0.02, rtol=0)
    nucleus = torch.bincount(sample_tokens(probabilities, draws, 0.7), minlength=4) / 20000
    torch.testing.assert_close(nucleus, torch.tensor([0.625, 0.0, 0.375, 0.0]), atol=0.02, rtol=0)


def test_preallocated_layers_hold_what_concatenating_ones_hold_also_after_growing_and_dropping_rows() -> None:
    prefix = [torch.randn(1, 2, 5, 4) for _ in range(2)]
    fast, plain = PreallocatedLayer(*prefix, 3), DynamicLayer()
    plain.update(*(part.expand(3, -1, -1, -1) for part in prefix))
    rows = 3
    for step in range(150):
        if step == 70:
            keep = torch.tensor([0, 2])
            fast.reorder_cache(keep)
            plain.reorder_cache(keep)
            rows = 2
        new = [torch.randn(rows, 2, 1, 4) for _ in range(2)]
        for a, b in zip(fast.update(*new), plain.update(*new), strict=True):
            assert torch.equal(a, b)
    assert fast.get_seq_length() == plain.get_seq_length() == 155


def test_a_batchs_cache_leaves_the_prefix_as_it_was(tiny_family: Subject) -> None:
    decoder = Decoder(tiny_family, adapters.share_structure(tiny_family.model))
    with torch.no_grad():
        prefix = decoder.text.run_prefix([11, 12, 13])
        assert prefix is not None
        once = decoder.text.hidden(torch.tensor([[14], [15]]), expanded_cache(prefix, 2))
        again = decoder.text.hidden(torch.tensor([[14], [15]]), expanded_cache(prefix, 2))
    assert torch.equal(once, again) and prefix.get_seq_length() == 3


def test_progress_counts_vectors(tiny_llama: Subject) -> None:
    seen: list[tuple[int, int, str]] = []
    generator_for(tiny_llama, limit=2).generate(
        torch.randn(5, tiny_llama.d_model),
        number=2,
        decoding=Decoding(temperature=1.0),
        batch_size=4,
        progress=lambda *args: seen.append(args),
    )
    assert seen == [(2, 5, "vectors"), (4, 5, "vectors"), (5, 5, "vectors")]
