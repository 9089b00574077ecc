"""Fraction of variance explained: what is compared, and the two denominators in use.

Both vectors are brought to norm sqrt(d_model) first (facts: MSE = 2(1 - cos)), then
FVE = 1 - mean(MSE) / baseline, where the baseline is the MSE of a predictor that has read nothing:

    raw_variance     predicts the mean mu of the normalised vectors as it is. This is `fve`.
    normalised_mean  predicts mu brought to norm sqrt(d_model), as a reconstructor's output would be.
                     A worse predictor, hence a larger denominator and a kinder figure. This is
                     `fve_mean_direction`.

A family whose vectors all point one way (Gemma: raw variance 0.03 to 0.06) has cosines near 0.99 from
the mean alone: cosine is never reported without FVE beside it, and the centred cosine removes the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dragoman import scaling
from dragoman.errors import VectorError
from dragoman.shapes import Vectors


@dataclass(frozen=True)
class Baselines:
    """Errors of the two predictors that have read nothing, a row each and on average.

    Attributes:
        centre: mean of the normalised vectors, float64.
        raw_errors: per row mean over d_model of (x - mu)^2.
        direction_errors: per row mean over d_model of (x - mu * sqrt(d_model) / |mu|)^2.
    """

    centre: Float[Tensor, " d_model"]
    raw_errors: Float[Tensor, " n"]
    direction_errors: Float[Tensor, " n"]

    @property
    def raw_variance(self) -> float:
        """Mean of `raw_errors`: the denominator of `fve`."""
        return float(self.raw_errors.mean())

    @property
    def normalised_mean(self) -> float:
        """Mean of `direction_errors`: the denominator of `fve_mean_direction`."""
        return float(self.direction_errors.mean())

    @property
    def n(self) -> int:
        """Rows the mean was taken over."""
        return len(self.raw_errors)


def baselines(vectors: Vectors) -> Baselines:
    """Both denominators of raw vectors, computed on the vectors normalised to sqrt(d_model).

    Args:
        vectors: raw vectors, n >= 2.

    Returns:
        Float64 figures; `normalised_mean` >= `raw_variance` always, since the mean is the best constant.

    Raises:
        VectorError: fewer than two vectors, a value that is not finite, or vectors that all point one way.
    """
    check_finite(vectors, "vectors")
    unit = scaling.normalised(vectors).double()
    centre = unit.mean(dim=0)
    direction = scaling.normalised(centre[None]).double()[0]
    raw_errors = (unit - centre).square().mean(dim=1)
    # The normalisation is float32: identical directions leave deviations of about 1e-14.
    if len(unit) < 2 or float(raw_errors.mean()) < 1e-10:
        raise VectorError(
            f"{len(unit)} vectors, all in one direction",
            expected="at least two vectors that differ",
            consequence="their variance is zero and a fraction of it has no meaning",
            remedy="evaluate on vectors of several documents",
        )
    return Baselines(centre, raw_errors, (unit - direction).square().mean(dim=1))


def fve(mse: Float[Tensor, "*shape"], baseline: float) -> Float[Tensor, "*shape"]:
    """1 - mse / baseline, elementwise: 1 is perfect, 0 is as good as the mean, below 0 is worse than it."""
    assert baseline > 0, "baselines() refuses vectors without variance"
    return 1.0 - mse / baseline


def centred_cosine(
    predicted: Vectors, target: Vectors, centre: Float[Tensor, " d_model"]
) -> Float[Tensor, " n"]:
    """Cosine of predicted and target after both are normalised and `centre` is taken away from both.

    One centre for both sides, the mean of the held-out targets: taking each side's own mean away would
    hide a reconstructor that is off by a constant. Float64; 0 where a centred row is zero.
    """
    return (_directions(predicted, centre) * _directions(target, centre)).sum(dim=1)


def centred_similarities(
    predicted: Vectors, target: Vectors, centre: Float[Tensor, " d_model"]
) -> Float[Tensor, "n n"]:
    """Centred cosine of every predicted row (first axis) with every target row (second axis)."""
    return _directions(predicted, centre) @ _directions(target, centre).T


def check_finite(vectors: Vectors, what: str) -> None:
    """Refuse NaN and infinity by naming the first row.

    Raises:
        VectorError: a value is not finite.
    """
    bad = torch.nonzero(~torch.isfinite(vectors).all(dim=1)).flatten()
    if len(bad):
        raise VectorError(
            f"{len(bad)} of {len(vectors)} {what} hold NaN or infinity, the first is row {int(bad[0])}",
            expected="finite values only",
            consequence="every average over them would be NaN",
            remedy="leave these rows out, or capture again in float32 or bfloat16",
        )


def _directions(vectors: Vectors, centre: Float[Tensor, " d_model"]) -> Float[Tensor, "n d_model"]:
    centred = scaling.normalised(vectors).double() - centre.double()
    return torch.nn.functional.normalize(centred, dim=1, eps=1e-12)
