from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dragoman.training.optimizer import MasterAdamW


def _optimizer(parameters, **changes):
    settings = {
        "learning_rate": 0.01,
        "total_steps": 40,
        "warmup": 0.1,
        "final_learning_rate": 0.1,
        "weight_decay": 0.05,
        "max_gradient_norm": 0.5,
        **changes,
    }
    return MasterAdamW(parameters, **settings)


def _by_hand(weight, gradients, optimizer):
    """AdamW with clipping as the paper writes it, float64, one scalar at a time."""
    weight = [float(w) for w in weight]
    first = [0.0] * len(weight)
    second = [0.0] * len(weight)
    for step, gradient in enumerate(gradients):
        norm = math.sqrt(sum(float(g) ** 2 for g in gradient))
        clip = min(1.0, 0.5 / (norm + 1e-6))
        rate = optimizer.learning_rate(step)
        for i, g in enumerate(float(g) * clip for g in gradient):
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.95 * second[i] + 0.05 * g * g
            corrected = first[i] / (1 - 0.9 ** (step + 1))
            scale = math.sqrt(second[i] / (1 - 0.95 ** (step + 1))) + 1e-8
            weight[i] -= rate * 0.05 * weight[i] + rate * corrected / scale
    return weight


def test_steps_equal_adamw_written_out_in_float64():
    parameter = nn.Parameter(torch.randn(5))
    start = parameter.detach().clone()
    optimizer = _optimizer({"w": parameter})
    gradients = torch.randn(12, 5) * torch.tensor([[3.0], [0.1]]).repeat(6, 1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = torch.tensor(_by_hand(start, gradients, optimizer))
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


def test_masters_collect_updates_that_bfloat16_would_round_away():
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = _optimizer(
        {"w": parameter}, learning_rate=1e-4, weight_decay=0.0, total_steps=200, warmup=0.0
    )
    for _ in range(200):
        parameter.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.step()
    # One update is a fortieth of bfloat16's spacing at 1; together they are more than two units.
    assert parameter.item() < 0.99


def test_a_non_finite_gradient_changes_nothing_and_is_counted():
    parameter = nn.Parameter(torch.randn(4))
    other = nn.Parameter(torch.randn(4))
    optimizer = _optimizer({"w": parameter, "o": other})
    before = parameter.detach().clone(), other.detach().clone()
    parameter.grad = torch.tensor([1.0, math.nan, 1.0, 1.0])
    other.grad = torch.ones(4)
    assert not math.isfinite(optimizer.step())
    assert optimizer.skipped == 1
    assert optimizer.steps == 0
    assert torch.equal(parameter, before[0])
    assert torch.equal(other, before[1])
    assert parameter.grad is None


def test_a_restored_optimizer_goes_on_exactly_as_the_original():
    parameter = nn.Parameter(torch.randn(6, 3).bfloat16())
    optimizer = _optimizer({"w": parameter})
    gradients = torch.randn(10, 6, 3).bfloat16()
    for gradient in gradients[:4]:
        parameter.grad = gradient.clone()
        optimizer.step()
    copy = nn.Parameter(torch.zeros(6, 3).bfloat16())
    resumed = _optimizer({"w": copy})
    resumed.load_state({name: tensor.clone() for name, tensor in optimizer.state().items()})
    for gradient in gradients[4:]:
        parameter.grad, copy.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        resumed.step()
    assert torch.equal(parameter, copy)
    assert torch.equal(optimizer.state()["master.w"], resumed.state()["master.w"])


@pytest.mark.parametrize("total", [2, 7, 100])
def test_the_schedule_rises_to_the_peak_and_falls_to_the_final_fraction(total):
    optimizer = _optimizer({"w": nn.Parameter(torch.zeros(1))}, total_steps=total)
    rates = [optimizer.learning_rate(step) for step in range(total + 1)]
    assert max(rates) == pytest.approx(0.01)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.001)
