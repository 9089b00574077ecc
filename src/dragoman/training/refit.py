"""The reconstructor's second lesson: the verbalizer's own words.

Reference explanations are clean; what a verbalizer says is not, and a reconstructor that never saw its
mistakes takes every wrong word at its face. Only vectors that the verbalizer was not trained on are put
into words here, since it would quote the explanations it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import torch

from dragoman.errors import TrainingError
from dragoman.nla import Decoding, Verbalizer
from dragoman.runs import Progress, RunFolder, atomic_write_json
from dragoman.training.config import RefitConfig
from dragoman.training.rows import Rows

CHUNK = 128
"""Vectors a file of samples: what a kill can cost."""


def refit_rows(
    run: RunFolder,
    verbalizer: Verbalizer,
    rows: Rows,
    config: RefitConfig,
    *,
    progress: Progress | None = None,
) -> Rows:
    """Verbalize rows and mix them with references.

    Args:
        run: open run folder; keeps the samples, chunk by chunk, so that they are made once.
        verbalizer: trained; `rows` must be new to it.
        rows: vectors with their reference explanations.
        config: how many, at which temperature, how many references.
        progress: called with (done, total, "vectors").

    Returns:
        `config.samples` rows (or all there are) in the verbalizer's words, and references so that they
        make up `config.reference_share`. Answers without a word are left out.

    Raises:
        TrainingError: the verbalizer says nothing at all.
    """
    chosen = rows.sample(config.samples, config.seed)
    said = _verbalized(run.path / "samples", verbalizer, chosen, config, progress)
    kept = [number for number, text in enumerate(said) if text.strip()]
    run.log(step=0, samples=len(said), without_words=len(said) - len(kept))
    if not kept:
        raise TrainingError(
            f"none of {len(said)} answers of the verbalizer holds a word",
            expected="text between the tags",
            consequence="the reconstructor would be refitted on nothing",
            remedy="train the verbalizer longer, or lower its learning rate",
        )
    own = Rows(
        chosen.vectors[kept],
        tuple(said[number] for number in kept),
        tuple(chosen.documents[number] for number in kept),
    )
    return _mixed(own, rows, config)


def _verbalized(
    folder: Path, verbalizer: Verbalizer, rows: Rows, config: RefitConfig, progress: Progress | None
) -> list[str]:
    folder.mkdir(exist_ok=True)
    decoding = Decoding(temperature=config.temperature, seed=config.seed)
    texts: list[str] = []
    for start in range(0, len(rows), CHUNK):
        file = folder / f"{start:07d}.json"
        if not file.is_file():
            explanations = verbalizer.explain(rows.vectors[start : start + CHUNK], decoding=decoding)
            atomic_write_json(file, {"texts": [explanation.text for explanation in explanations]})
        texts += orjson.loads(file.read_bytes())["texts"]
        if progress is not None:
            progress(len(texts), len(rows), "vectors")
    return texts


def _mixed(own: Rows, references: Rows, config: RefitConfig) -> Rows:
    share = min(config.reference_share, 0.99)
    wanted = min(len(references), round(len(own) * share / (1.0 - share)))
    picked = np.random.default_rng([config.seed & 0x7FFFFFFF, 1]).choice(
        len(references), size=wanted, replace=False
    )
    return _joined([own, references.take(np.sort(picked))] if wanted else [own])


def _joined(parts: Sequence[Rows]) -> Rows:
    return Rows(
        torch.cat([part.vectors for part in parts]),
        tuple(text for part in parts for text in part.texts),
        tuple(document for part in parts for document in part.documents),
    )
