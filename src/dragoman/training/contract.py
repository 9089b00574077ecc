"""Decide once what a new pair's sidecars say: marker, prompts, scales, norms, baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dragoman.activations.store import VectorReader
from dragoman.errors import ConfigError
from dragoman.evaluation.fve import baselines
from dragoman.injection import Marker, choose_marker, prompt_renderer
from dragoman.runs import provenance
from dragoman.scaling import check_injection_scale, suggest_injection_scale
from dragoman.shapes import Vectors
from dragoman.sidecar import (
    Baseline,
    Extraction,
    Sidecar,
    Templates,
    Tokens,
    compute_suffix_ids,
    marker_token_id,
    read_sidecar,
    render_prompt_ids,
)
from dragoman.subjects import Subject
from dragoman.training.config import PairConfig


@dataclass(frozen=True)
class Contract:
    """The sidecars of both halves of a pair that is about to be trained."""

    av: Sidecar
    ar: Sidecar


def make_contract(subject: Subject, config: PairConfig, training_set: Path) -> Contract:
    """Sidecars from the config and the vectors of one training split.

    Args:
        subject: the model to be read.
        config: prompts, and marker and scale where they are not "auto".
        training_set: Parquet file whose vectors give mean norm and baseline; never the held-out split.

    Raises:
        InjectionError: no marker survives the template, or the config's is no single token there.
        ScaleError: a scale that is not positive.
    """
    with VectorReader(training_set) as reader:
        vectors = torch.from_numpy(reader.read_vectors())
    dataset = read_sidecar(training_set)
    extraction = Extraction(
        layer_index=config.layer_index,
        base_model=config.subject,
        injection_scale=_injection_scale(config, vectors),
        mse_scale="sqrt_d_model",
    )
    base = baselines(vectors)
    shared: dict[str, Any] = {
        "kind": "nla_model",
        "d_model": subject.d_model,
        "extraction": extraction,
        "tokens": _tokens(subject, config),
        "prompt_templates": Templates(av=config.prompt.av_template, ar=config.prompt.ar_template),
        "ar_layer_index": config.layer_index,
        "baseline": Baseline(raw_variance=base.raw_variance, normalised_mean=base.normalised_mean, n=base.n),
        "norm_quantiles": dataset.norm_quantiles,
        "system_prompt": config.prompt.system_prompt,
        "max_new_tokens": config.max_new_tokens,
        "provenance": provenance(subject=subject.provenance(), config=config.model_dump(mode="json")),
    }
    return Contract(av=Sidecar(role="av", **shared), ar=Sidecar(role="ar", **shared))


def check_prompt(subject: Subject, config: PairConfig) -> None:
    """Refuse a marker or template that no contract can be made of, before hours go into vectors.

    Raises:
        ConfigError, InjectionError, SidecarError: as `make_contract`.
    """
    _tokens(subject, config)


def _injection_scale(config: PairConfig, vectors: Vectors) -> float:
    norms = vectors.double().norm(dim=1)
    if config.injection_scale == "auto":
        return suggest_injection_scale(float(norms.mean()))
    check_injection_scale(config.injection_scale, float(norms.median()))
    return config.injection_scale


def _tokens(subject: Subject, config: PairConfig) -> Tokens:
    prompt = config.prompt
    marker = _marker(subject, config)
    return Tokens(
        injection_char=marker.char,
        injection_token_id=marker.token_id,
        injection_left_neighbor_id=marker.left_id,
        injection_right_neighbor_id=marker.right_id,
        ar_suffix_ids=compute_suffix_ids(subject.tokenizer, prompt.ar_template),
    )


def _marker(subject: Subject, config: PairConfig) -> Marker:
    prompt, tokenizer = config.prompt, subject.tokenizer
    if prompt.marker == "auto":
        render = prompt_renderer(tokenizer, prompt.av_template, system_prompt=prompt.system_prompt)
        return choose_marker(tokenizer, render)
    token_id = marker_token_id(tokenizer, prompt.marker)
    if token_id is None:
        raise ConfigError(
            f"prompt.marker {prompt.marker!r} is not one token of {subject.name}",
            expected="a character or special token with one id",
            consequence="there would be no single place for the vector to enter",
            remedy="write marker: auto, or another character",
        )
    ids = render_prompt_ids(
        tokenizer, prompt.av_template, prompt.marker, token_id, system_prompt=prompt.system_prompt
    )
    at = ids.index(token_id)
    return Marker(prompt.marker, token_id, ids[at - 1], ids[at + 1])
