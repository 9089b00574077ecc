"""The loop on a task small enough to solve by hand, and on a real tiny verbalizer that is killed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dragoman.errors import RunError, TrainingError
from dragoman.runs import RunFolder
from dragoman.training.config import StageConfig
from dragoman.training.loop import train
from dragoman.training.rows import Rows


class LinearTask:
    """Least squares: the text's number of letters from the vector."""

    def __init__(self, d_model=4, poison=(), stop_at=None):
        self.weight = nn.Parameter(torch.zeros(d_model))
        self.calls = 0
        self.poison = set(poison)
        self.stop_at = stop_at
        self.saved = 0

    def parameters(self):
        return {"weight": self.weight}

    def loss(self, rows):
        self.calls += 1
        if self.stop_at is not None and self.calls > self.stop_at:
            raise KeyboardInterrupt
        target = torch.tensor([float(len(text)) for text in rows.texts])
        loss = ((rows.vectors @ self.weight) - target).square().mean()
        return loss * math.nan if self.calls in self.poison else loss

    @torch.no_grad()
    def evaluate(self, rows):
        return {"loss": float(self.loss_value(rows)), "rows": len(rows)}

    def loss_value(self, rows):
        target = torch.tensor([float(len(text)) for text in rows.texts])
        return ((rows.vectors @ self.weight) - target).square().mean()

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.saved += 1


def _rows(n=64, d_model=4):
    vectors = torch.randn(n, d_model).clamp(-2.0, 2.0)
    vectors[:, 1] = 1.0  # the constant that makes lengths linear in the vector
    texts = tuple("x" * round(9 + 4 * float(v[0])) for v in vectors)
    return Rows(vectors, texts, tuple(f"doc{i // 4}" for i in range(n)))


def _config(**changes):
    settings = {"learning_rate": 0.05, "examples": 320, "batch_size": 8, "evaluate_every": 10, **changes}
    return StageConfig(**settings)


def _run(folder):
    return RunFolder.open(folder, {"a": 1}, kind="train-test")


def test_training_lowers_the_held_out_loss_and_logs_every_step(tmp_path):
    rows, task = _rows(), LinearTask()
    with _run(tmp_path / "run") as run:
        before = task.evaluate(rows)["loss"]
        figures = train(run, task, _config(learning_rate=0.5), rows, rows)
        metrics = run.metrics()
    assert figures["loss"] < 0.6 * before
    assert [line["step"] for line in metrics] == list(range(1, 41))
    assert [line["step"] for line in metrics if "held_out_loss" in line] == [10, 20, 30, 40]
    assert task.saved == 1


@pytest.mark.parametrize("stop_at", [1, 13, 39])
def test_an_interrupted_run_ends_with_the_weights_and_metrics_of_an_uninterrupted_one(tmp_path, stop_at):
    rows = _rows()
    config = _config(checkpoint_minutes=1e-9)
    whole = LinearTask()
    with _run(tmp_path / "whole") as run:
        train(run, whole, config, rows, rows)
        expected = [(line["step"], line["loss"]) for line in run.metrics()]
    with _run(tmp_path / "cut") as run, pytest.raises(KeyboardInterrupt):
        train(run, LinearTask(stop_at=stop_at), config, rows, rows)
    resumed = LinearTask()
    with _run(tmp_path / "cut") as run:
        train(run, resumed, config, rows, rows)
        assert [(line["step"], line["loss"]) for line in run.metrics()] == expected
    assert resumed.calls == 40 - stop_at
    assert torch.equal(resumed.weight, whole.weight)


def test_steps_after_the_last_checkpoint_are_taken_and_logged_again(tmp_path):
    rows, config = _rows(), _config(checkpoint_minutes=60.0)
    with _run(tmp_path / "cut") as run, pytest.raises(KeyboardInterrupt):
        train(run, LinearTask(stop_at=7), config, rows, rows)
    with _run(tmp_path / "cut") as run:
        train(run, LinearTask(), config, rows, rows)
        assert [line["step"] for line in run.metrics()] == list(range(1, 41))


def test_a_single_bad_batch_is_skipped_and_counted_but_many_in_a_row_stop_the_run(tmp_path):
    rows = _rows()
    with _run(tmp_path / "one") as run:
        task = LinearTask(poison={5})
        train(run, task, _config(), rows, rows)
        assert run.metrics()[-1]["skipped"] == 1
        assert torch.isfinite(task.weight).all()
    with _run(tmp_path / "many") as run, pytest.raises(TrainingError, match="4 steps in a row"):
        train(run, LinearTask(poison=range(9, 100)), _config(max_skipped_steps=4), rows, rows)


def test_a_damaged_checkpoint_is_refused_and_not_half_restored(tmp_path):
    rows, config = _rows(), _config(checkpoint_minutes=1e-9)
    with _run(tmp_path / "cut") as run, pytest.raises(KeyboardInterrupt):
        train(run, LinearTask(stop_at=7), config, rows, rows)
    state = tmp_path / "cut" / "checkpoint" / "optimizer.safetensors"
    state.write_bytes(state.read_bytes()[:-9])
    with _run(tmp_path / "cut") as run, pytest.raises(RunError, match="cannot be restored"):
        train(run, LinearTask(), config, rows, rows)
