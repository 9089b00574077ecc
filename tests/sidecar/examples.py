"""Sidecars as they occur in the wild, and one of our own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dragoman.sidecar import (
    Extraction,
    Sidecar,
    Templates,
    Tokens,
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


QWEN = released_yaml("Qwen/Qwen2.5-7B-Instruct", "av")


def with_tokens(**changes: Any) -> Sidecar:
    sidecar = a_sidecar()
    return sidecar.model_copy(update={"tokens": sidecar.require_tokens().model_copy(update=changes)})
