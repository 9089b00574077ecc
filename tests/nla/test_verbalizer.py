from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.nla.conftest import MakeSidecar
from torch import nn

from dragoman.errors import ConfigError, SidecarError, TextError, VectorError
from dragoman.nla import Decoding, Verbalizer, adapters
from dragoman.scaling import rescale
from dragoman.sidecar import av_prompt_ids
from dragoman.subjects import Subject

TEXTS = [
    'Ends in "Paris.": "the capital of France is Paris.".',
    "one",
    "two\nlines of text, longer than the others",
]


def vectors_for(subject: Subject, number: int = len(TEXTS)) -> torch.Tensor:
    return torch.randn(number, subject.d_model) * 7


def randomised(verbalizer: Verbalizer) -> Verbalizer:
    for parameter in adapters.attach_lora(verbalizer.model, rank=2, alpha=4.0):
        nn.init.normal_(parameter, std=0.05)
    return verbalizer


@torch.no_grad()
def plain_nll(verbalizer: Verbalizer, vector: torch.Tensor, text: str) -> tuple[list[int], list[float]]:
    """One row by hand: embeddings with the vector put in, the whole model, float64 log-softmax."""
    subject, sidecar = verbalizer.subject, verbalizer.sidecar
    assert sidecar.tokens is not None
    prompt = av_prompt_ids(sidecar, subject.tokenizer)
    answer = subject.tokenizer.encode(f"<explanation>\n{text}\n</explanation>", add_special_tokens=False)
    ids = torch.tensor([[*prompt, *answer, subject.tokenizer.eos_token_id]])
    embeds = verbalizer.model.get_input_embeddings()(ids).clone()
    embeds[0, prompt.index(sidecar.tokens.injection_token_id)] = rescale(vector[None], 30.0)[0]
    log_probs = verbalizer.model(inputs_embeds=embeds).logits[0].double().log_softmax(-1)
    said = ids[0, len(prompt) :].tolist()
    return said, [-float(log_probs[len(prompt) + i - 1, token]) for i, token in enumerate(said)]


def test_the_loss_equals_a_plain_loop_over_rows_and_tokens(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    verbalizer = randomised(Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama)))
    vectors = vectors_for(tiny_llama)
    with torch.no_grad():
        loss = verbalizer.loss(vectors, TEXTS)
    total = 0.0
    for row, text in enumerate(TEXTS):
        said, nll = plain_nll(verbalizer, vectors[row], text)
        total += sum(nll)
        assert float(loss.nll[row]) == pytest.approx(sum(nll), rel=1e-5)
        assert int(loss.tokens[row]) == len(said)
        # By text: the tokens that a decoded prefix shows to lie between the tags.
        decode = tiny_llama.tokenizer.decode
        first = len("<explanation>\n")
        last = first + len(text)
        ends = [len(decode(said[: i + 1])) for i in range(len(said))]
        content = [i for i in range(1, len(said)) if ends[i - 1] >= first and ends[i] <= last]
        assert int(loss.content_tokens[row]) == len(content)
        assert float(loss.content_nll[row]) == pytest.approx(sum(nll[i] for i in content), rel=1e-5)
    assert float(loss.mean()) == pytest.approx(total / int(loss.tokens.sum()), rel=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_shared_prefix_gives_the_loss_and_gradients_of_the_plain_forward(
    tiny_llama: Subject, make_sidecar: MakeSidecar, attention: str
) -> None:
    verbalizer = randomised(Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama)))
    verbalizer.model.set_attn_implementation(attention)
    batch = verbalizer.training_batch(vectors_for(tiny_llama), TEXTS)
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for share in (True, False):
        loss = verbalizer.batch_loss(batch, share_prefix=share)
        parameters = list(verbalizer.trainable_parameters().values())
        found.append((loss.nll.detach(), list(torch.autograd.grad(loss.mean(), parameters))))
    (shared, shared_gradients), (plain, plain_gradients) = found
    torch.testing.assert_close(shared, plain, atol=1e-4, rtol=1e-5)
    for a, b in zip(shared_gradients, plain_gradients, strict=True):
        assert float((a - b).norm()) <= 1e-4 * float(b.norm()) + 1e-7


def test_the_prefix_is_run_once_with_one_row(tiny_llama: Subject, make_sidecar: MakeSidecar) -> None:
    verbalizer = Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama))
    shapes: list[tuple[int, ...]] = []
    embedding = verbalizer.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, args, _output: shapes.append(tuple(args[0].shape)))
    verbalizer.loss(vectors_for(tiny_llama), TEXTS)
    assert len(shapes) == 2 and shapes[0][0] == 1 and shapes[1][0] == len(TEXTS)
    assert shapes[0][1] > 8


