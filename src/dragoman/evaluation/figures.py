"""From measured arrays to figures and rows: every mean by document, every figure with its comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dragoman.evaluation.fve import Baselines, fve
from dragoman.evaluation.held_out import HeldOut
from dragoman.evaluation.report import Figure
from dragoman.evaluation.retrieval import Ranks, chance
from dragoman.evaluation.stats import Estimate, bootstrap_by_group
from dragoman.nla.explanation import Explanation
from dragoman.nla.verbalizer import VerbalizerLoss

PerRow = Float[Tensor, " n"]

_RANKINGS = ("top1", "top5", "mrr")
FIGURE_NAMES = (
    "round_trip_fve",
    "round_trip_fve_mean_direction",
    "round_trip_cosine",
    "round_trip_cosine_centred",
    "round_trip_shuffled_fve",
    "zero_vector_fve",
    "mean_vector_fve",
    *(f"round_trip_{name}" for name in _RANKINGS),
    "reference_fve",
    "reference_fve_mean_direction",
    "reference_cosine",
    "reference_cosine_centred",
    "reference_shuffled_fve",
    *(f"reference_{name}" for name in _RANKINGS),
    "av_gap",
    "av_loss",
    "av_gap_content",
    "av_loss_content",
    "truncated",
    "repeated",
    "raw_variance",
    "normalised_mean",
)
"""All figures, so that a requirement can be checked before the minutes of measuring."""


@dataclass(frozen=True)
class Losses:
    """Loss of each reference explanation, summed over its tokens (nat), under two vectors.

    `content` is what stands between the tags; the tags and the end token are the same for every vector
    and soon cost nothing, so that the gap over all response tokens understates what is read.
    """

    real: PerRow
    shuffled: PerRow
    tokens: PerRow
    content_real: PerRow
    content_shuffled: PerRow
    content_tokens: PerRow

    @classmethod
    def of(cls, real: VerbalizerLoss, shuffled: VerbalizerLoss) -> Losses:
        """Losses of one batch under its own vectors and under vectors of other documents."""
        parts = (
            real.nll,
            shuffled.nll,
            real.tokens,
            real.content_nll,
            shuffled.content_nll,
            real.content_tokens,
        )
        return cls(*(part.detach().double().cpu() for part in parts))

    @classmethod
    def joined(cls, parts: Sequence[Losses]) -> Losses:
        """Batches one after another."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(frozen=True)
class Reconstructed:
    """How near one set of texts brings the reconstructor to the vectors they belong to.

    Attributes:
        mse: normalised, 2(1 - cosine).
        cosine: raw.
        centred: cosine with the mean of the held-out vectors taken from both sides.
        shuffled_mse: of each vector against the text of another document's vector.
        ranks: of the own vector in pools of held-out vectors.
    """

    mse: PerRow
    cosine: PerRow
    centred: PerRow
    shuffled_mse: PerRow
    ranks: Ranks


@dataclass(frozen=True)
class Blank:
    """What the AV says when there is nothing to read, and the error of that text on every held-out row."""

    text: str
    mse: PerRow


@dataclass(frozen=True)
class Measured:
    """Everything a run measured, a row a held-out vector."""

    held_out: HeldOut
    base: Baselines
    explanations: Sequence[Explanation]
    losses: Losses
    reference: Reconstructed
    round_trip: Reconstructed
    zero_vector: Blank
    mean_vector: Blank
    score_baseline: float
    """Raw variance by which a single row is scored outside of an evaluation."""


class _Estimator:
    """Ratios of sums over held-out rows, bootstrapped by document."""

    def __init__(self, measured: Measured, seed: int) -> None:
        self._documents = list(measured.held_out.doc_ids)
        self._base = measured.base
        self._seed = seed

    def mean(self, values: PerRow | Float[np.ndarray, " n"], per: PerRow | None = None) -> Estimate:
        """Mean over rows, or per unit of `per` (tokens)."""
        below = None if per is None else per.numpy()
        return bootstrap_by_group(np.asarray(values), self._documents, denominator=below, seed=self._seed)

    def fve(self, mse: PerRow) -> Estimate:
        """1 - sum of errors / sum of squared deviations from the mean."""
        return self.mean(mse, per=self._base.raw_errors).one_minus()

    def fve_mean_direction(self, mse: PerRow) -> Estimate:
        """The same against the mean brought to norm sqrt(d_model)."""
        return self.mean(mse, per=self._base.direction_errors).one_minus()

    def ranked(self, ranks: Ranks, values: Float[np.ndarray, " rows"]) -> Estimate:
        """Mean over the rows that stood in a pool."""
        documents = [self._documents[row] for row in ranks.rows]
        return bootstrap_by_group(values, documents, seed=self._seed)


