"""The nla_meta.yaml contract between data, models and whoever reads them; reading it needs no torch.

`schema` holds the models, `layout` reads and writes the file in all its spellings, `prompts` renders the
templates and checks them against a live tokenizer.
"""

from __future__ import annotations

from dragoman.sidecar.layout import SIDECAR_NAME, read_sidecar, sidecar_path, write_sidecar
from dragoman.sidecar.prompts import (
    ar_prompt_ids,
    av_prompt_ids,
    compute_suffix_ids,
    marker_token_id,
    render_prompt_ids,
    render_template,
    verify_tokens,
)
from dragoman.sidecar.schema import Baseline, Extraction, Scale, Sidecar, Templates, Tokens

__all__ = [
    "SIDECAR_NAME",
    "Baseline",
    "Extraction",
    "Scale",
    "Sidecar",
    "Templates",
    "Tokens",
    "ar_prompt_ids",
    "av_prompt_ids",
    "compute_suffix_ids",
    "marker_token_id",
    "read_sidecar",
    "render_prompt_ids",
    "render_template",
    "sidecar_path",
    "verify_tokens",
    "write_sidecar",
]
