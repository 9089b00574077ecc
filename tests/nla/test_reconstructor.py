from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.nla.conftest import MakeSidecar
from torch import nn

from dragoman.errors import PairError, SidecarError, TextError
from dragoman.nla import Reconstructor, ReconstructorBatch, adapters
from dragoman.sidecar import ar_prompt_ids
from dragoman.subjects import Subject

TEXTS = ["one", "a text of medium length, with a comma", "tiny", "the longest of all these texts " * 6, "one"]
LAYER = 2


def untrained(subject: Subject, make_sidecar: MakeSidecar, layer_index: int = LAYER) -> Reconstructor:
    return Reconstructor.from_subject(subject, layer_index, make_sidecar(subject, "ar", layer_index))


def randomised(subject: Subject, make_sidecar: MakeSidecar) -> Reconstructor:
    reconstructor = untrained(subject, make_sidecar)
    for parameter in adapters.attach_lora(reconstructor.backbone.text_model, rank=2, alpha=4.0):
        nn.init.normal_(parameter, std=0.05)
    with torch.no_grad():
        for parameter in reconstructor.head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return reconstructor


@torch.no_grad()
def block_output(subject: Subject, ids: list[int], layer_index: int) -> torch.Tensor:
    return subject.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[
        layer_index + 1
    ][0]


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.double() / vectors.double().norm(dim=-1, keepdim=True)


def test_untrained_it_returns_the_block_output_at_the_last_prompt_token_with_the_sidecars_norm(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    reconstructor = untrained(tiny_llama, make_sidecar)
    vectors = reconstructor.reconstruct(TEXTS)
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.full((len(TEXTS),), tiny_llama.d_model**0.5))
    for row, text in enumerate(TEXTS):
        ids = ar_prompt_ids(reconstructor.sidecar, tiny_llama.tokenizer, text)
        expected = block_output(tiny_llama, ids, LAYER)[-1]
        torch.testing.assert_close(unit(vectors[row]), unit(expected), atol=1e-5, rtol=1e-4)


