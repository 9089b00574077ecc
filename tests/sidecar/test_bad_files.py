"""Sidecar files that are wrong or hostile: refused with the key and its value, and nothing in them runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.sidecar.examples import QWEN, write

from dragoman.errors import SidecarError
from dragoman.sidecar import (
    read_sidecar,
    write_sidecar,
)

# ---------------------------------------------------------------- wrong


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
        ("extraction: {layer_index: 21}", r"extraction\.layer_index = 21 and extraction_layer_index = 20"),
        ("prompt_templates: {av: x, actor: y}", r"templates\.av = 'x' and prompt_templates\.actor = 'y'"),
        ("tokens: {critic_suffix_ids: [1], ar_suffix_ids: [2]}", r"_suffix_ids = \[1\] and tokens\.ar"),
    ],
)
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
        (
            QWEN + "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 100)),
            "levels deep by its aliases",
        ),
        (QWEN + "loop: &loop [*loop]\n", "alias to something that contains it"),
        (QWEN + "deep: " + "[" * 100 + "]" * 100 + "\n", "nested more than"),
        (QWEN + "deep: " + "[" * 20_000 + "]" * 20_000 + "\n", "nested"),
        (QWEN + "long: [" + "1, " * 11_000 + "1]\n", "holds more than"),
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
