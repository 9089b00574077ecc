"""The sidecar read and written in all its spellings; keys that are not ours are kept."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from tests.sidecar.examples import (
    AR_TEMPLATE,
    AV_TEMPLATE,
    CRITIC_V1,
    DATASET_V1,
    RELEASED,
    a_sidecar,
    released_yaml,
    write,
)

from dragoman.errors import SidecarError
from dragoman.sidecar import (
    Baseline,
    Extraction,
    Templates,
    Tokens,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)

# ---------------------------------------------------------------- reading what exists


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_verbalizers_are_read(tmp_path: Path, name: str) -> None:
    layer, width, scale, char, token, left, right, _ = RELEASED[name]
    sidecar = read_sidecar(write(tmp_path, released_yaml(name, "av")).parent)
    assert (sidecar.kind, sidecar.role, sidecar.d_model) == ("nla_model", "av", width)
    assert sidecar.extraction.layer_index == layer
    assert sidecar.extraction.base_model == name
    assert sidecar.extraction.injection_scale == scale
    assert sidecar.extraction.mse_scale == pytest.approx(math.sqrt(width))
    assert sidecar.require_tokens() == Tokens(
        injection_char=char,
        injection_token_id=token,
        injection_left_neighbor_id=left,
        injection_right_neighbor_id=right,
    )
    assert "<concept>{injection_char}</concept>" in sidecar.require_template("av")


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_reconstructors_are_read(tmp_path: Path, name: str) -> None:
    layer, *_, suffix = RELEASED[name]
    sidecar = read_sidecar(write(tmp_path, released_yaml(name, "ar")))
    assert sidecar.role == "ar"
    assert (sidecar.ar_layer_index, sidecar.extraction.layer_index) == (layer, layer)
    assert sidecar.require_tokens().ar_suffix_ids == tuple(suffix)
    assert sidecar.require_template("ar") == AR_TEMPLATE


def test_a_version_1_dataset_with_actor_and_critic_is_read_beside_its_parquet(tmp_path: Path) -> None:
    write(tmp_path, DATASET_V1, "ar_sft.parquet.nla_meta.yaml")
    sidecar = read_sidecar(tmp_path / "ar_sft.parquet")
    assert (sidecar.kind, sidecar.schema_version, sidecar.d_model) == ("nla_dataset", 1, 3584)
    assert sidecar.prompt_templates == Templates(
        av="<concept>{injection_char}</concept>", ar="<text>{explanation}</text> <summary>"
    )
    assert "injection_scale" not in sidecar.extraction.model_fields_set


def test_a_version_1_critic_spells_its_layer_num_hidden_layers(tmp_path: Path) -> None:
    sidecar = read_sidecar(write(tmp_path, CRITIC_V1))
    assert (sidecar.role, sidecar.ar_layer_index, sidecar.extraction.layer_index) == ("ar", 20, 20)
    assert sidecar.extraction.mse_scale == "sqrt_d_model"


def test_a_dataset_of_bare_vectors_needs_no_tokens(tmp_path: Path) -> None:
    text = "kind: nla_dataset\nextraction: {base_model: m, d_model: 8, layer_index: 2, norm: none}\n"
    sidecar = read_sidecar(write(tmp_path, text))
    assert sidecar.tokens is None
    with pytest.raises(SidecarError, match="The sidecar has no tokens"):
        sidecar.require_tokens()
    with pytest.raises(SidecarError, match=r"prompt_templates\.ar"):
        sidecar.require_template("ar")


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        ("150", 150.0),
        ("1.5e+2", 150.0),
        ("8e4", 80000.0),
        ("null", None),
        ("raw", None),
        ("sqrt_d_model", "sqrt_d_model"),
    ],
)
def test_a_scale_may_be_a_number_in_any_spelling_or_raw_or_a_word(tmp_path, spelling, value) -> None:
    text = released_yaml("Qwen/Qwen2.5-7B-Instruct", "av").replace(
        "injection_scale: 150.0", f"injection_scale: {spelling}"
    )
    extraction = read_sidecar(write(tmp_path, text)).extraction
    assert extraction.injection_scale == value
    assert "injection_scale" in extraction.model_fields_set


def test_where_a_sidecar_stands() -> None:
    assert sidecar_path("new-folder") == Path("new-folder/nla_meta.yaml")
    assert sidecar_path("a/x.parquet") == Path("a/x.parquet.nla_meta.yaml")
    assert sidecar_path("a/x.npy") == Path("a/x.npy.nla_meta.yaml")
    assert sidecar_path("a/nla_meta.yaml") == Path("a/nla_meta.yaml")


# ---------------------------------------------------------------- writing, and keeping what is not ours


def test_unknown_keys_stay_in_their_place_through_reading_and_writing(tmp_path: Path) -> None:
    for number, text in enumerate([DATASET_V1, CRITIC_V1, *(released_yaml(n, "ar") for n in RELEASED)]):
        original = yaml.safe_load(text)
        original["extraction"]["probe"] = {"a": [1, {"b": None}]}
        original["tokens"]["note"] = "ours"
        original["prompt_templates"]["judge"] = "{explanation}?"
        source = write(tmp_path, yaml.safe_dump(original), f"{number}.yaml")
        written = yaml.safe_load(
            write_sidecar(tmp_path / f"{number}-out.yaml", read_sidecar(source)).read_text()
        )
        assert written["extraction"]["probe"] == {"a": [1, {"b": None}]}
        assert written["tokens"]["note"] == "ours"
        assert written["prompt_templates"]["judge"] == "{explanation}?"
        for key in original.keys() - {"schema_version", "role", "critic"}:
            if not isinstance(original[key], dict):
                assert written[key] == original[key], key
    assert yaml.safe_load((tmp_path / "1-out.yaml").read_text())["critic"] == {
        "extraction_layer_index": 20,
        "head": "linear",
    }


@pytest.mark.parametrize(
    "text",
    [DATASET_V1, CRITIC_V1, *(released_yaml(name, role) for name in RELEASED for role in ("av", "ar"))],
)
def test_reading_what_was_written_gives_the_same_sidecar(tmp_path: Path, text: str) -> None:
    first = read_sidecar(write(tmp_path, text))
    second = read_sidecar(write_sidecar(tmp_path / "again.yaml", first))
    assert second == first.model_copy(update={"schema_version": 2})
    assert second.extraction.model_fields_set >= {"layer_index"}
    assert ("injection_scale" in second.extraction.model_fields_set) == (
        "injection_scale" in first.extraction.model_fields_set
    )


def test_our_own_keys_survive_and_stand_at_the_top_level(tmp_path: Path) -> None:
    sidecar = a_sidecar(
        baseline=Baseline(raw_variance=0.73, normalised_mean=0.94, n=2000),
        score_threshold=0.0,
        norm_quantiles={"p001": 10.5, "p50": 230.0, "p999": 900.0},
        max_new_tokens=64,
        provenance={"seed": 3, "created": "2026-11-30"},
    )
    write_sidecar(tmp_path, sidecar)
    assert read_sidecar(tmp_path) == sidecar
    document = yaml.safe_load((tmp_path / "nla_meta.yaml").read_text())
    assert document["system_prompt"] == ""
    assert document["baseline"]["n"] == 2000
    assert set(document["tokens"]) == {
        "injection_char", "injection_token_id", "injection_left_neighbor_id", "injection_right_neighbor_id",
        "critic_suffix_ids",
    }  # fmt: skip


def test_a_model_is_written_in_both_families_as_the_release_reads_it(tmp_path: Path) -> None:
    document = yaml.safe_load(write_sidecar(tmp_path, a_sidecar(ar_layer_index=20)).read_text())
    assert document["schema_version"] == 2
    assert document["d_model"] == 576
    assert document["extraction"]["injection_scale"] == 250.0
    templates = document["prompt_templates"]
    assert templates == {"av": AV_TEMPLATE, "actor": AV_TEMPLATE, "ar": AR_TEMPLATE, "critic": AR_TEMPLATE}
    assert document["critic"] == {"extraction_layer_index": 20}
    assert document["extraction_layer_index"] == 20


def test_a_dataset_is_written_as_the_release_unpacks_it_into_its_dataclasses(tmp_path: Path) -> None:
    sidecar = a_sidecar(kind="nla_dataset", role=None)
    document = yaml.safe_load(write_sidecar(tmp_path / "av_sft.parquet", sidecar).read_text())
    assert (tmp_path / "av_sft.parquet.nla_meta.yaml").exists()
    assert set(document["extraction"]) == {"base_model", "d_model", "layer_index", "norm"}
    assert set(document["prompt_templates"]) == {"actor", "critic"}
    assert document["injection_scale"] == 250.0
    assert read_sidecar(tmp_path / "av_sft.parquet") == sidecar


def test_a_scale_that_was_never_stated_is_not_written_as_raw(tmp_path: Path) -> None:
    sidecar = a_sidecar(extraction=Extraction(layer_index=20))
    document = yaml.safe_load(write_sidecar(tmp_path, sidecar).read_text())
    assert "injection_scale" not in document["extraction"]
    explicit = a_sidecar(extraction=Extraction(layer_index=20, injection_scale=None))
    document = yaml.safe_load(write_sidecar(tmp_path, explicit).read_text())
    assert document["extraction"]["injection_scale"] is None


def test_a_sidecar_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="frozen"):
        a_sidecar().d_model = 3  # pyright: ignore[reportAttributeAccessIssue]
