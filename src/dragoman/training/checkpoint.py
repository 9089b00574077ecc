"""Checkpoints of a run: a folder that is replaced as a whole, so a kill leaves the old or the new one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dragoman.errors import RunError, TrainingError
from dragoman.runs import atomic_folder, atomic_write_json, check_disk_space
from dragoman.training.optimizer import MasterAdamW

_STATE = "optimizer.safetensors"
_PROGRESS = "progress.json"


@dataclass(frozen=True)
class TrainingProgress:
    """Where a run stands: `step` batches were taken, `seconds` were spent on them in all processes."""

    step: int
    seconds: float


def save_checkpoint(folder: Path, optimizer: MasterAdamW, progress: TrainingProgress) -> None:
    """Write masters, moments and position.

    Raises:
        TrainingError: a weight is not finite; the previous checkpoint stays.
        ResourceError: the disk is full; the previous checkpoint stays.
    """
    state = optimizer.state()
    check_finite(state)
    check_disk_space(folder.parent, sum(t.numel() * t.element_size() for t in state.values()))
    with atomic_folder(folder) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary / _STATE)
        atomic_write_json(temporary / _PROGRESS, asdict(progress))


def load_checkpoint(folder: Path, optimizer: MasterAdamW) -> TrainingProgress:
    """Restore the optimiser and the parameters it holds; step 0 where there is no checkpoint yet.

    Raises:
        RunError: the checkpoint is damaged or of other parameters.
    """
    if not folder.is_dir():
        return TrainingProgress(0, 0.0)
    try:
        optimizer.load_state(load_file(folder / _STATE))
        return TrainingProgress(**orjson.loads((folder / _PROGRESS).read_bytes()))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(
            f"the checkpoint {folder} cannot be restored ({type(error).__name__}: {error})",
            expected="a checkpoint that this run wrote",
            consequence="training would go on from half-restored weights",
            remedy="remove that folder to start this stage anew, or restore it from a copy",
        ) from error


def check_finite(tensors: dict[str, Tensor]) -> None:
    """Raise TrainingError naming the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise TrainingError(
                f"{name} holds NaN or infinity",
                expected="finite weights",
                consequence="a ruined model would replace the last good checkpoint",
                remedy="lower the learning rate; the last good checkpoint is kept, so run again to resume",
            )
