"""Names, folders, the hub and the cache: what loads, what is refused, and with which words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import tiny_model

from dragoman.errors import DragomanError, FetchError, SubjectError
from dragoman.subjects import Compute, Subject, fetch_subject, list_subjects, load_subject
from dragoman.subjects.hub import hub_answers, parse_hub_name
from dragoman.subjects.load import cached_folder

FLOAT32 = Compute(torch.float32, "sdpa", torch.device("cpu"), "test")


def complete_error(error: DragomanError) -> bool:
    return all((error.found, error.expected, error.consequence, error.remedy))


@pytest.fixture
def folder(tmp_path: Path, smollm2: Subject) -> Path:
    """A complete local model folder: tiny Qwen2, tied embeddings."""
    path = tmp_path / "model"
    tiny_model("qwen2").save_pretrained(path)
    smollm2.tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("family", ["qwen2", "gemma3-wrapper", "qwen3.5-wrapper", "gemma4-wrapper", "gpt2"])
def test_a_local_folder_loads_whole_and_computes_the_same(
    tmp_path: Path, smollm2: Subject, family: str
) -> None:
    original = tiny_model(family)
    original.save_pretrained(tmp_path / "m")
    smollm2.tokenizer.save_pretrained(tmp_path / "m")
    subject = load_subject(tmp_path / "m", compute=FLOAT32)
    ids = torch.randint(3, 100, (2, 7))
    with torch.no_grad():
        assert torch.equal(subject.model(input_ids=ids).logits, original(input_ids=ids).logits)
    assert type(subject.model) is type(original)
    assert not subject.model.training
    assert not any(p.requires_grad for p in subject.model.parameters())
    assert subject.compute.attention == "sdpa"


def test_the_fingerprint_follows_the_weights_and_not_the_dtype(folder: Path) -> None:
    first = load_subject(folder, compute=FLOAT32).fingerprint
    assert load_subject(folder, device="cpu", dtype="bfloat16").fingerprint == first
    tiny_model("qwen2", seed=1).save_pretrained(folder)
    assert load_subject(folder, compute=FLOAT32).fingerprint != first
    assert len(first) == 64


def test_provenance_says_what_was_read_and_how(smollm2: Subject) -> None:
    said = smollm2.provenance()
    assert said["subject"] == "smollm2-135m"
    assert said["revision"] == "b179c9523d0e6a0f"
    assert (said["d_model"], said["num_layers"]) == (576, 30)
    assert Compute.from_json(json.loads(json.dumps(said["compute"]))) == smollm2.compute


def test_the_second_load_of_the_embedded_subject_costs_less_than_five_seconds(smollm2: Subject) -> None:
    # Seconds of this process's own work: other processes on the machine must not decide a test.
    started = time.process_time()
    load_subject("smollm2-135m", device="cpu")
    assert time.process_time() - started < 5.0


def test_a_broken_cached_subject_is_not_called_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cached_folder("smollm2-135m")
    assert whole is not None
    assert {s.name: s.cached for s in list_subjects()}["smollm2-135m"]
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))
    assert cached_folder("smollm2-135m") is None
    half = tmp_path / "subjects" / "smollm2-135m" / "model"
    half.mkdir(parents=True)
    shutil.copy(whole / "manifest.json", half)
    assert cached_folder("smollm2-135m") is None


# ------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("no-such-model", "dragoman subjects list"),
        ("./nowhere", "nowhere"),
        ("nowhere/model.gguf", "model.gguf"),
        ("", "smollm2-135m"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_a_way_on(name: str, words: str) -> None:
    with pytest.raises(SubjectError) as caught:
        load_subject(name)
    assert words in str(caught.value)
    assert complete_error(caught.value)


def test_hub_names_are_told_from_paths() -> None:
    parsed = parse_hub_name("hf:org/name@v1.2")
    assert parsed is not None
    assert (parsed.repository, parsed.revision) == ("org/name", "v1.2")
    assert parse_hub_name("org/name") == parse_hub_name("hf:org/name")
    assert parse_hub_name("hf:gpt2") is not None
    for path in ("./org/name", "/org/name", "~/name", "a/b/c", "name"):
        assert parse_hub_name(path) is None, path
    with pytest.raises(SubjectError, match="one revision"):
        parse_hub_name("hf:org/name@v1", "v2")


OFFLINE = """
from dragoman.errors import FetchError
from dragoman.subjects import load_subject
try:
    load_subject("hf:org/never-downloaded")
