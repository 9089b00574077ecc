"""The only place where the norm of a vector changes.

Vectors on disk are raw. Their norm changes twice: at injection, to the sidecar's injection scale, and
before a comparison, to sqrt(d_model), so that the mean squared error is 2 (1 - cos), whatever the lengths.
"""

from __future__ import annotations

import math
import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from dragoman.errors import DragomanWarning, ScaleError, VectorError
from dragoman.shapes import Vectors
from dragoman.sidecar import Scale

__all__ = [
    "Scale",
    "check_injection_scale",
    "cosine",
    "normalised",
    "normalised_mse",
    "rescale",
    "resolve_scale",
    "suggest_injection_scale",
]

_EPSILON = 1e-12
"""Added to the squared norm of a vector whose largest entry is 1: it matters for the zero vector alone."""

_ROUND_MANTISSAS = (1.0, 2.0, 2.5, 5.0, 10.0)
_ROUND_ENOUGH = 1.15
"""A rounder number is preferred when it lies at most this factor above the mean norm."""


def resolve_scale(scale: Scale, d_model: int) -> float | None:
    """The L2 norm that `scale` stands for; None means that vectors stay raw.

    Args:
        scale: a norm, None (raw), or "sqrt_d_model".
        d_model: width of the residual stream.

    Raises:
        ScaleError: the scale is not finite, not positive, or another word.
    """
    if scale is None:
        return None
    if scale == "sqrt_d_model":
        return math.sqrt(d_model)
    # Configs and sidecars are read from files: a word or a bool can arrive here whatever the annotation says.
    if isinstance(scale, (str, bool)) or not math.isfinite(scale) or scale <= 0:
        raise ScaleError(
            f"the scale is {scale!r}",
            expected='a finite norm above 0, null (raw), or "sqrt_d_model"',
            consequence="vectors would be injected or compared with a norm that means nothing",
            remedy="correct the scale in the sidecar or the config",
        )
    return float(scale)


def rescale(vectors: Vectors, scale: Scale) -> Vectors:
    """Vectors with the L2 norm `scale`, in their own dtype; the zero vector stays zero.

    The maths is float32 (float64 for float64 input). Each row is first divided by its largest entry, so that
    neither the squares of a Gemma-sized stream (norm 80,000) nor those of a tiny one leave the range.

    Args:
        vectors: any float dtype, [n d_model].
        scale: see `resolve_scale`; None returns the vectors as they are.

    Raises:
        ScaleError: see `resolve_scale`.
    """
    target = resolve_scale(scale, vectors.shape[-1])
    if target is None:
        return vectors
    precise = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    largest = precise.detach().abs().amax(dim=-1, keepdim=True)
    bounded = precise / torch.where(largest > 0, largest, torch.ones_like(largest))
    norms = torch.sqrt(bounded.square().sum(dim=-1, keepdim=True) + _EPSILON)
    return (bounded * (target / norms)).to(vectors.dtype)


def normalised(vectors: Vectors) -> Float[Tensor, "n d_model"]:
    """Vectors with the norm sqrt(d_model), as float32: the form in which they are compared."""
    return rescale(vectors.float(), "sqrt_d_model")


def normalised_mse(predicted: Vectors, target: Vectors) -> Float[Tensor, " n"]:
    """Mean over d_model of the squared difference after `normalised` on both sides, per row.

    It equals 2 (1 - cos): 0 for the same direction, 2 for orthogonal rows, 4 for opposite ones.

    Raises:
        VectorError: the two have different shapes.
    """
    _check_same_shape(predicted, target)
    return (normalised(predicted) - normalised(target)).square().mean(dim=-1)


def cosine(predicted: Vectors, target: Vectors) -> Float[Tensor, " n"]:
    """Cosine of the angle between the rows of the two; 0 where a row is zero.

    Raises:
        VectorError: the two have different shapes.
    """
    _check_same_shape(predicted, target)
    return (normalised(predicted) * normalised(target)).mean(dim=-1)


def suggest_injection_scale(mean_norm: float) -> float:
    """A round number at or just above the mean norm of a layer's vectors.

    The next of 1, 2, 2.5, 5 times a power of ten when it is at most 15 % away (238 becomes 250), otherwise
    the mean norm rounded up to two significant digits (130.4 becomes 140).

    Raises:
        ScaleError: the mean norm is not finite or not positive.
    """
    if not math.isfinite(mean_norm) or mean_norm <= 0:
        raise ScaleError(
            f"the mean norm of the layer's vectors is {mean_norm}",
            expected="a finite norm above 0",
            consequence="no injection scale could be derived from it",
            remedy="check the captured vectors for NaN, infinities or all zeros",
        )
    power = 10.0 ** math.floor(math.log10(mean_norm))
    rounder = next(m * power for m in _ROUND_MANTISSAS if m * power >= mean_norm * (1 - 1e-9))
    if rounder <= mean_norm * _ROUND_ENOUGH:
        return float(f"{rounder:.2g}")
    step = power / 10
    return float(f"{math.ceil(mean_norm / step - 1e-9) * step:.2g}")


def check_injection_scale(scale: float | None, norms_median: float) -> None:
    """Warns when vectors would enter with less than a tenth of the layer's median norm.

    At scale 3 against a mean norm of 238 a verbalizer did not learn at all (gap 0.000 nat), at 200 it did.

    Args:
        scale: the resolved injection scale; None (raw) never warns.
        norms_median: median L2 norm of the layer's vectors.
    """
    if scale is not None and scale < norms_median / 10:
        warnings.warn(
            f"The injection scale {scale:g} is below a tenth of the layer's median norm {norms_median:.4g}: "
            "a verbalizer trained so hardly sees its vector. "
            f"Use about {suggest_injection_scale(norms_median):g}.",
            DragomanWarning,
            stacklevel=2,
        )


def _check_same_shape(predicted: Tensor, target: Tensor) -> None:
    if predicted.shape != target.shape:
        raise VectorError(
            f"predicted vectors have the shape {tuple(predicted.shape)}",
            expected=f"the shape of the targets, {tuple(target.shape)}",
            consequence="rows would be compared with the wrong rows by broadcasting",
            remedy="pass one prediction for each target, of the same width",
        )