def figures_of(measured: Measured, *, seed: int) -> dict[str, Figure]:
    """All figures of the suite by name, in the order in which a reader wants them."""
    estimate = _Estimator(measured, seed)
    listed = [
        *_round_trip(measured, estimate),
        *_retrieval("round_trip", "the AV's own words", measured.round_trip.ranks, estimate),
        *_reference(measured, estimate),
        *_retrieval("reference", "reference explanations", measured.reference.ranks, estimate),
        *_gap(measured.losses, estimate),
        *_wording(measured.explanations, estimate),
        *_baselines(measured.base, estimate),
    ]
    assert tuple(figure.name for figure in listed) == FIGURE_NAMES, "FIGURE_NAMES lists what is measured"
    return {figure.name: figure for figure in listed}


def _round_trip(measured: Measured, estimate: _Estimator) -> list[Figure]:
    found = measured.round_trip
    shuffled = estimate.fve(found.shuffled_mse)
    zero, mean = estimate.fve(measured.zero_vector.mse), estimate.fve(measured.mean_vector.mse)
    words = "vector -> the AV's own words -> vector"
    controls = (
        f"mean of the vectors 0; words of another document {shuffled.value:.3f}; "
        f"words about the zero vector {zero.value:.3f}, about the mean vector {mean.value:.3f}"
    )
    direction = estimate.fve_mean_direction(found.mse)
    shuffled_direction = estimate.fve_mean_direction(found.shuffled_mse)
    return [
        Figure("round_trip_fve", f"FVE, {words}", estimate.fve(found.mse), controls),
        Figure(
            "round_trip_fve_mean_direction",
            f"FVE against the direction of the mean, {words}",
            direction,
            f"direction of the mean 0; words of another document {shuffled_direction.value:.3f}",
        ),
        *_cosines("round_trip", words, found, measured.base, estimate),
        Figure(
            "round_trip_shuffled_fve",
            "control: FVE of words about another document's vector",
            shuffled,
            "should lie below 0, the mean of the vectors",
            better="lower",
        ),
        Figure(
            "zero_vector_fve",
            "control: FVE of what the AV says about the zero vector",
            zero,
            "should not lie above 0, the mean of the vectors",
            better="lower",
        ),
        Figure(
            "mean_vector_fve",
            "control: FVE of what the AV says about the mean vector",
            mean,
            "should not lie above 0, the mean of the vectors",
            better="lower",
        ),
    ]


def _reference(measured: Measured, estimate: _Estimator) -> list[Figure]:
    found = measured.reference
    shuffled = estimate.fve(found.shuffled_mse)
    shuffled_direction = estimate.fve_mean_direction(found.shuffled_mse)
    words = "reference explanation -> vector"
    return [
        Figure(
            "reference_fve",
            f"FVE of the AR, {words}",
            estimate.fve(found.mse),
            f"mean of the vectors 0; reference of another document {shuffled.value:.3f}",
        ),
        Figure(
            "reference_fve_mean_direction",
            f"FVE of the AR against the direction of the mean, {words}",
            estimate.fve_mean_direction(found.mse),
            f"direction of the mean 0; reference of another document {shuffled_direction.value:.3f}",
        ),
        *_cosines("reference", words, found, measured.base, estimate),
        Figure(
            "reference_shuffled_fve",
            "control: FVE of another document's reference explanation",
            shuffled,
            "should lie below 0, the mean of the vectors",
            better="lower",
        ),
    ]


def _cosines(
    prefix: str, words: str, found: Reconstructed, base: Baselines, estimate: _Estimator
) -> list[Figure]:
    # Cosine of unit rows with the direction of their mean, from its mse: 1 - mse / 2.
    mean_cosine = 1.0 - base.normalised_mean / 2.0
    shuffled = float(1.0 - found.shuffled_mse.mean() / 2.0)
    return [
        Figure(
            f"{prefix}_cosine",
            f"cosine, {words}",
            estimate.mean(found.cosine),
            f"direction of the mean {mean_cosine:.3f}; words of another document {shuffled:.3f}",
        ),
        Figure(
            f"{prefix}_cosine_centred",
            f"cosine without the mean, {words}",
            estimate.mean(found.centred),
            "nothing read 0",
        ),
    ]


