from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nla.conftest import MakeSidecar
from torch import nn

from dragoman.errors import FetchError, PairError, SidecarError, TextError, VectorError
from dragoman.nla import Decoding, Pair, Reconstructor, Verbalizer, adapters, load_pair, save_pair
from dragoman.nla.pair import check_belong_together
from dragoman.nla.sources import resolve_folder, zoo_names
from dragoman.subjects import Subject

LAYER = 2
SHORT = Decoding(max_new_tokens=6)


def halves(subject: Subject, make_sidecar: MakeSidecar, **own: Any) -> tuple[Verbalizer, Reconstructor]:
    verbalizer = Verbalizer.from_subject(subject, make_sidecar(subject, "av", LAYER, **own))
    reconstructor = Reconstructor.from_subject(subject, LAYER, make_sidecar(subject, "ar", LAYER))
    for model in (verbalizer.model, reconstructor.backbone.text_model):
        for parameter in adapters.attach_lora(model, rank=2, alpha=4.0):
            nn.init.normal_(parameter, std=0.05)
    return verbalizer, reconstructor


@pytest.fixture
def pair(tiny_llama: Subject, make_sidecar: MakeSidecar) -> Pair:
    return Pair(*halves(tiny_llama, make_sidecar), name="test")


def test_scores_are_those_of_cosine_mse_and_the_sidecars_baseline(pair: Pair) -> None:
    vectors, texts = torch.randn(3, pair.subject.d_model) * 50, ["one", "two three", "four"]
    scores = pair.score(vectors, texts)
    a, b = pair.reconstruct(texts).double(), vectors.double()
    cosines = (a * b).sum(1) / a.norm(dim=1) / b.norm(dim=1)
    torch.testing.assert_close(scores.cosine.double(), cosines, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(scores.mse.double(), 2 - 2 * cosines, atol=1e-4, rtol=1e-4)
    assert scores.fve is not None
    torch.testing.assert_close(scores.fve.double(), 1 - (2 - 2 * cosines) / 0.8, atol=1e-4, rtol=1e-4)


def test_without_a_baseline_there_is_no_fve(tiny_llama: Subject, make_sidecar: MakeSidecar) -> None:
    verbalizer, reconstructor = halves(tiny_llama, make_sidecar, baseline=None)
    vectors = torch.randn(1, tiny_llama.d_model)
    assert Pair(verbalizer, reconstructor).score(vectors, ["a"]).fve is not None, "the AR's sidecar has one"
    reconstructor.sidecar = reconstructor.sidecar.model_copy(update={"baseline": None})
    assert Pair(verbalizer, reconstructor).score(vectors, ["a"]).fve is None


def test_explanations_come_scored_as_score_says(pair: Pair) -> None:
    vectors = torch.randn(3, pair.subject.d_model)
    for row, explanation in enumerate(pair.explain(vectors, SHORT)):
        if explanation.text:
            scores = pair.score(vectors[row : row + 1], [explanation.text])
            assert explanation.cosine == pytest.approx(float(scores.cosine[0]), abs=1e-5)
            assert explanation.mse == pytest.approx(float(scores.mse[0]), abs=1e-5)
    assert all(e.cosine is None and e.fve is None for e in pair.explain(vectors, SHORT, score=False))


def test_progress_tells_of_the_words_and_then_of_their_scores(pair: Pair) -> None:
    seen: list[tuple[int, int, str]] = []
    said = pair.explain(torch.randn(3, pair.subject.d_model), SHORT, progress=lambda *args: seen.append(args))
    texts = sum(bool(explanation.text) for explanation in said)
    assert texts and seen == [(3, 3, "vectors"), (texts, texts, "texts")]


def test_best_of_keeps_the_candidate_that_scores_best(pair: Pair) -> None:
    vectors = torch.randn(2, pair.subject.d_model)
    decoding = Decoding(temperature=1.5, max_new_tokens=6, best_of=4, seed=3)
    chosen = pair.explain(vectors, decoding)
    candidates = pair.verbalizer.sample(vectors, 4, decoding)
    for row, explanation in enumerate(chosen):
        texts = [candidate.text for candidate in candidates[row]]
        cosines = [float(pair.score(vectors[row : row + 1], [t]).cosine[0]) if t else 0.0 for t in texts]
        assert explanation.text == texts[cosines.index(max(cosines))]
        assert explanation.cosine == pytest.approx(max(cosines), abs=1e-5)
    one = pair.explain(vectors, Decoding(temperature=1.5, max_new_tokens=6, seed=3))
    assert [e.text for e in one] == [row[0].text for row in candidates], "more candidates keep the first"


def test_an_answer_without_a_word_counts_as_an_unrelated_direction(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    eos = pair.subject.tokenizer.eos_token_id
    everything_else = [i for i in range(pair.subject.vocab_size) if i != eos]
    monkeypatch.setattr(pair.verbalizer, "suppressed_ids", lambda: everything_else)
    (explanation,) = pair.explain(torch.randn(1, pair.subject.d_model), SHORT)
    assert explanation.token_ids == [eos] and explanation.text == ""
    assert (explanation.cosine, explanation.mse) == (0.0, 2.0)
    assert explanation.fve == pytest.approx(1 - 2.0 / 0.8)


def test_bad_vectors_and_texts_are_refused(pair: Pair) -> None:
    good = torch.randn(2, pair.subject.d_model)
    for bad in (good[:0], [], good[:, :5], good * float("nan")):
        with pytest.raises(VectorError):
            pair.explain(bad)
        with pytest.raises(VectorError):
            pair.score(bad, ["a", "b"])
    with pytest.raises(TextError, match="1 texts for 2 vectors"):
        pair.score(good, ["a"])
    with pytest.raises(TextError, match="empty"):
        pair.score(good, ["a", ""])


def test_one_vector_numpy_arrays_and_other_dtypes_are_taken(pair: Pair) -> None:
    vector = torch.randn(pair.subject.d_model)
    texts = {pair.explain(v, SHORT)[0].text for v in (vector, vector[None].numpy(), vector.double())}
    assert len(texts) == 1


@pytest.mark.parametrize("merge", [True, False])
def test_a_saved_pair_comes_back_whole(pair: Pair, tmp_path: Path, merge: bool) -> None:
    folder = save_pair(
        tmp_path / "p", pair.verbalizer, pair.reconstructor, extra={"n": 3}, texts={"README.md": "card"}
    )
    described = json.loads((folder / "pair.json").read_text())
    assert described["schema"] == "dragoman/pair/1" and described["n"] == 3
    assert described["subject"]["fingerprint"] == pair.subject.fingerprint
    assert (folder / "README.md").read_text() == "card"
    back = load_pair(folder, pair.subject, merge=merge)
    vectors = torch.randn(2, pair.subject.d_model)
    assert [e.text for e in back.explain(vectors, SHORT)] == [e.text for e in pair.explain(vectors, SHORT)]
    torch.testing.assert_close(back.reconstruct(["x"]), pair.reconstruct(["x"]), atol=1e-4, rtol=1e-3)
    assert back.layer_index == LAYER and back.name == str(folder)
    parts = load_pair(subject=pair.subject, av=folder / "av", ar=folder / "ar")
    torch.testing.assert_close(parts.reconstruct(["x"]), back.reconstruct(["x"]), atol=1e-4, rtol=1e-3)


def test_a_pair_that_cannot_be_written_leaves_the_old_one(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_pair(tmp_path / "p", pair.verbalizer, pair.reconstructor)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def fail(_folder: Path) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr(pair.reconstructor, "save", fail)
    with pytest.raises(OSError, match="went away"):
        save_pair(folder, pair.verbalizer, pair.reconstructor)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_halves_of_different_layers_widths_or_models_are_refused(
    tiny_llama: Subject, make_sidecar: MakeSidecar
) -> None:
    verbalizer, _ = halves(tiny_llama, make_sidecar)
    other = Reconstructor.from_subject(tiny_llama, 1, make_sidecar(tiny_llama, "ar", 1))
    with pytest.raises(PairError, match=r"layer_index is 2.*1"):
        Pair(verbalizer, other)
    _, reconstructor = halves(tiny_llama, make_sidecar)
    extraction = reconstructor.sidecar.extraction.model_copy(update={"base_model": "someone-else"})
    reconstructor.sidecar = reconstructor.sidecar.model_copy(update={"extraction": extraction})
    with pytest.raises(PairError, match="someone-else"):
        Pair(verbalizer, reconstructor)


def test_halves_in_each_others_place_are_refused(tiny_llama: Subject, make_sidecar: MakeSidecar) -> None:
    av, ar = (make_sidecar(tiny_llama, role, LAYER) for role in ("av", "ar"))
    for first, second in ((ar, ar), (av, av)):
        with pytest.raises(PairError, match="role"):
            check_belong_together(first, second)
    check_belong_together(av, ar.model_copy(update={"role": None}))


def test_another_subject_than_the_one_trained_on_is_refused(pair: Pair, tmp_path: Path) -> None:
    folder = save_pair(tmp_path / "p", pair.verbalizer, pair.reconstructor)
    path = folder / "pair.json"
    path.write_text(path.read_text().replace(pair.subject.fingerprint, "0" * 64))
    with pytest.raises(PairError, match="0000"):
        load_pair(folder, pair.subject)


@pytest.mark.parametrize("text", ["", "[1]", '{"subject": 3}', "[" * 100_000])
def test_a_damaged_description_is_refused(pair: Pair, tmp_path: Path, text: str) -> None:
    folder = save_pair(tmp_path / "p", pair.verbalizer, pair.reconstructor)
    (folder / "pair.json").write_text(text)
    with pytest.raises(PairError, match=re.escape("pair.json")):
        load_pair(folder, pair.subject)


def test_incomplete_folders_and_specs_name_what_is_missing(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(PairError, match="no folder"):
        load_pair(tmp_path / "nowhere", pair.subject)
    with pytest.raises(PairError, match="no folder av"):
        load_pair(tmp_path, pair.subject)
    with pytest.raises(PairError, match="No ar was given"):
        load_pair(subject=pair.subject, av=tmp_path)
    folder = save_pair(tmp_path / "p", pair.verbalizer, pair.reconstructor)
    (folder / "ar" / "nla_meta.yaml").unlink()
    with pytest.raises(SidecarError):
        load_pair(folder, pair.subject)


@pytest.mark.parametrize("name", ["nobody", "../nla", "/etc", ""])
def test_an_unknown_zoo_name_lists_the_known_ones_and_is_never_a_path(name: str) -> None:
    with pytest.raises(PairError) as caught:
        resolve_folder(f"zoo:{name}")
    assert str(zoo_names()) in str(caught.value)


@pytest.mark.parametrize("name", ["", "x", "a/b/c", "../x", "a/b@", "a b/c"])
def test_names_that_are_no_hub_names_are_refused_before_any_request(name: str) -> None:
    with pytest.raises(PairError, match="hub name"):
        resolve_folder(f"hf:{name}")


def test_whatever_http_client_the_hub_uses_its_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("httpx", "httpx2"):
        kind = type("ReadTimeout", (Exception,), {"__module__": f"{library}._exceptions"})

        def fail(*_: Any, kind: type[Exception] = kind, **__: Any) -> None:
            raise kind("slow")

        monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
        with pytest.raises(FetchError, match="ReadTimeout: slow"):
            resolve_folder("hf:nobody/there")


def test_an_unreachable_hub_is_one_paragraph_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match="folder") as caught:
        resolve_folder("hf:nobody/there@main")
    assert "\n" not in str(caught.value)
