"""What a model card says beyond the figures, gathered from a pair's own folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.nla import Pair

FORMAT = (
    "An explanation has one form: the last word, the passage of up to nine words that ends in it, and up to "
    "three topic words. The explanations it learned from were extracted from the text itself, no language "
    "model wrote them, so the pair speaks of these three things and of nothing else."
)


def pair_meta(folder: Path, pair: Pair, n: int) -> dict[str, Any]:
    """The `pair_meta` of `evaluation.render_model_card`, from pair.json, train.yaml and the sidecar.

    Args:
        folder: the pair's folder.
        pair: the same, loaded.
        n: held-out vectors of the evaluation, for the command that repeats it.
    """
    from dragoman.nla.pair import read_description

    described = read_description(folder)
    extraction, tokens = pair.sidecar.extraction, pair.sidecar.require_tokens()
    training: dict[str, Any] = dict(described.get("training", {}))
    meta: dict[str, Any] = {
        "name": described.get("name", folder.name),
        "subject": extraction.base_model,
        "revision": pair.subject.revision,
        "layer_index": pair.layer_index,
        "calibration": described.get("calibration"),
        "training": {
            "marker": f"{tokens.injection_char} (id {tokens.injection_token_id})",
            "injection scale": extraction.injection_scale,
            **{name: _stage(facts) for name, facts in training.items()},
        },
        "reproduce": [
            f"dragoman train pair {folder.name}/train.yaml --output runs/{folder.name}",
            f"dragoman evaluate runs/{folder.name}/pair --suite fve --n {n} --json fve.json",
        ],
    }
    config = folder / "train.yaml"
    if config.is_file():
        meta |= _data(config)
    return meta


def _stage(facts: Mapping[str, Any]) -> str:
    """One stage of training: its own held-out figures, taken while it ran."""
    finished, compute = facts.get("finished") or {}, facts.get("compute") or {}
    figures = finished.get("figures", {})
    shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if name != "rows")
    minutes = finished.get("seconds", 0.0) / 60
    return (
        f"{finished.get('steps')} steps in {minutes:.0f} minutes ({compute.get('dtype')}, "
        f"{compute.get('attention')} attention, {compute.get('device')}); held out while training, "
        f"n {figures.get('rows', 0):.0f}: {shown}"
    )


def _data(config: Path) -> dict[str, Any]:
    from dragoman.training import read_config

    parsed = read_config(config)
    stages: Sequence[tuple[str, Any]] = (
        ("verbalizer", parsed.verbalizer),
        ("reconstructor", parsed.reconstructor),
        ("refit", parsed.refit),
    )
    return {
        "format": FORMAT,
        "data": {
            "corpora": [spec.name for spec in parsed.data.corpora],
            "split by document": parsed.data.fractions,
            "positions per passage": parsed.data.positions_per_passage,
            "first position": parsed.data.min_position,
            "seed": parsed.data.seed,
            **{
                f"{name} rows seen": f"{stage.examples} ({stage.method}, rank {stage.rank}, "
                f"learning rate {stage.learning_rate:g})"
                for name, stage in stages
            },
        },
    }
