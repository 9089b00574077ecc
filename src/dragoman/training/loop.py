"""The supervised loop: a task, its rows, one optimiser, one run folder.

Batches are a pure function of the config (see `batches`), the optimiser keeps float32 masters, nothing here
draws random numbers: a run that is killed and resumed takes the same steps as one that is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from dragoman.errors import TrainingError
from dragoman.runs import Progress, RunFolder
from dragoman.training.batches import plan_steps
from dragoman.training.checkpoint import TrainingProgress, load_checkpoint, save_checkpoint
from dragoman.training.config import StageConfig
from dragoman.training.optimizer import MasterAdamW
from dragoman.training.rows import Rows
from dragoman.training.tasks import Task

MODEL = "model"
CHECKPOINT = "checkpoint"
FINISHED = "finished"


@dataclass(frozen=True)
class StepReport:
    """What one step did, for a display; `held_out` holds the figures of an evaluation, else nothing."""

    step: int
    total: int
    loss: float
    learning_rate: float
    gradient_norm: float
    skipped: int
    held_out: dict[str, float]


Listener = Callable[[StepReport], None]


def train(
    run: RunFolder,
    task: Task,
    config: StageConfig,
    rows: Rows,
    held_out: Rows,
    *,
    progress: Progress | None = None,
    listener: Listener | None = None,
) -> dict[str, float]:
    """Train to the end of the plan, or go on from the run's last checkpoint.

    Args:
        run: open run folder; receives metrics, `checkpoint/` and at the end `model/`.
        task: the model to train; its parameters are changed in place.
        config: how.
        rows: training rows.
        held_out: rows of other documents; `config.evaluate_rows` of them are used.
        progress: called with (steps done, steps, "steps").
        listener: hears of every step.

    Returns:
        The held-out figures at the end.

    Raises:
        TrainingError: too many non-finite steps in a row, or weights that are not finite.
        RunError: the checkpoint is damaged.
        ResourceError: the disk is full; the last checkpoint stays.
    """
    steps = plan_steps(
        [len(text) for text in rows.texts],
        examples=config.examples,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    sample = held_out.sample(config.evaluate_rows, config.seed)
    optimizer = _optimizer(task, config, len(steps))
    start = load_checkpoint(run.path / CHECKPOINT, optimizer)
    run.rewind(start.step)
    figures: dict[str, float] = {}
    clock = _Clock(start.seconds, config.checkpoint_minutes * 60.0)
    failures = 0
    for step in range(start.step, len(steps)):
        loss = task.loss(rows.take(steps[step]))
        loss.backward()
        norm = optimizer.step()
        failures = 0 if math.isfinite(norm) else _count_failure(failures, config, step)
        last = step + 1 == len(steps)
        figures = task.evaluate(sample) if last or (step + 1) % config.evaluate_every == 0 else {}
        report = StepReport(
            step + 1,
            len(steps),
            float(loss.detach()),
            optimizer.learning_rate(max(0, optimizer.steps - 1)),
            norm,
            optimizer.skipped,
            figures,
        )
        _log(run, report, clock.elapsed())
        if listener is not None:
            listener(report)
        if progress is not None:
            progress(step + 1, len(steps), "steps")
        if last or clock.checkpoint_due():
            save_checkpoint(run.path / CHECKPOINT, optimizer, TrainingProgress(step + 1, clock.elapsed()))
            clock.checkpointed()
    if not figures:  # resumed after the last step, before the model was written
        figures = task.evaluate(sample)
    task.save(run.path / MODEL)
    run.save_state(FINISHED, figures=figures, steps=len(steps), seconds=clock.elapsed())
    return figures


def _optimizer(task: Task, config: StageConfig, total_steps: int) -> MasterAdamW:
    return MasterAdamW(
        task.parameters(),
        learning_rate=config.learning_rate,
        total_steps=total_steps,
        warmup=config.warmup,
        final_learning_rate=config.final_learning_rate,
        weight_decay=config.weight_decay,
        max_gradient_norm=config.max_gradient_norm,
    )


def _count_failure(failures: int, config: StageConfig, step: int) -> int:
    if failures + 1 < config.max_skipped_steps:
        return failures + 1
    raise TrainingError(
        f"{config.max_skipped_steps} steps in a row had non-finite gradients, the last at step {step + 1}",
        expected="finite gradients; a single bad batch is skipped",
        consequence="the rest of the run would be skipped step by step and end untrained",
        remedy="lower the learning rate, or load the subject in float32",
    )


def _log(run: RunFolder, report: StepReport, seconds: float) -> None:
    run.log(
        step=report.step,
        loss=report.loss,
        learning_rate=report.learning_rate,
        gradient_norm=report.gradient_norm,
        skipped=report.skipped,
        seconds=round(seconds, 3),
        **{f"held_out_{name}": value for name, value in report.held_out.items()},
    )


class _Clock:
    """Seconds of this run over all its processes, and when the next checkpoint is due."""

    def __init__(self, earlier: float, interval: float) -> None:
        self._earlier, self._interval = earlier, interval
        self._started = self._last = time.monotonic()

    def elapsed(self) -> float:
        return self._earlier + time.monotonic() - self._started

    def checkpoint_due(self) -> bool:
        return time.monotonic() - self._last >= self._interval

    def checkpointed(self) -> None:
        self._last = time.monotonic()