def test_a_null_mse_scale_returns_the_heads_raw_output(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    sidecar = make_sidecar(tiny_llama, "ar", LAYER)
    raw = sidecar.extraction.model_copy(update={"mse_scale": None})
    reconstructor = Reconstructor.from_subject(
        tiny_llama, LAYER, sidecar.model_copy(update={"extraction": raw})
    )
    ids = ar_prompt_ids(sidecar, tiny_llama.tokenizer, "words")
    expected = block_output(tiny_llama, ids, LAYER)[-1]
    torch.testing.assert_close(reconstructor.reconstruct(["words"])[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 60, 100_000])
def test_padded_texts_give_what_they_give_alone_and_keep_their_order(
    tiny_llama: Subject, make_sidecar: MakeSidecar, batch_tokens: int
) -> None:
    reconstructor = randomised(tiny_llama, make_sidecar)
    seen: list[tuple[int, int, str]] = []
    together = reconstructor.reconstruct(
        TEXTS, batch_tokens=batch_tokens, progress=lambda *args: seen.append(args)
    )
    alone = torch.cat([reconstructor.reconstruct([text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    assert seen[-1] == (5, 5, "texts") and len(seen) == {1: 5, 60: 3, 100_000: 1}[batch_tokens]


def test_padding_on_the_left_gives_what_padding_on_the_right_gives(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    reconstructor = randomised(tiny_llama, make_sidecar)
    right = reconstructor.training_batch(TEXTS)
    width = right.input_ids.shape[1]
    left_ids, left_mask = torch.zeros_like(right.input_ids), torch.zeros_like(right.attention_mask)
    for row, length in enumerate(right.attention_mask.sum(dim=1).tolist()):
        left_ids[row, width - length :] = right.input_ids[row, :length]
        left_mask[row, width - length :] = 1
    with torch.no_grad():
        expected = reconstructor.predict(right)
        found = reconstructor.predict(ReconstructorBatch(left_ids, left_mask))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_loss_is_two_minus_two_cosines_and_reaches_head_and_adapter(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    reconstructor = randomised(tiny_llama, make_sidecar)
    vectors = torch.randn(len(TEXTS), tiny_llama.d_model) * 100
    loss = reconstructor.loss(vectors, TEXTS)
    expected = 2 - 2 * (unit(reconstructor.reconstruct(TEXTS)) * unit(vectors)).sum(dim=1)
    torch.testing.assert_close(loss.detach().double(), expected, atol=1e-4, rtol=1e-4)
    loss.mean().backward()
    parameters = reconstructor.trainable_parameters()
    assert "head.weight" in parameters and any("lora_A" in name for name in parameters)
    assert all(float(p.grad.abs().sum()) > 0 for p in parameters.values() if p.grad is not None)
    assert all(p.grad is not None for p in parameters.values())


def test_training_a_full_copy_never_changes_the_subject(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    before = {name: tensor.clone() for name, tensor in tiny_llama.model.state_dict().items()}
    reconstructor = Reconstructor.from_subject(
        tiny_llama, LAYER, make_sidecar(tiny_llama, "ar", LAYER), own_weights=True
    )
    reconstructor.loss(torch.randn(1, tiny_llama.d_model), ["words"]).mean().backward()
    torch.optim.SGD(reconstructor.trainable_parameters().values(), lr=1.0).step()
    after = tiny_llama.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_adapters_and_full_weights_come_back_with_their_head(
    tiny_llama: Subject, make_sidecar: MakeSidecar, tmp_path: Path
) -> None:
    full = Reconstructor.from_subject(
        tiny_llama, LAYER, make_sidecar(tiny_llama, "ar", LAYER), own_weights=True
    )
    with torch.no_grad():
        for parameter in full.trainable_parameters().values():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    for name, reconstructor in (("full", full), ("adapted", randomised(tiny_llama, make_sidecar))):
        reconstructor.save(tmp_path / name)
        for merge in (True, False):
            back = Reconstructor.load(tmp_path / name, tiny_llama, merge=merge)
            torch.testing.assert_close(
                back.reconstruct(TEXTS), reconstructor.reconstruct(TEXTS), atol=1e-3, rtol=1e-3
            )
            assert not back.trainable_parameters()
        again = Reconstructor.load(tmp_path / name, tiny_llama, trainable=True)
        assert again.trainable_parameters().keys() == reconstructor.trainable_parameters().keys()


def test_a_foreign_heads_single_matrix_is_taken_whatever_its_name(
    tiny_llama: Subject, make_sidecar: MakeSidecar, tmp_path: Path
) -> None:
    reconstructor = randomised(tiny_llama, make_sidecar)
    reconstructor.save(tmp_path)
    weight = next(reconstructor.head.parameters()).detach()
    save_file({"value_head.linear.weight": weight.contiguous()}, tmp_path / "value_head.safetensors")
    back = Reconstructor.load(tmp_path, tiny_llama)
    torch.testing.assert_close(
        back.reconstruct(["a"]), reconstructor.reconstruct(["a"]), atol=1e-4, rtol=1e-4
    )
    save_file({"weight": weight * float("nan")}, tmp_path / "value_head.safetensors")
    with pytest.raises(PairError, match="NaN"):
        Reconstructor.load(tmp_path, tiny_llama)
    save_file({"weight": torch.eye(7)}, tmp_path / "value_head.safetensors")
    with pytest.raises(PairError, match="7, 7"):
        Reconstructor.load(tmp_path, tiny_llama)
    (tmp_path / "value_head.safetensors").unlink()
    with pytest.raises(PairError, match="missing"):
        Reconstructor.load(tmp_path, tiny_llama)


def test_a_sidecar_without_suffix_ids_gets_them_from_its_template(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    sidecar = make_sidecar(tiny_llama, "ar", LAYER)
    assert sidecar.tokens is not None
    bare = sidecar.model_copy(update={"tokens": sidecar.tokens.model_copy(update={"ar_suffix_ids": ()})})
    assert Reconstructor.from_subject(tiny_llama, LAYER, bare).sidecar.tokens == sidecar.tokens


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_explanation_without_a_word_is_refused(
    tiny_llama: Subject, make_sidecar: MakeSidecar, text: str
) -> None:
    with pytest.raises(TextError, match="empty"):
        untrained(tiny_llama, make_sidecar).reconstruct(["fine", text])


def test_no_texts_and_endless_texts_are_refused(tiny_llama: Subject, make_sidecar: MakeSidecar) -> None:
    reconstructor = untrained(tiny_llama, make_sidecar)
    with pytest.raises(TextError, match="No texts"):
        reconstructor.reconstruct([])
    with pytest.raises(TextError, match="512"):
        reconstructor.reconstruct(["word " * 600])


def test_suffix_ids_of_another_tokenizer_are_refused(tiny_llama: Subject, make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar(tiny_llama, "ar", LAYER)
    assert sidecar.tokens is not None
    wrong = sidecar.tokens.model_copy(update={"ar_suffix_ids": (1, 2, 3)})
    with pytest.raises(SidecarError):
        Reconstructor.from_subject(tiny_llama, LAYER, sidecar.model_copy(update={"tokens": wrong}))


def test_on_the_real_model_it_equals_the_whole_models_hidden_states(
    smollm2: Subject, make_sidecar: MakeSidecar
) -> None:
    reconstructor = untrained(smollm2, make_sidecar, 20)
    found = unit(reconstructor.reconstruct(TEXTS[:2]))
    for row, text in enumerate(TEXTS[:2]):
        ids = ar_prompt_ids(reconstructor.sidecar, smollm2.tokenizer, text)
        expected = unit(block_output(smollm2, ids, 20)[-1].float())
        assert float((found[row] * expected).sum()) > 0.999
