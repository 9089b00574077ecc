"""GGUF: refused when damaged, dequantised exactly, tokenizer as the file says."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from dragoman.errors import DragomanWarning, SubjectError
from dragoman.subjects import Compute, Subject, load_subject
from dragoman.subjects.gguf import convert_gguf, read_gguf_header

FLOAT32 = Compute(torch.float32, "eager", torch.device("cpu"), "test")
HEADS, KV_HEADS, D, FF, LAYERS = 4, 2, 32, 64, 2


def byte_vocabulary() -> list[str]:
    """The 256 byte symbols of GPT-2's byte-level alphabet, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def tokens_and_types() -> tuple[list[str], list[int]]:
    special = ["<|end|>", "<|start|>"]
    merged = ["12", "th"]
    return special + byte_vocabulary() + merged, [3, 3] + [1] * (256 + len(merged))


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in llama.cpp's rotary order, written out: half-split pairs become neighbours."""
    rows = weight.reshape(heads, -1, weight.shape[1])
    half = rows.shape[1] // 2
    out = np.empty_like(rows)
    for head in range(heads):
        for pair in range(half):
            out[head, 2 * pair] = rows[head, pair]
            out[head, 2 * pair + 1] = rows[head, half + pair]
    return out.reshape(weight.shape)


def tiny_reference() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(int(torch.randint(0, 2**31, ())))
    config = LlamaConfig(
        vocab_size=len(tokens_and_types()[0]),
        hidden_size=D,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_gguf(path: Path, model: Any, *, pre: str = "smollm", quantised: bool = False) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(D // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, types = tokens_and_types()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["1 2", "t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}")
    for name, array in gguf_tensors(model).items():
        if quantised and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    state = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    out = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for i in range(LAYERS):
        for ours, theirs in parts.items():
            out[f"blk.{i}.{ours}.weight"] = state[f"model.layers.{i}.{theirs}.weight"]
        q, k = (state[f"model.layers.{i}.self_attn.{p}_proj.weight"] for p in "qk")
        out[f"blk.{i}.attn_q.weight"] = interleaved(q, HEADS)
        out[f"blk.{i}.attn_k.weight"] = interleaved(k, KV_HEADS)
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    model = tiny_reference()
    write_gguf(folder / "tiny.gguf", model)
    return model, folder / "tiny.gguf"


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_users_gguf_computes_what_the_original_computes(tiny: tuple[Any, Path], own_home: Path) -> None:
    model, path = tiny
    subject = load_subject(str(path), compute=FLOAT32)
    ids = torch.randint(0, 250, (2, 13))
    with torch.no_grad():
        assert torch.equal(subject.model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert subject.text_config.rms_norm_eps == 1e-5
    assert subject.max_positions == 64


def test_the_second_load_of_a_gguf_uses_the_cache_and_a_changed_file_does_not(
    tmp_path: Path, own_home: Path
) -> None:
    path = tmp_path / "mine.gguf"
    write_gguf(path, tiny_reference())
    first = load_subject(path, compute=FLOAT32)
    (entry,) = (own_home / "subjects").iterdir()
    stamp = (entry / "model" / "manifest.json").stat().st_mtime_ns
    assert load_subject(path, compute=FLOAT32).fingerprint == first.fingerprint
    assert (entry / "model" / "manifest.json").stat().st_mtime_ns == stamp
    write_gguf(path, tiny_reference())
    assert load_subject(path, compute=FLOAT32).fingerprint != first.fingerprint
    assert len(list((own_home / "subjects").iterdir())) == 2


def test_a_quantised_gguf_is_dequantised_as_the_format_says(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model = tiny_reference()
    write_gguf(tmp_path / "q8.gguf", model, quantised=True)
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "q8.gguf", tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    reader = gguf.GGUFReader(tmp_path / "q8.gguf")
    raw = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight").data.tobytes()
    # Q8_0: blocks of one float16 scale and 32 signed bytes.
    blocks = [raw[i : i + 34] for i in range(0, len(raw), 34)]
    rows = [np.float32(np.frombuffer(b[:2], np.float16)[0]) * np.frombuffer(b[2:], np.int8) for b in blocks]
    assert np.array_equal(got, np.concatenate(rows).reshape(FF, D).astype(np.float32))


def test_control_tokens_become_special_and_the_chat_template_is_kept(
    tiny: tuple[Any, Path], own_home: Path
) -> None:
    subject = load_subject(tiny[1], compute=FLOAT32)
    assert subject.special_ids == {0, 1}
    assert subject.chat_template_origin == "own"
    assert subject.encode_chat([{"role": "user", "content": "a"}]) == [1, tokens_and_types()[0].index("a"), 0]
    assert 0 not in subject.encode("<|end|>")


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_the_named_pre_tokenizer_decides_whether_digits_are_split(
    tmp_path: Path, own_home: Path, pre: str, pieces: list[str]
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_reference(), pre=pre)
    subject = load_subject(tmp_path / "m.gguf", compute=FLOAT32)
    assert subject.token_strings(subject.encode("12")) == pieces


def test_an_unknown_pre_tokenizer_is_not_passed_over_in_silence(tmp_path: Path, own_home: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_reference(), pre="martian")
    with pytest.warns(DragomanWarning, match="martian"):
        load_subject(tmp_path / "m.gguf", compute=FLOAT32)


def test_a_file_cut_anywhere_is_refused_before_it_is_parsed(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    whole = tiny[1].read_bytes()
    read_gguf_header(tiny[1])
    cut = tmp_path / "cut.gguf"
    lengths = {0, 3, 4, 7, 12, 23, len(whole) - 1} | {int(n) for n in torch.randint(24, len(whole), (60,))}
    for length in sorted(lengths):
        cut.write_bytes(whole[:length])
        with pytest.raises(SubjectError, match=r"cut\.gguf"):
            read_gguf_header(cut)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"GGML" + bytes(100), "GGML"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "number of metadata entries"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "length of a metadata key"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 5, 2**61),
            "number of items",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1), "nested"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 77), "value type 77"),
    ],
)
def test_absurd_claims_in_a_header_are_refused_by_name(tmp_path: Path, header: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header)
    with pytest.raises(SubjectError, match=words):
        read_gguf_header(path)


