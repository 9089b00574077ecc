"""The sidecar in all its spellings, hostile files included, and its check against a real tokenizer."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import DragomanError, SidecarError
from dragoman.sidecar import (
    Baseline,
    Extraction,
    Sidecar,
    Templates,
    Tokens,
    ar_prompt_ids,
    av_prompt_ids,
    compute_suffix_ids,
    marker_token_id,
    read_sidecar,
    render_template,
    sidecar_path,
    verify_tokens,
    write_sidecar,
)

AV_TEMPLATE = "Explain <concept>{injection_char}</concept>"
AR_TEMPLATE = "Summary of the following text: <text>{explanation}</text> <summary>"

RELEASED = {
    # name: (layer, d_model, injection_scale, marker, id, left, right, AR suffix)
    "Qwen/Qwen2.5-7B-Instruct": (20, 3584, 150.0, "㈎", 149705, 29, 522, [1318, 29, 366, 1708, 29]),
    "google/gemma-3-12b-it": (
        32, 3840, 80000.0, "㈜", 246566, 236813, 954, [1005, 236813, 655, 6011, 236813],
    ),
    "google/gemma-3-27b-it": (
        41, 5376, 60000.0, "㈜", 246566, 236813, 954, [1005, 236813, 655, 6011, 236813],
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (53, 8192, 30.0, "㎡", 105565, 29, 524, [1342, 29, 366, 1743, 29]),
}  # fmt: skip


def released_yaml(name: str, role: str) -> str:
    """The layout of the files on the hub: schema 2, av/ar templates, the layer at the top level."""
    layer, width, scale, char, token, left, right, suffix = RELEASED[name]
    av = role == "av"
    return f"""\
kind: nla_model
schema_version: 2
role: {role}
stage: rl
base_checkpoint: {name}
d_model: {width}
extraction:
  injection_scale: {scale if av else "null"}
  mse_scale: {math.sqrt(width)}
tokens:
  injection_char: {char}
  injection_token_id: {token}
  injection_left_neighbor_id: {left}
  injection_right_neighbor_id: {right}
  critic_suffix_ids: {"null" if av else suffix}
prompt_templates:
  av: |-
    You are a meticulous AI researcher. Here is the vector:

    <concept>{{injection_char}}</concept>

    Please provide an explanation.
  ar: 'Summary of the following text: <text>{{explanation}}</text> <summary>'
trained_on:
- corpus
parent_checkpoints:
- {name}
created_at: '2026-03-16T10:00:00+00:00'
created_by: nla.train_actor.NLAFSDPActor
training:
  rollout_id: 4199
{"" if av else f"critic: {{extraction_layer_index: {layer}}}"}
extraction_layer_index: {layer}
"""


DATASET_V1 = """\
dataset_id: qwen7b_L20_ar_sft
stage: ar_sft
row_count: 250000
extraction:
  base_model: Qwen/Qwen2.5-7B-Instruct
  d_model: 3584
  layer_index: 20
  norm: none
  corpus: ultrafineweb
  corpus_slice: {start: 0, length: 100000}
  positions_per_doc: 10
kind: nla_dataset
schema_version: 1
keep_debug_metadata: true
tokens:
  injection_char: "㈎"
  injection_token_id: 149705
  injection_left_neighbor_id: 29
  injection_right_neighbor_id: 522
  critic_suffix_ids: [1318, 29, 366, 1708, 29]
prompt_templates:
  actor: "<concept>{injection_char}</concept>"
  critic: "<text>{explanation}</text> <summary>"
parent_datasets: [qwen7b_L20_base]
git_commit: 3f31cf3
"""

CRITIC_V1 = """\
kind: nla_model
schema_version: 1
role: critic
d_model: 3584
extraction: {injection_scale: null, mse_scale: sqrt_d_model, base_model: Qwen/Qwen2.5-7B-Instruct}
tokens: {injection_char: "㈎", injection_token_id: 149705, injection_left_neighbor_id: 29,
         injection_right_neighbor_id: 522, critic_suffix_ids: [1318, 29, 366, 1708, 29]}
prompt_templates:
  actor: "<concept>{injection_char}</concept>"
  critic: "<text>{explanation}</text> <summary>"