except FetchError as error:
    print(error)
"""


def test_a_hub_model_without_a_connection_says_so_in_one_paragraph(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True)
    assert "org/never-downloaded is not in its local cache" in done.stdout, done.stderr
    assert "smollm2-135m" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("reachable", [True, False])
def test_without_a_network_the_hub_is_asked_once(reachable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Session:
        def head(self, url: str, **_: Any) -> None:
            asked.append(url)
            if not reachable:
                kind = type("ConnectError", (Exception,), {"__module__": "httpx2"})
                raise kind("no route")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    assert hub_answers() is reachable
    assert len(asked) == 1
    if not reachable:
        with pytest.raises(FetchError, match="cannot be reached"):
            load_subject("hf:org/never-downloaded")
        assert len(asked) == 2


def test_terms_must_be_accepted_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))
    with pytest.raises(FetchError, match="--accept-terms") as caught:
        fetch_subject("gemma3-270m")
    assert "Gemma" in caught.value.found
    assert not list((tmp_path / "subjects").glob("*/model"))


# ------------------------------------------------------------ bad folders


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(SubjectError, match=r"no config\.json"):
        load_subject(folder)


def test_an_adapter_folder_is_told_from_a_model(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(SubjectError, match="only an adapter"):
        load_subject(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_malformed_config_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(SubjectError, match=r"config\.json"):
        load_subject(folder)


class Bomb:
    """Unpickling this would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Bomb(tmp_path / "exploded")}, folder / "pytorch_model.bin")
    with pytest.raises(SubjectError, match=r"only pytorch_model\.bin"):
        load_subject(folder)
    assert not (tmp_path / "exploded").exists()


def test_code_that_a_model_brings_along_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(SubjectError, match="own Python code"):
        load_subject(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_truncated_safetensors_are_refused(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(SubjectError, match=r"model\.safetensors has \d+ bytes"):
        load_subject(folder)


@pytest.mark.parametrize("start", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x01" + b"\0" * 7 + b"{"])
def test_a_safetensors_header_is_bounded_and_checked_before_use(folder: Path, start: bytes) -> None:
    (folder / "model.safetensors").write_bytes(start)
    with pytest.raises(SubjectError, match=r"model\.safetensors"):
        load_subject(folder)


def test_weights_that_lack_a_tensor_are_refused_instead_of_filled_with_noise(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.layers.2.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SubjectError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_subject(folder, compute=FLOAT32)


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()
    with pytest.raises(SubjectError) as caught:
        load_subject(folder, compute=FLOAT32)
    assert complete_error(caught.value)


def test_quantised_loading_without_its_library_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.subjects.quantized.find_spec", lambda name: None)
    with pytest.raises(SubjectError, match=r"pip install 'dragoman\[quantized\]'"):
        load_subject(folder, compute=FLOAT32, quantization="int8")


# ------------------------------------------------------------ chat templates


@pytest.mark.parametrize(
    ("extra", "origin", "start"),
    [([], "plain", "User: hi\n"), (["<start_of_turn>", "<end_of_turn>"], "gemma", "<start_of_turn>user\nhi")],
)
def test_a_model_without_chat_template_gets_one_that_fits_its_vocabulary(
    folder: Path, extra: list[str], origin: str, start: str
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=extra)
    for path in [
        *folder.glob("token*"),
        *folder.glob("*.jinja"),
        *folder.glob("vocab*"),
        *folder.glob("merges*"),
    ]:
        path.unlink()
    tokenizer.save_pretrained(folder)
    subject = load_subject(folder, compute=FLOAT32)
    assert subject.chat_template_origin == origin
    text = subject.tokenizer.apply_chat_template(
        [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.startswith(start)
    assert text.endswith("Assistant:" if origin == "plain" else "<start_of_turn>model\n")
    assert subject.encode_chat([{"role": "user", "content": "hi"}])