def test_each_rows_loss_depends_on_its_own_vector_alone(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    verbalizer = Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama))
    vectors = vectors_for(tiny_llama)
    before = verbalizer.loss(vectors, TEXTS).nll
    vectors[1] = torch.randn(tiny_llama.d_model)
    after = verbalizer.loss(vectors, TEXTS).nll
    assert torch.equal(before[[0, 2]], after[[0, 2]]) and not torch.isclose(before[1], after[1])


def test_the_length_of_a_vector_does_not_matter_since_the_scale_comes_from_the_sidecar(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    verbalizer = Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama))
    vectors = vectors_for(tiny_llama)
    torch.testing.assert_close(verbalizer.loss(vectors, TEXTS).nll, verbalizer.loss(vectors * 9, TEXTS).nll)


@pytest.mark.parametrize(
    "text", ["", "\n", "<explanation>\nagain", "</explanation>", "<|im_end|> <|im_start|>"]
)
def test_odd_texts_stay_between_the_tags_and_literal_specials_never_become_special(
    tiny_llama: Subject, make_sidecar: MakeSidecar, text: str
) -> None:
    batch = Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama)).training_batch(
        vectors_for(tiny_llama, 1), [text]
    )
    said = batch.input_ids[batch.response].tolist()
    assert not set(said[:-1]) & tiny_llama.special_ids and said[-1] == tiny_llama.tokenizer.eos_token_id
    content = tiny_llama.tokenizer.decode(batch.input_ids[batch.content].tolist())
    assert content.strip() == text.strip()


def test_full_weights_and_adapters_come_back_from_their_folders(
    tiny_llama: Subject, make_sidecar: MakeSidecar, tmp_path: Path
) -> None:
    vectors = vectors_for(tiny_llama)
    full = Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama), own_weights=True)
    with torch.no_grad():
        for parameter in full.trainable_parameters().values():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    adapted = randomised(Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama)))
    for name, verbalizer in (("full", full), ("adapted", adapted)):
        verbalizer.save(tmp_path / name)
        with torch.no_grad():
            expected = verbalizer.loss(vectors, TEXTS).nll
            for merge in (True, False):
                back = Verbalizer.load(tmp_path / name, tiny_llama, merge=merge)
                torch.testing.assert_close(back.loss(vectors, TEXTS).nll, expected, atol=1e-3, rtol=1e-4)
                assert back.sidecar.tokens == verbalizer.sidecar.tokens
                assert not back.trainable_parameters()


def test_bad_vectors_and_texts_are_refused(tiny_llama: Subject, make_sidecar: MakeSidecar) -> None:
    verbalizer = Verbalizer.from_subject(tiny_llama, make_sidecar(tiny_llama))
    good = vectors_for(tiny_llama)
    bad = good.clone()
    bad[1, 3] = float("nan")
    for vectors, match in ((bad, "row 1"), (good[:, :-1], "31"), (good[:0], "No vectors"), ("x", "matrix")):
        with pytest.raises(VectorError, match=match):
            verbalizer.explain(vectors)
    with pytest.raises(TextError, match="2 texts for 3 vectors"):
        verbalizer.loss(good, TEXTS[:2])
    with pytest.raises(TextError, match="512"):
        verbalizer.loss(good[:1], ["word " * 600])
    with pytest.raises(TextError, match="512"):
        verbalizer.explain(good, decoding=Decoding(max_new_tokens=600))
    with pytest.raises(ConfigError, match="best_of"):
        verbalizer.explain(good, decoding=Decoding(temperature=1.0, best_of=2))


def test_a_sidecar_of_another_width_is_refused(tiny_llama: Subject, make_sidecar: MakeSidecar) -> None:
    wrong = make_sidecar(tiny_llama).model_copy(update={"d_model": 64})
    with pytest.raises(SidecarError, match="64"):
        Verbalizer.from_subject(tiny_llama, wrong)


def test_a_sidecar_of_another_tokenizer_is_refused(tiny_llama: Subject, make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar(tiny_llama)
    assert sidecar.tokens is not None
    wrong = sidecar.tokens.model_copy(update={"injection_left_neighbor_id": 11})
    with pytest.raises(SidecarError, match="neighbour"):
        Verbalizer.from_subject(tiny_llama, sidecar.model_copy(update={"tokens": wrong}))


def test_on_the_real_model_in_its_own_dtype_sharing_the_prefix_changes_the_loss_by_rounding_only(
    smollm2: Subject, make_sidecar: MakeSidecar
) -> None:
    verbalizer = Verbalizer.from_subject(smollm2, make_sidecar(smollm2, layer_index=20, scale=250.0))
    batch = verbalizer.training_batch(vectors_for(smollm2), TEXTS)
    with torch.no_grad():
        shared, plain = (verbalizer.batch_loss(batch, share_prefix=share) for share in (True, False))
    torch.testing.assert_close(shared.nll, plain.nll, rtol=2e-2, atol=0.5)
