"""The commented YAML that `dragoman init` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

import yaml

from dragoman.cli.budget import FRACTIONS, Budget
from dragoman.cli.common import visible_text

if TYPE_CHECKING:
    from dragoman.cli.init import Proposal
    from dragoman.subjects import Subject

MIN_POSITION = 50
MAX_TOKENS = 256

_STARVED = "This is little: a pair of fewer than about 2,000 examples hardly reads. Give it more minutes."
_SATURATED = "More time would only repeat the same rows: give more text under data.corpora instead."


def render_config(
    subject: Subject, proposal: Proposal, corpora: Sequence[str], minutes: float, batch_size: int
) -> str:
    """The config as commented YAML, validated against the training config before anyone sees it.

    Args:
        subject: the model to be read.
        proposal: what was measured and chosen.
        corpora: embedded names, files or folders.
        minutes: the time that was asked for.
        batch_size: of all stages.
    """
    from dragoman.training.config import PromptConfig, parse_config

    prompt, budget, marker = PromptConfig(), proposal.budget, proposal.marker
    text = _template().substitute(
        title=visible_text(subject.name),
        subject=_scalar(subject.name),
        num_layers=subject.num_layers,
        layer_index=proposal.layer_index,
        output=_scalar(f"pairs/{slug(subject.name)}-L{proposal.layer_index}"),
        measured_vectors=f"{proposal.measured_vectors:,}",
        measured_on=visible_text(proposal.measured_on),
        mean_norm=f"{proposal.mean_norm:.4g}",
        median_norm=f"{proposal.median_norm:.4g}",
        injection_scale=f"{proposal.injection_scale:g}",
        corpora="\n".join(f"    - name: {_scalar(name)}" for name in corpora),
        positions_per_passage=budget.positions_per_passage,
        min_position=MIN_POSITION,
        max_tokens=MAX_TOKENS,
        vectors=budget.vectors,
        fractions=json.dumps(FRACTIONS),
        system_prompt=_scalar(prompt.system_prompt),
        prompt_tokens=proposal.prompt_tokens,
        av_template=_scalar(prompt.av_template),
        ar_template=_scalar(prompt.ar_template),
        marker_id=marker.token_id,
        left_id=marker.left_id,
        right_id=marker.right_id,
        marker=_scalar(marker.char),
        minutes=f"{minutes:g}",
        device=subject.compute.device.type,
        forward_rate=f"{proposal.forward_rate:,.0f}",
        estimate=f"{budget.seconds / 60:.0f}",
        size_note=f"# {note}\n" if (note := size_note(budget)) else "",
        verbalizer_examples=budget.verbalizer_examples,
        reconstructor_examples=budget.reconstructor_examples,
        refit_samples=budget.refit_samples,
        refit_examples=budget.refit_examples,
        batch_size=batch_size,
    )
    parse_config(text, name="the proposed config")
    return text


def slug(name: str) -> str:
    """A subject's name as part of a file name: the last part of a path or hub name, plain characters only."""
    last = re.split(r"[/\\:]", name.rstrip("/\\"))[-1].removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "model"


def _template() -> Template:
    return Template(files("dragoman.cli").joinpath("pair_config.yaml.in").read_text(encoding="utf-8"))


def _scalar(text: str | None) -> str:
    """A double-quoted YAML scalar on one line: no character of it can break out."""
    if text is None:
        return "null"
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=1_000_000).strip()


def size_note(budget: Budget) -> str:
    """What the reader of the sizes should know, in one line; empty when they fit the time."""
    if budget.starved:
        return _STARVED
    return _SATURATED if budget.saturated else ""
