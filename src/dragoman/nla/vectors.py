"""The door through which vectors enter a pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dragoman.errors import SidecarError, VectorError
from dragoman.shapes import Vectors
from dragoman.sidecar import Sidecar
from dragoman.subjects import Subject


def as_vectors(vectors: Any, d_model: int) -> Vectors:
    """Vectors as a float32 tensor on the CPU, checked.

    Args:
        vectors: a tensor, an array or nested sequences, [n, d_model]; a single [d_model] vector becomes one
            row.
        d_model: width expected.

    Raises:
        VectorError: no vectors, another width, NaN or infinity, or nothing that is a matrix of numbers.
    """
    tensor = _as_tensor(vectors)
    if tensor.ndim == 1 and tensor.numel() > 0:
        tensor = tensor[None]
    if tensor.numel() == 0:
        raise _error(
            "no vectors were given", f"at least one vector of width {d_model}", "pass at least one vector"
        )
    if tensor.ndim != 2 or tensor.shape[1] != d_model:
        raise _error(
            f"vectors of shape {tuple(tensor.shape)}",
            f"[n, {d_model}], the width of the pair's subject",
            "use vectors of the pair's subject, or the pair that was trained for these vectors",
        )
    bad = ~torch.isfinite(tensor).all(dim=1)
    if bool(bad.any()):
        raise _error(
            f"{int(bad.sum())} of {len(tensor)} vectors hold NaN or infinity, the first is row "
            f"{int(bad.nonzero()[0])}",
            "finite numbers",
            "drop these rows, or capture them again (fp16 overflow is a frequent cause: use bf16 or fp32)",
        )
    return tensor


def check_width(sidecar: Sidecar, subject: Subject) -> None:
    """Raise SidecarError where a sidecar's d_model is not the subject's."""
    if sidecar.d_model != subject.d_model:
        raise SidecarError(
            f"the sidecar says d_model {sidecar.d_model}, {subject.name} has {subject.d_model}",
            expected="the sidecar of this subject",
            consequence="vectors of another model would be read",
            remedy="load the base model that the sidecar names, or the pair of this subject",
        )


def _as_tensor(vectors: Any) -> torch.Tensor:
    if isinstance(vectors, torch.Tensor):
        return vectors.detach().to("cpu", torch.float32)
    try:
        if isinstance(vectors, list | tuple) and vectors and isinstance(vectors[0], torch.Tensor):
            return torch.stack([row.detach().to("cpu", torch.float32) for row in vectors])
        return torch.from_numpy(np.array(vectors, dtype=np.float32))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _error(
            f"vectors that are no matrix of numbers ({error})",
            "[n, d_model] numbers",
            "pass a tensor or an array",
        ) from error


def _error(found: str, expected: str, remedy: str) -> VectorError:
    return VectorError(
        found, expected=expected, consequence="the answer would describe no real vector", remedy=remedy
    )
