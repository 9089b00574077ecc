from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dragoman.injection import choose_marker, prompt_renderer
from dragoman.nla import Reconstructor, Verbalizer, save_pair
from dragoman.nla.adapters import attach_lora
from dragoman.sidecar import Baseline, Extraction, Sidecar, Templates, Tokens, compute_suffix_ids
from dragoman.subjects import Subject, load_subject

LAYER = 2
MAX_NEW_TOKENS = 10
AV_TEMPLATE = "Explain <concept>{injection_char}</concept>"
AR_TEMPLATE = "Summary of the following text: <text>{explanation}</text> <summary>"


@pytest.fixture(scope="session")
def tiny_folder(tiny_llama: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random Llama as a model folder, so that the command can load it by itself."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama.model.save_pretrained(folder)
    tiny_llama.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_subject(tiny_folder: Path) -> Subject:
    return load_subject(tiny_folder, device="cpu")


@pytest.fixture(scope="session")
def tiny_pair(tiny_subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained pair for the tiny model: its words mean nothing, its plumbing is the real one."""
    tokenizer = tiny_subject.tokenizer
    marker = choose_marker(tokenizer, prompt_renderer(tokenizer, AV_TEMPLATE, system_prompt=""))
    shared = {
        "kind": "nla_model",
        "d_model": tiny_subject.d_model,
        "extraction": Extraction(
            layer_index=LAYER,
            base_model=tiny_subject.name,
            injection_scale=5.0,
            mse_scale="sqrt_d_model",
        ),
        "tokens": Tokens(
            injection_char=marker.char,
            injection_token_id=marker.token_id,
            injection_left_neighbor_id=marker.left_id,
            injection_right_neighbor_id=marker.right_id,
            ar_suffix_ids=compute_suffix_ids(tokenizer, AR_TEMPLATE),
        ),
        "prompt_templates": Templates(av=AV_TEMPLATE, ar=AR_TEMPLATE),
        "ar_layer_index": LAYER,
        "baseline": Baseline(raw_variance=0.8, normalised_mean=0.9, n=512),
        "system_prompt": "",
        "max_new_tokens": MAX_NEW_TOKENS,
        "score_threshold": 0.5,
    }
    verbalizer = Verbalizer.from_subject(tiny_subject, Sidecar(role="av", **shared))
    attach_lora(verbalizer.model, rank=2)
    reconstructor = Reconstructor.from_subject(tiny_subject, LAYER, Sidecar(role="ar", **shared))
    attach_lora(reconstructor.backbone.text_model, rank=2)
    return save_pair(tmp_path_factory.mktemp("pairs") / "tiny", verbalizer, reconstructor)


@pytest.fixture
def vectors() -> np.ndarray:
    """Fresh random vectors of the tiny model's width, [7, 32]."""
    return torch.randn(7, 32).numpy()


@pytest.fixture
def vectors_file(vectors: np.ndarray, tmp_path: Path) -> Path:
    """The vectors as a Parquet file with columns of its own, one of which a result column shadows."""
    path = tmp_path / "vectors.parquet"
    table = pa.table(
        {
            "activation_vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 32),
            "doc_id": [f"doc{i}" for i in range(len(vectors))],
            "explanation": [f"reference {i}" for i in range(len(vectors))],
        }
    )
    pq.write_table(table, path)
    return path