def test_an_architecture_that_cannot_be_converted_is_named(tmp_path: Path, own_home: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "martian")
    writer.add_tensor("w", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SubjectError, match="martian"):
        load_subject(tmp_path / "odd.gguf", compute=FLOAT32)
    assert not list((own_home / "subjects").glob("*/model"))


def test_the_embedded_tokenizer_is_the_one_the_model_was_trained_with(smollm2: Subject) -> None:
    names = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<repo_name>",
        "<reponame>",
        "<file_sep>",
        "<filename>",
    ]
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.tokenizer.convert_ids_to_tokens(list(range(7))) == names
    text = "It's 12345 people’s naïve café  two spaces\n\nnew"
    pieces = smollm2.token_strings(smollm2.encode(text))
    assert [p for p in pieces if p.strip().isdigit()] == list("12345")
    assert smollm2.tokenizer.decode(smollm2.encode(text)) == text
    assert "named SmolLM" in smollm2.tokenizer.chat_template
    assert smollm2.text_config.rms_norm_eps == 1e-5


def test_literal_special_text_never_becomes_a_special_token(smollm2: Subject) -> None:
    ids = smollm2.encode("before <|im_end|><|endoftext|> after")
    assert not smollm2.special_ids & set(ids)
    # The setting must not stick to the tokenizer.
    chat = smollm2.encode_chat([{"role": "user", "content": "hello"}])
    assert chat[0] == 1
    assert 2 in chat
    assert smollm2.tokenizer("<|im_end|>")["input_ids"] == [2]


def test_the_embedded_model_answers_the_capital_of_france(smollm2: Subject) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = smollm2.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    out = smollm2.model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=16, do_sample=False)
    answer = smollm2.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_no_progress_bar_is_drawn_while_loading(
    tiny: tuple[Any, Path], own_home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_subject(tiny[1], compute=FLOAT32)
    out, err = capfd.readouterr()
    assert out == ""
    assert "%|" not in err


def test_the_config_in_the_cache_names_no_machine(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert_gguf(tiny[1], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert str(tiny[1].parent) not in json.dumps(config)
    assert "quantization_config" not in config
