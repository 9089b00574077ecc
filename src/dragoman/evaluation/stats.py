"""Statistics by document: intervals, shuffled controls and the threshold of `low-score`.

Vectors of one document resemble each other, so rows are no independent draws. Everything here that
resamples or permutes moves whole documents: an interval over rows would be too narrow, and a
shuffled control inside a document would be too kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dragoman.errors import VectorError

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure with its bootstrap interval.

    `low` and `high` are None where no interval exists: a single document cannot be resampled.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    """Rows."""
    documents: int

    def one_minus(self) -> Estimate:
        """The same for 1 - value, as an FVE is made from a ratio of errors."""
        low = None if self.high is None else 1.0 - self.high
        high = None if self.low is None else 1.0 - self.low
        return Estimate(1.0 - self.value, low, high, self.n, self.documents)


def bootstrap_by_group(
    numerator: Float[np.ndarray, " n"],
    groups: Sequence[str],
    *,
    denominator: Float[np.ndarray, " n"] | None = None,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Estimate:
    """The ratio sum(numerator) / sum(denominator) with a percentile interval over resampled documents.

    Every figure of the evaluation is such a ratio: a mean (denominator of ones), a loss per token
    (denominator of token counts), an FVE (1 - squared errors over deviations from the mean; both are
    resampled together, so that the interval carries the uncertainty of the baseline too).

    Args:
        numerator: one value a row.
        groups: the document of each row.
        denominator: one positive value a row; None for a mean over rows.
        resamples: draws of as many documents as there are, with replacement.
        level: coverage of the interval, 0.95 for 95%.
        seed: the same seed gives the same interval.

    Returns:
        The ratio on all rows and its interval (None, None when there is one document).

    Raises:
        VectorError: no rows, or a value that is not finite.
    """
    top = np.asarray(numerator, dtype=np.float64)
    below = np.ones_like(top) if denominator is None else np.asarray(denominator, dtype=np.float64)
    assert top.shape == below.shape == (len(groups),), "one numerator, denominator and group a row"
    if len(top) == 0 or not (np.isfinite(top).all() and np.isfinite(below).all()):
        raise VectorError(
            f"{int((~np.isfinite(top) | ~np.isfinite(below)).sum())} of {len(top)} values are not finite",
            expected="at least one row, every value finite",
            consequence="a mean over them would be NaN, or silently leave rows out",
            remedy="look at the rows with `--json` and check the vectors for NaN and infinity",
        )
    names, index = np.unique(np.asarray(groups, dtype=np.str_), return_inverse=True)
    tops = np.bincount(index, weights=top, minlength=len(names))
    belows = np.bincount(index, weights=below, minlength=len(names))
    value = float(top.sum() / below.sum())
    if len(names) < 2:
        return Estimate(value, None, None, len(top), len(names))
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(len(names), np.full(len(names), 1.0 / len(names)), size=resamples)
    drawn = (draws @ tops) / (draws @ belows)
    low, high = np.quantile(drawn, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Estimate(value, float(low), float(high), len(top), len(names))


def derange_across_groups(groups: Sequence[str], *, seed: int = 0) -> Int[np.ndarray, " n"]:
    """A permutation of the rows in which no row meets a row of its own document.

    Rows are laid out document by document, in random order of documents and of rows within one, and
    rotated by at least the longest document and at most all rows but it: whatever the rotation drawn
    from that range, each row lands outside its own document, and each row is used exactly once.

    Args:
        groups: the document of each row.
        seed: the same seed gives the same permutation.

    Returns:
        `partner`: row i is paired with row `partner[i]`.

    Raises:
        VectorError: one document holds more than half of the rows, so that no such permutation exists.
    """
    n = len(groups)
    names, index, counts = np.unique(
        np.asarray(groups, dtype=np.str_), return_inverse=True, return_counts=True
    )
    largest = int(counts.max()) if n else 0
    if n < 2 or 2 * largest > n:
        raise VectorError(
            f"{largest} of {n} rows come from one document",
            expected="at least two rows, at most half of them from one document",
            consequence="the shuffled control would pair rows with their own document and look too good",
            remedy="evaluate on more documents, or with fewer rows from each",
        )
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.permutation(n), rng.permutation(len(names))[index]))
    shift = int(rng.integers(largest, n - largest + 1))
    partner = np.empty(n, dtype=np.int64)
    partner[order] = np.roll(order, -shift)
    return partner


@dataclass(frozen=True)
class Calibration:
    """The score below which a reading is flagged `low-score`, and what that costs on held-out rows."""

    threshold: float
    youden_j: float
    """kept_real - passed_shuffled: 1 separates perfectly, 0 not at all."""
    kept_real: float
    """Share of real pairings at or above the threshold."""
    passed_shuffled: float
    """Share of shuffled pairings at or above the threshold."""
    n_real: int
    n_shuffled: int

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(vars(self))


def calibrate_threshold(real: Float[np.ndarray, " n"], shuffled: Float[np.ndarray, " m"]) -> Calibration:
    """The threshold that best tells real pairings from shuffled ones, by Youden's J.

    A reading is kept when score >= threshold. J(t) = share of real pairings kept - share of shuffled
    pairings kept (Youden 1950). Candidates are the scores themselves; the chosen one is moved to the
    middle between it and the next lower score, which changes no decision on these rows and favours
    neither side on new ones. Of several best candidates the lowest is taken: it flags the fewest
    real readings.

    Args:
        real: scores of texts against their own vectors (higher is better; the FVE of a row).
        shuffled: scores of texts against vectors of other documents.

    Raises:
        VectorError: a side is empty or holds a value that is not finite.
    """
    real64, shuffled64 = np.asarray(real, dtype=np.float64), np.asarray(shuffled, dtype=np.float64)
    both = np.concatenate([real64, shuffled64])
    if not len(real64) or not len(shuffled64) or not np.isfinite(both).all():
        raise VectorError(
            f"{len(real64)} real and {len(shuffled64)} shuffled scores, "
            f"{int((~np.isfinite(both)).sum())} of them not finite",
            expected="at least one finite score on each side",
            consequence="`low-score` would flag everything or nothing",
            remedy="evaluate on held-out vectors of at least two documents",
        )
    candidates = np.unique(both)
    kept = 1.0 - np.searchsorted(np.sort(real64), candidates, side="left") / len(real64)
    passed = 1.0 - np.searchsorted(np.sort(shuffled64), candidates, side="left") / len(shuffled64)
    # Rounding may split exact ties by 1e-17; the first within a hair of the best is the lowest threshold.
    best = int(np.argmax(kept - passed >= (kept - passed).max() - 1e-12))
    threshold = candidates[best] if best == 0 else (candidates[best - 1] + candidates[best]) / 2.0
    return Calibration(
        threshold=float(threshold),
        youden_j=float(kept[best] - passed[best]),
        kept_real=float(kept[best]),
        passed_shuffled=float(passed[best]),
        n_real=len(real64),
        n_shuffled=len(shuffled64),
    )
