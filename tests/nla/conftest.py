"""Sidecars of untrained pairs for any subject with the SmolLM2 tokenizer."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from dragoman.injection import choose_marker, prompt_renderer
from dragoman.sidecar import Baseline, Extraction, Sidecar, Templates, Tokens, compute_suffix_ids
from dragoman.subjects import Subject

AV_TEMPLATE = "Explain <concept>{injection_char}</concept>"
AR_TEMPLATE = "Summary of the following text: <text>{explanation}</text> <summary>"


class MakeSidecar(Protocol):
    def __call__(self, subject: Subject, role: str = "av", layer_index: int = 2, **own: Any) -> Sidecar: ...


@pytest.fixture(scope="session")
def make_sidecar() -> MakeSidecar:
    def make(subject: Subject, role: str = "av", layer_index: int = 2, **own: Any) -> Sidecar:
        render = prompt_renderer(subject.tokenizer, AV_TEMPLATE, system_prompt="")
        marker = choose_marker(subject.tokenizer, render)
        return Sidecar(
            kind="nla_model",
            role=role,
            d_model=subject.d_model,
            extraction=Extraction(
                layer_index=layer_index, base_model=subject.name, injection_scale=own.pop("scale", 30.0)
            ),
            tokens=Tokens(
                injection_char=marker.char,
                injection_token_id=marker.token_id,
                injection_left_neighbor_id=marker.left_id,
                injection_right_neighbor_id=marker.right_id,
                ar_suffix_ids=compute_suffix_ids(subject.tokenizer, AR_TEMPLATE),
            ),
            prompt_templates=Templates(av=AV_TEMPLATE, ar=AR_TEMPLATE),
            system_prompt="",
            baseline=own.pop("baseline", Baseline(raw_variance=0.8, normalised_mean=0.9, n=100)),
            **own,
        )

    return make
