"""Scaling against plain float64 loops, on fresh random vectors."""

from __future__ import annotations

import math
import secrets
import warnings

import numpy as np
import pytest
import torch
from tests.typecheck import unchecked

from dragoman.errors import DragomanWarning, ScaleError, VectorError
from dragoman.scaling import (
    check_injection_scale,
    cosine,
    normalised,
    normalised_mse,
    rescale,
    resolve_scale,
    suggest_injection_scale,
)


@pytest.fixture
def random_vectors() -> torch.Tensor:
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    return torch.randn(7, 48, generator=generator) * torch.logspace(-3, 3, 7)[:, None]


def plain_rescale(vectors: torch.Tensor, scale: float) -> np.ndarray:
    rows = []
    for row in vectors.double().numpy():
        norm = math.sqrt(sum(value * value for value in row))
        rows.append([value * scale / norm for value in row])
    return np.array(rows)


def test_rescale_gives_every_row_the_norm_asked_for(random_vectors: torch.Tensor) -> None:
    np.testing.assert_allclose(
        rescale(random_vectors, 250.0).double().numpy(), plain_rescale(random_vectors, 250.0), rtol=2e-6
    )


def test_sqrt_d_model_and_a_number_are_the_same_scale(random_vectors: torch.Tensor) -> None:
    torch.testing.assert_close(
        rescale(random_vectors, "sqrt_d_model"), rescale(random_vectors, math.sqrt(48)), rtol=0, atol=0
    )


def test_no_scale_leaves_vectors_as_they_are(random_vectors: torch.Tensor) -> None:
    assert rescale(random_vectors, None) is random_vectors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rescale_keeps_the_dtype_and_is_exact_to_its_rounding(dtype: torch.dtype) -> None:
    vectors = torch.randn(5, 64, dtype=torch.float64).to(dtype)
    scaled = rescale(vectors, 30.0)
    assert scaled.dtype == dtype
    tolerance = 2 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
    np.testing.assert_allclose(
        scaled.double().numpy(), plain_rescale(vectors, 30.0), rtol=tolerance, atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_zero_vector_stays_zero_and_its_gradient_is_finite(dtype: torch.dtype) -> None:
    vectors = torch.zeros(2, 16, dtype=dtype, requires_grad=True)
    scaled = rescale(vectors, 250.0)
    assert torch.equal(scaled, torch.zeros(2, 16, dtype=dtype))
    scaled.sum().backward()
    assert torch.isfinite(vectors.grad).all()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 8e4, 1e25])
def test_neither_tiny_nor_huge_vectors_leave_the_range_of_float32(size: float) -> None:
    direction = torch.randn(1, 32)
    torch.testing.assert_close(rescale(direction * size, 5.0), rescale(direction, 5.0), rtol=1e-5, atol=1e-6)


def test_the_gradient_of_rescale_is_that_of_the_direction() -> None:
    vectors = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: rescale(v, 7.0), (vectors,), atol=1e-6)


def test_normalised_is_float32_with_the_norm_sqrt_d(random_vectors: torch.Tensor) -> None:
    result = normalised(random_vectors.to(torch.bfloat16))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.norm(dim=1), torch.full((7,), math.sqrt(48.0)))


def test_normalised_mse_is_two_times_one_minus_cosine_of_a_plain_loop() -> None:
    predicted, target = torch.randn(9, 33) * 40, torch.randn(9, 33) * 3 + 1
    expected_cosines = [
        float(np.dot(a, b) / math.sqrt(np.dot(a, a) * np.dot(b, b)))
        for a, b in zip(predicted.double().numpy(), target.double().numpy(), strict=True)
    ]
    np.testing.assert_allclose(cosine(predicted, target).numpy(), expected_cosines, atol=2e-6)
    np.testing.assert_allclose(
        normalised_mse(predicted, target).numpy(), [2 * (1 - c) for c in expected_cosines], atol=4e-6
    )


def test_a_row_of_zeros_has_cosine_zero_and_no_nan() -> None:
    assert cosine(torch.zeros(1, 8), torch.ones(1, 8)).tolist() == [0.0]
    assert normalised_mse(torch.zeros(1, 8), torch.ones(1, 8)).tolist() == pytest.approx([1.0])


def test_one_prediction_is_not_broadcast_over_many_targets() -> None:
    for compare in (cosine, normalised_mse):
        with pytest.raises(VectorError, match=r"\(1, 8\).*\(4, 8\)"):
            unchecked(compare)(torch.ones(1, 8), torch.ones(4, 8))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, "raw", True])
def test_a_scale_that_means_nothing_is_refused_by_value(scale) -> None:
    with pytest.raises(ScaleError, match=r"(t|T)he scale is") as raised:
        unchecked(resolve_scale)(scale, 576)
    assert repr(scale) in str(raised.value)


@pytest.mark.parametrize(
    ("mean_norm", "suggestion"),
    [(238, 250), (250, 250), (251, 260), (130.4, 140), (1.0, 1.0), (0.0931, 0.1), (96, 100), (75_000, 75_000),
     (70_123, 71_000), (0.00123, 0.0013), (9.99e9, 1e10), (180, 200), (268, 270)],
)  # fmt: skip
def test_the_suggested_scale_is_a_round_number_just_above_the_mean_norm(mean_norm, suggestion) -> None:
    assert suggest_injection_scale(mean_norm) == suggestion


def test_the_suggested_scale_is_never_below_and_at_most_15_percent_above_the_mean_norm() -> None:
    for mean_norm in np.exp(np.random.default_rng().uniform(-12, 20, size=2000)):
        suggestion = suggest_injection_scale(float(mean_norm))
        assert mean_norm * (1 - 1e-8) <= suggestion <= mean_norm * 1.151
        assert float(f"{suggestion:.2g}") == suggestion


@pytest.mark.parametrize("mean_norm", [0.0, -3.0, math.nan, math.inf])
def test_no_scale_is_suggested_for_a_norm_that_is_none(mean_norm: float) -> None:
    with pytest.raises(ScaleError):
        suggest_injection_scale(mean_norm)


def test_a_scale_below_a_tenth_of_the_median_norm_warns_with_both_numbers() -> None:
    with pytest.warns(DragomanWarning, match=r"scale 3 .*norm 238.*about 250"):
        check_injection_scale(3.0, 238.0)


@pytest.mark.parametrize("scale", [None, 23.9, 200.0, 5000.0])
def test_a_usable_scale_does_not_warn(scale: float | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_injection_scale(scale, 238.0)
