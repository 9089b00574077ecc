"""The whole way on a tiny subject: corpora → sets → both halves → refit → pair folder → reading."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from dragoman.errors import ConfigError, InjectionError, RunError, SidecarError
from dragoman.nla import Decoding, load_pair
from dragoman.training import PairTraining, read_config

CONFIG = """
subject: {subject}
layer_index: 2
output: {output}
data:
  corpora: [{{name: news-sample, limit: 60}}]
  positions_per_passage: 3
  max_tokens: 80
  fractions: {{av_sft: 0.4, ar_sft: 0.3, calibration: 0.15, test: 0.15}}
max_new_tokens: 12
verbalizer: {{rank: 4, examples: 24, batch_size: 4, evaluate_every: 4, evaluate_rows: 12}}
reconstructor: {{rank: 4, examples: 48, batch_size: 8, evaluate_every: 4, evaluate_rows: 12}}
refit: {{samples: 16, examples: 16, batch_size: 4, evaluate_rows: 12}}
"""


@pytest.fixture(scope="module")
def tiny_folder(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("subject") / "tiny-llama"
    tiny_llama.model.save_pretrained(folder)
    tiny_llama.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tiny_folder, tmp_path_factory):
    work = tmp_path_factory.mktemp("pair")
    path = work / "pair.yaml"
    path.write_text(CONFIG.format(subject=tiny_folder, output=work / "run"), "utf-8")
    training = PairTraining(read_config(path), device="cpu")
    figures = {
        "verbalizer": training.train_verbalizer(),
        "reconstructor": training.train_reconstructor(),
        "refit": training.refit_reconstructor(),
    }
    return training, figures, training.assemble(), path


def test_each_stage_reports_its_held_out_figures_with_their_controls(trained):
    _, figures, _, _ = trained
    assert {"loss", "shuffled_loss", "gap", "content_gap", "rows"} == figures["verbalizer"].keys()
    assert {"fve", "fve_mean_direction", "shuffled_fve", "cosine", "mse", "rows"} == figures["refit"].keys()
    assert all(value == value for stage in figures.values() for value in stage.values())
    assert figures["verbalizer"]["gap"] == pytest.approx(
        figures["verbalizer"]["shuffled_loss"] - figures["verbalizer"]["loss"]
    )


def test_no_document_stands_in_two_splits(trained):
    training, _, _, _ = trained
    from dragoman.training.rows import read_rows

    documents = {name: set(read_rows(path).documents) for name, path in training.sets().items()}
    names = sorted(documents)
    assert len(names) == 4
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            assert not documents[name] & documents[other]


def test_the_pair_folder_opens_and_reads_and_carries_its_provenance(trained):
    training, _, folder, _ = trained
    pair = load_pair(folder, device="cpu")
    vectors = torch.randn(3, training.subject.d_model)
    explanations = pair.explain(vectors, Decoding(max_new_tokens=8))
    assert len(explanations) == 3
    assert pair.sidecar.baseline is not None and pair.sidecar.baseline.n > 20
    assert pair.sidecar.score_threshold is not None
    described = json.loads((folder / "pair.json").read_text())
    assert described["training"]["refit"]["finished"]["steps"] == 4
    assert described["calibration"]["n_real"] > 0
    assert read_config(folder / "train.yaml") == training.config


def test_finished_stages_are_not_repeated(trained):
    _, figures, _, path = trained
    again = PairTraining(read_config(path), device="cpu")
    assert again.train_verbalizer() == figures["verbalizer"]
    assert again.refit_reconstructor() == figures["refit"]
    assert again._subject is None, "nothing had to be loaded to know that the stages are finished"


def test_a_stage_of_another_config_is_refused_by_its_first_differing_key(trained):
    _, _, _, path = trained
    other = path.with_name("other.yaml")
    other.write_text(path.read_text().replace("examples: 24", "examples: 28"), "utf-8")
    with pytest.raises(RunError, match=r"examples"):
        PairTraining(read_config(other), device="cpu").train_verbalizer()


def test_a_refit_before_its_stages_are_finished_is_refused(trained, tmp_path):
    training, _, _, path = trained
    shutil.copytree(training.output / "data", tmp_path / "run" / "data")
    with pytest.raises(ConfigError, match="no finished verbalizer"):
        PairTraining(read_config(path), output=tmp_path / "run", device="cpu").refit_reconstructor()


def test_full_fine_tuning_changes_the_copy_and_never_the_subject(trained, tmp_path):
    training, _, _, path = trained
    full = tmp_path / "full.yaml"
    full.write_text(
        path.read_text().replace("verbalizer: {rank: 4", "verbalizer: {method: full, learning_rate: 1.0e-3"),
        "utf-8",
    )
    shutil.copytree(training.output / "data", tmp_path / "run" / "data")
    other = PairTraining(read_config(full), output=tmp_path / "run", device="cpu")
    before = {name: tensor.clone() for name, tensor in other.subject.model.state_dict().items()}
    other.train_verbalizer()
    assert all(torch.equal(before[name], tensor) for name, tensor in other.subject.model.state_dict().items())
    assert (tmp_path / "run" / "verbalizer" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "prompt", ["prompt: {marker: 'two words'}", "prompt: {av_template: 'no slot at all'}"]
)
def test_a_prompt_that_cannot_work_is_refused_before_any_vector_is_captured(trained, tmp_path, prompt):
    _, _, _, path = trained
    odd = tmp_path / "odd.yaml"
    odd.write_text(path.read_text() + prompt + "\n", "utf-8")
    training = PairTraining(read_config(odd), output=tmp_path / "run", device="cpu")
    with pytest.raises((ConfigError, InjectionError, SidecarError)):
        training.sets()
    assert not (tmp_path / "run" / "data").exists()