def _retrieval(prefix: str, words: str, ranks: Ranks, estimate: _Estimator) -> list[Figure]:
    guess = chance(ranks.pool)
    pools = f", over {ranks.pools} disjoint pools" if ranks.pools > 1 else ""
    where = f"among {ranks.pool} held-out vectors{pools}, from {words}"
    rows = (
        (f"own vector found first {where}", ranks.top(1), guess.top1),
        (f"own vector among the first five {where}", ranks.top(5), guess.top5),
        (f"mean reciprocal rank {where}", ranks.reciprocal(), guess.mrr),
    )
    return [
        Figure(f"{prefix}_{name}", meaning, estimate.ranked(ranks, values), f"chance {by_chance:.4f}")
        for name, (meaning, values, by_chance) in zip(_RANKINGS, rows, strict=True)
    ]


def _gap(losses: Losses, estimate: _Estimator) -> list[Figure]:
    def pair(name: str, what: str, real: PerRow, shuffled: PerRow, tokens: PerRow) -> list[Figure]:
        own, other = estimate.mean(real, per=tokens), estimate.mean(shuffled, per=tokens)
        return [
            Figure(
                f"av_gap{name}",
                f"loss of the reference explanation, another document's vector minus the own, {what}",
                estimate.mean(shuffled - real, per=tokens),
                f"vector not read 0; own vector {own.value:.3f}, another document's {other.value:.3f}",
                unit="nat/token",
            ),
            Figure(
                f"av_loss{name}",
                f"loss of the reference explanation under its own vector, {what}",
                own,
                f"another document's vector {other.value:.3f}",
                unit="nat/token",
                better="lower",
            ),
        ]

    return [
        *pair("", "all response tokens", losses.real, losses.shuffled, losses.tokens),
        *pair(
            "_content",
            "tokens between the tags",
            losses.content_real,
            losses.content_shuffled,
            losses.content_tokens,
        ),
    ]


def _wording(explanations: Sequence[Explanation], estimate: _Estimator) -> list[Figure]:
    texts = [explanation.text for explanation in explanations]
    times = {text: texts.count(text) for text in set(texts)}
    return [
        Figure(
            "truncated",
            "share of explanations cut off at the token limit",
            estimate.mean(np.array([float(e.truncated) for e in explanations])),
            "should be 0",
            better="lower",
        ),
        Figure(
            "repeated",
            "share of explanations that were said about another vector word for word",
            estimate.mean(np.array([float(times[text] > 1) for text in texts])),
            "a collapsed AV 1",
            better="lower",
        ),
    ]


def _baselines(base: Baselines, estimate: _Estimator) -> list[Figure]:
    return [
        Figure(
            "raw_variance",
            "denominator of fve: error of predicting the mean of the held-out vectors",
            estimate.mean(base.raw_errors),
            "two unrelated vectors 1",
            better="",
        ),
        Figure(
            "normalised_mean",
            "denominator of fve_mean_direction: error of predicting that mean at norm sqrt(d_model)",
            estimate.mean(base.direction_errors),
            "two unrelated vectors 2",
            better="",
        ),
    ]


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    """One dict a held-out vector, plain Python values."""
    sample, found, losses = measured.held_out, measured.round_trip, measured.losses
    raw, direction = measured.base.raw_variance, measured.base.normalised_mean
    columns: dict[str, Sequence[Any]] = {
        "doc_id": list(sample.doc_ids),
        "position": list(sample.positions),
        "token": list(sample.tokens),
        "reference": list(sample.references),
        "explanation": [explanation.text for explanation in measured.explanations],
        "truncated": [explanation.truncated for explanation in measured.explanations],
        "cosine": found.cosine.tolist(),
        "cosine_centred": found.centred.tolist(),
        "mse": found.mse.tolist(),
        "fve": fve(found.mse, raw).tolist(),
        "fve_mean_direction": fve(found.mse, direction).tolist(),
        "score": fve(found.mse, measured.score_baseline).tolist(),
        "shuffled_fve": fve(found.shuffled_mse, raw).tolist(),
        "rank": _ranks_by_row(found.ranks, len(sample)),
        "reference_mse": measured.reference.mse.tolist(),
        "reference_fve": fve(measured.reference.mse, raw).tolist(),
        "av_loss": (losses.real / losses.tokens).tolist(),
        "av_loss_shuffled": (losses.shuffled / losses.tokens).tolist(),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _ranks_by_row(ranks: Ranks, n: int) -> list[int | None]:
    by_row: list[int | None] = [None] * n
    for row, rank in zip(ranks.rows.tolist(), ranks.ranks.tolist(), strict=True):
        by_row[row] = rank
    return by_row