critic: {num_hidden_layers: 20, head: linear}
"""


def write(folder: Path, text: str, name: str = "nla_meta.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def a_sidecar(**changes: Any) -> Sidecar:
    fields: dict[str, Any] = {
        "kind": "nla_model",
        "role": "av",
        "d_model": 576,
        "extraction": Extraction(layer_index=20, base_model="smollm2-135m", injection_scale=250.0),
        "tokens": Tokens(
            injection_char="<repo_name>",
            injection_token_id=3,
            injection_left_neighbor_id=46,
            injection_right_neighbor_id=9617,
        ),
        "prompt_templates": Templates(av=AV_TEMPLATE, ar=AR_TEMPLATE),
        "system_prompt": "",
    }
    return Sidecar(**{**fields, **changes})


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
    [("150", 150.0), ("1.5e+2", 150.0), ("8e4", 80000.0), ("null", None), ("raw", None), ("sqrt_d_model", "sqrt_d_model")],
)  # fmt: skip
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
    "text", [DATASET_V1, CRITIC_V1, *(released_yaml(n, r) for n in RELEASED for r in ("av", "ar"))]
)
def test_reading_what_was_written_gives_the_same_sidecar(tmp_path: Path, text: str) -> None:  # fmt: skip
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


# ---------------------------------------------------------------- refusing what is wrong or hostile

QWEN = released_yaml("Qwen/Qwen2.5-7B-Instruct", "av")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"is not a mapping"),
        ("- a\n- b\n", r"is not a mapping"),
        ("1: 2\n", r"is not a mapping of names"),
        ("kind: [\n", r"is not valid YAML"),
        (QWEN.replace("kind: nla_model", "kind: sae"), r"has kind = 'sae'.*'nla_model' or 'nla_dataset'"),
        (QWEN.replace("d_model: 3584\n", ""), r"has no d_model"),
        (QWEN.replace("d_model: 3584", "d_model: wide"), r"has d_model = 'wide'"),
        (QWEN.replace("schema_version: 2", "schema_version: 3"), r"has schema_version = 3"),
        (QWEN.replace("role: av", "role: judge"), r"has role = 'judge'"),
        (QWEN.replace("extraction_layer_index: 20", ""), r"states no layer.*extraction_layer_index"),
        (QWEN.replace("injection_scale: 150.0", "injection_scale: -1"), r"injection_scale.* = -1"),
        (QWEN.replace("injection_scale: 150.0", "injection_scale: .nan"), r"injection_scale.* = nan"),
        (QWEN.replace("injection_scale: 150.0", "injection_scale: true"), r"injection_scale = True"),
        (QWEN.replace("injection_scale: 150.0", "norm: l2"), r"has extraction\.norm = 'l2'.*'none'"),
        (QWEN.replace("tokens:\n", "tokens: 5\nx:\n"), r"has tokens = 5"),
        (QWEN.replace("token_id: 149705", "token_id: ㈎"), r"injection_token_id = '㈎'"),
        (QWEN + "d_model: 4096\n", r"the key 'd_model' stands twice"),
        (QWEN + "critic: {extraction_layer_index: yes}\n", r"ar_layer_index"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_key_and_its_value(tmp_path, text, message) -> None:
    with pytest.raises(SidecarError, match=message) as raised:
        read_sidecar(write(tmp_path, text))
    assert "nla_meta.yaml" in str(raised.value)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("extraction: {layer_index: 21}\n", r"extraction\.layer_index = 21 and extraction_layer_index = 20"),
        ("prompt_templates: {av: x, actor: y}\n", r"prompt_templates\.av = 'x' and prompt_templates\.actor = 'y'"),
        ("tokens: {critic_suffix_ids: [1], ar_suffix_ids: [2]}\n", r"critic_suffix_ids = \[1\] and tokens\.ar"),
    ],
)  # fmt: skip
def test_two_spellings_of_one_thing_that_disagree_are_refused(tmp_path, added, message) -> None:
    document = yaml.safe_load(QWEN)
    for section, values in yaml.safe_load(added).items():
        document[section].update(values)
    with pytest.raises(SidecarError, match=message):
        read_sidecar(write(tmp_path, yaml.safe_dump(document)))


def test_two_spellings_that_agree_are_fine(tmp_path: Path) -> None:
    document = yaml.safe_load(QWEN)
    document["extraction"] |= {"layer_index": 20, "d_model": 3584}
    document["prompt_templates"]["actor"] = document["prompt_templates"]["av"]
    assert read_sidecar(write(tmp_path, yaml.safe_dump(document))).extraction.layer_index == 20


def test_a_missing_sidecar_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match=r"no readable sidecar at .*v\.parquet\.nla_meta\.yaml"):
        read_sidecar(tmp_path / "v.parquet")


def billion_laughs() -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    return "\n".join(lines) + "\n"


def merged_laughs() -> str:
    lines = ["a0: &a0 {k: v}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (QWEN + billion_laughs(), "expands to more than"),
        (QWEN + merged_laughs(), "expands to more than"),
        (QWEN + "loop: &loop [*loop]\n", "alias to something that contains it"),
        (QWEN + "deep: " + "[" * 100 + "]" * 100 + "\n", "nested more than"),
        (QWEN + "deep: " + "[" * 20_000 + "]" * 20_000 + "\n", "nested"),
        (QWEN + "long: [" + "1, " * 30_000 + "1]\n", "holds more than"),
        (QWEN + "# " + "x" * (1 << 20) + "\n", "larger than 1 MiB"),
        (QWEN + "number: " + "9" * 10_000 + "\n", "is not valid YAML"),
        (QWEN + "when: 2026-99-99\n", "is not valid YAML"),
        (QWEN + "run: !!python/object/apply:os.system ['touch executed']\n", "is not valid YAML"),
        (QWEN + "a: 1\n---\nb: 2\n", "is not valid YAML"),
        (QWEN + "bad: \x01\n", "is not valid YAML"),
    ],
)
def test_hostile_yaml_is_refused_at_once_and_nothing_in_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, text)
    started = time.perf_counter()
    with pytest.raises(SidecarError, match=message):
        read_sidecar(path)
    assert time.perf_counter() - started < 10
    assert not (tmp_path / "executed").exists()


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "nla_meta.yaml").write_bytes(b"kind: \xff\xfe")
    with pytest.raises(SidecarError, match="is not UTF-8 text"):
        read_sidecar(tmp_path)


def test_an_alias_that_two_keys_share_is_read_and_written_out_in_full(tmp_path: Path) -> None:
    shared = ["Qwen/Qwen2.5-7B-Instruct"]
    text = yaml.safe_dump(yaml.safe_load(QWEN) | {"trained_on": shared, "parent_checkpoints": shared})
    assert "&id001" in text
    written = write_sidecar(tmp_path / "out.yaml", read_sidecar(write(tmp_path, text))).read_text()
    assert "&" not in written
    assert yaml.safe_load(written)["parent_checkpoints"] == shared


@given(st.binary(max_size=300))
def test_no_bytes_whatever_raise_anything_but_a_sidecar_error(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "nla_meta.yaml"
    path.write_bytes(content)
    with pytest.raises(SidecarError):
        read_sidecar(path)


def test_a_sidecar_is_read_without_torch_or_transformers(tmp_path: Path) -> None:
    write(tmp_path, QWEN)
    source = (
        "import sys; from dragoman.sidecar import read_sidecar; print(read_sidecar(sys.argv[1]).d_model, "
        "sorted({'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert finished.stdout.strip() == "3584 []", finished.stderr


# ---------------------------------------------------------------- templates


@pytest.mark.parametrize(
    "literal",
    ["{0.__class__}", "{}", "{{}}", "{{{", "}", "{injection_char.__class__}", "{injection_char!r}", "{ injection_char }",
     "{explanation:>99999999}", '{"json": {"a": 1}}', "%s", "$injection_char", "\\1", "\\g<0>"],
)  # fmt: skip
def test_any_other_text_in_braces_stays_literal(literal: str) -> None:
    assert render_template(f"a {literal} b {{injection_char}}", injection_char="㈎") == f"a {literal} b ㈎"


def test_double_braces_around_a_slot_are_not_an_escape() -> None:
    assert render_template("{{injection_char}}", injection_char="x") == "{x}"


def test_slots_that_stand_side_by_side_are_replaced_in_one_pass() -> None:
    assert (
        render_template(
            "{injection_char}{explanation}{injection_char}",
            injection_char="{explanation}",
            explanation="{injection_char}",
        )
        == "{explanation}{injection_char}{explanation}"
    )


def test_a_slot_that_is_not_given_stays_as_it_is() -> None:
    assert render_template("{explanation} {injection_char}", explanation="e") == "e {injection_char}"


@given(st.lists(st.text(alphabet="{}!:.[]_0ax\\", max_size=12)), st.text(), st.text())
def test_rendering_is_splitting_at_the_slots_and_joining_again(
    pieces: list[str], marker: str, explanation: str
) -> None:
    # Pieces that would spell a slot together with a neighbour are no independent formulation.
    slots = ["{injection_char}", "{explanation}"]
    template, expected = "", ""
    for number, piece in enumerate(pieces):
        template += piece + slots[number % 2]
        expected += piece + (marker, explanation)[number % 2]
    assert render_template(template, injection_char=marker, explanation=explanation) == expected


# ---------------------------------------------------------------- the real tokenizer


@pytest.fixture
def tokenizer(smollm2) -> Any:
    return smollm2.tokenizer


def test_the_canonical_prompt_has_the_marker_once_with_its_neighbours_in_24_tokens(tokenizer) -> None:
    sidecar = a_sidecar()
    ids = av_prompt_ids(sidecar, tokenizer)
    assert len(ids) <= 24
    assert ids.count(3) == 1
    place = ids.index(3)
    assert (ids[place - 1], ids[place + 1]) == (46, 9617)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nExplain <concept><repo_name></concept><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    verify_tokens(sidecar, tokenizer)


def test_the_prompt_is_what_apply_chat_template_gives_where_the_tokenizer_keeps_the_marker(tokenizer) -> None:
    sidecar = a_sidecar(system_prompt=None)
    content = AV_TEMPLATE.replace("{injection_char}", "<repo_name>")
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert av_prompt_ids(sidecar, tokenizer) == list(expected)


def test_no_system_prompt_leaves_it_to_the_chat_template_and_an_empty_one_is_sent(tokenizer) -> None:
    default = tokenizer.decode(av_prompt_ids(a_sidecar(system_prompt=None), tokenizer))
    assert "You are a helpful AI assistant named SmolLM" in default
    assert "named SmolLM" not in tokenizer.decode(av_prompt_ids(a_sidecar(system_prompt=""), tokenizer))
    assert "system\nBe brief<" in tokenizer.decode(
        av_prompt_ids(a_sidecar(system_prompt="Be brief"), tokenizer)
    )


def with_tokens(**changes: Any) -> Sidecar:
    sidecar = a_sidecar()
    return sidecar.model_copy(update={"tokens": sidecar.require_tokens().model_copy(update=changes)})


@pytest.mark.parametrize(
    ("sidecar", "message"),
    [
        (with_tokens(injection_char="㈎"), r"'㈎' becomes \d tokens \[.*the one token 3 of the sidecar"),
        (with_tokens(injection_char="two words"), r"becomes 2 tokens"),
        (with_tokens(injection_token_id=4), r"'<repo_name>' is the token 3 .*the one token 4 of the sidecar"),
        (with_tokens(injection_left_neighbor_id=1), r"left neighbour is the token 46.*the token 1 of"),
        (with_tokens(injection_right_neighbor_id=1), r"right neighbour is the token 9617.*the token 1 of"),
        (with_tokens(ar_suffix_ids=(1, 2, 3)), r"end in the tokens \[2692.*suffix ids \[1, 2, 3\]"),
        (with_tokens(injection_char="<|endoftext|>", injection_token_id=0), r"is unknown \(UNK, token 0\)"),
        (a_sidecar(tokens=None), r"has no tokens"),
        (a_sidecar(prompt_templates=Templates(ar=AR_TEMPLATE)), r"has no prompt_templates\.av"),
        (a_sidecar(prompt_templates=Templates(av="no slot")), r"'no slot' has no slot \{injection_char\}"),
        (
            a_sidecar(prompt_templates=Templates(av="<a>{injection_char}</a> <b>{injection_char}</b>")),
            r"stands 2 times in the canonical prompt.*exactly once",
        ),
        (a_sidecar(extraction=Extraction(layer_index=20)), r"no extraction\.injection_scale"),
        (
            a_sidecar(extraction=Extraction(layer_index=2, injection_scale=1.0).model_copy(update={"norm": "l2"})),
            r"norm 'l2'",
        ),
    ],
)  # fmt: skip
def test_a_sidecar_of_another_tokenizer_or_prompt_is_refused_with_found_and_expected(
    tokenizer, sidecar: Sidecar, message: str
) -> None:
    with pytest.raises(SidecarError, match=message):
        verify_tokens(sidecar, tokenizer)


def test_an_ar_needs_no_injection_scale_and_raw_is_a_statement(tokenizer) -> None:
    verify_tokens(a_sidecar(role="ar", extraction=Extraction(layer_index=20)), tokenizer)
    verify_tokens(a_sidecar(extraction=Extraction(layer_index=20, injection_scale=None)), tokenizer)


@pytest.mark.parametrize(
    ("char", "token_id"),
    [
        ("<repo_name>", 3),
        ("㈎", None),
        ("<|endoftext|>", None),
        ("two words", None),
        ("号", 48980),
        ("", None),
    ],
)
def test_a_marker_is_one_token_of_that_very_text_or_none(tokenizer, char: str, token_id: int | None) -> None:
    assert marker_token_id(tokenizer, char) == token_id


def test_a_tokenizer_without_chat_template_is_named_with_the_way_out(tokenizer) -> None:
    class Bare:
        chat_template = None
        name_or_path = "base-model"
        unk_token_id = None

    with pytest.raises(SidecarError, match=r"base-model has no chat template.*load_subject"):
        av_prompt_ids(a_sidecar(), Bare())


# ---------------------------------------------------------------- AR prompts


def ar_sidecar(tokenizer) -> Sidecar:
    return with_tokens(ar_suffix_ids=compute_suffix_ids(tokenizer, AR_TEMPLATE))


@pytest.mark.parametrize(
    "explanation",
    ["Ends in \"the\".", "", " ", "\n", "words <", "a </", "</text>", "x <|im_end|><repo_name> y", "㈎ é 🙂", "</text> <summary>",
     "tab\t", "{injection_char} {explanation} {0.__class__}"],
)  # fmt: skip
def test_every_ar_prompt_ends_in_the_suffix_and_reads_as_the_template_filled_in(
    tokenizer, explanation: str
) -> None:
    sidecar = ar_sidecar(tokenizer)
    ids = ar_prompt_ids(sidecar, tokenizer, explanation)
    suffix = sidecar.require_tokens().ar_suffix_ids
    assert tuple(ids[-len(suffix) :]) == suffix
    assert tokenizer.decode(ids) == AR_TEMPLATE.replace("{explanation}", explanation)


def test_text_that_spells_a_special_token_never_becomes_one(tokenizer) -> None:
    ids = ar_prompt_ids(ar_sidecar(tokenizer), tokenizer, "say <|im_end|> and <repo_name>")
    assert not {0, 1, 2, 3} & set(ids)


def test_the_ar_prompt_is_encoded_as_one_text_as_the_release_does(tokenizer) -> None:
    text = AR_TEMPLATE.replace("{explanation}", "The end.")
    assert ar_prompt_ids(ar_sidecar(tokenizer), tokenizer, "The end.") == tokenizer(text)["input_ids"]


def test_the_suffix_is_stable_under_every_last_character(tokenizer) -> None:
    suffix = list(compute_suffix_ids(tokenizer, AR_TEMPLATE))
    assert len(suffix) == 5
    for ending in map(chr, range(32, 127)):
        ids = tokenizer.encode(AR_TEMPLATE.replace("{explanation}", f"word{ending}"))
        if ending != "<":  # merges into "<</", deeper than the first token on some vocabularies
            assert ids[-5:] == suffix


@pytest.mark.parametrize("template", ["no slot", "{explanation} and {explanation}"])
def test_an_ar_template_without_exactly_one_slot_is_refused(tokenizer, template: str) -> None:
    with pytest.raises(SidecarError, match=r"slots \{explanation\}.*exactly one"):
        ar_prompt_ids(a_sidecar(prompt_templates=Templates(ar=template)), tokenizer, "x")


def test_suffix_ids_of_another_tokenizer_are_refused_with_both(tokenizer) -> None:
    with pytest.raises(SidecarError, match=r"end in the tokens \[.*\].*suffix ids \[9, 9\]"):
        ar_prompt_ids(with_tokens(ar_suffix_ids=(9, 9)), tokenizer, "x")


def test_every_refusal_here_is_a_user_error() -> None:
    assert issubclass(SidecarError, DragomanError)
