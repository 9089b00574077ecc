"""What a supervised run learns: a verbalizer or a reconstructor, its loss, and its held-out controls.

A task owns its model and nothing of the loop. Controls stand beside every loss: for the verbalizer the gap
between shuffled and real vectors, which alone shows that the vector is read; for the reconstructor FVE with
both denominators and the FVE against other documents' vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from dragoman.evaluation.fve import baselines
from dragoman.evaluation.stats import derange_across_groups
from dragoman.nla import Reconstructor, Verbalizer
from dragoman.scaling import normalised_mse
from dragoman.training.rows import Rows

EVALUATION_BATCH = 32


class Task(Protocol):
    """What the loop needs to know."""

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Trainable parameters by name."""
        ...

    def loss(self, rows: Rows) -> Tensor:
        """Mean loss of a batch, with gradient."""
        ...

    def evaluate(self, rows: Rows) -> dict[str, float]:
        """Figures on held-out rows, with their controls."""
        ...

    def save(self, folder: Path) -> None:
        """Write the trained weights with their sidecar."""
        ...


class VerbalizerTask:
    """Next-token loss of explanations given vectors."""

    def __init__(self, verbalizer: Verbalizer) -> None:
        self.verbalizer = verbalizer

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Trainable parameters by name."""
        return self.verbalizer.trainable_parameters()

    def loss(self, rows: Rows) -> Tensor:
        """Mean nat a response token, tags included."""
        return self.verbalizer.loss(rows.vectors, rows.texts).mean()

    @torch.no_grad()
    def evaluate(self, rows: Rows) -> dict[str, float]:
        """Loss with the real vectors, and with vectors of other documents.

        Returns:
            `loss`, `shuffled_loss`, `gap` (nat a response token), `content_gap` (nat a token between the
            tags), `rows`.
        """
        partner = torch.from_numpy(derange_across_groups(rows.documents))
        real, shuffled = self._totals(rows, rows.vectors), self._totals(rows, rows.vectors[partner])
        loss, content = real[0] / real[1], real[2] / real[3]
        return {
            "loss": loss,
            "shuffled_loss": shuffled[0] / shuffled[1],
            "gap": shuffled[0] / shuffled[1] - loss,
            "content_gap": shuffled[2] / shuffled[3] - content,
            "rows": len(rows),
        }

    def _totals(self, rows: Rows, vectors: Tensor) -> tuple[float, float, float, float]:
        totals = torch.zeros(4, dtype=torch.float64)
        for start in range(0, len(rows), EVALUATION_BATCH):
            part = slice(start, start + EVALUATION_BATCH)
            loss = self.verbalizer.loss(vectors[part], rows.texts[part])
            sums = (loss.nll, loss.tokens, loss.content_nll, loss.content_tokens)
            totals += torch.stack([value.sum().double().cpu() for value in sums])
        nll, tokens, content_nll, content_tokens = totals.tolist()
        return nll, tokens, content_nll, content_tokens

    def save(self, folder: Path) -> None:
        """Write adapter or full weights, and the sidecar."""
        self.verbalizer.save(folder)


class ReconstructorTask:
    """Normalised MSE between predicted and true vectors."""

    def __init__(self, reconstructor: Reconstructor) -> None:
        self.reconstructor = reconstructor

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Trainable parameters by name, the head among them."""
        return self.reconstructor.trainable_parameters()

    def loss(self, rows: Rows) -> Tensor:
        """Mean of 2(1 - cosine) over the batch."""
        return self.reconstructor.loss(rows.vectors, rows.texts).mean()

    @torch.no_grad()
    def evaluate(self, rows: Rows) -> dict[str, float]:
        """FVE of the texts' own vectors, and of other documents' vectors.

        Returns:
            `mse`, `fve` (raw variance), `fve_mean_direction`, `cosine`, `shuffled_fve`, `rows`; the
            baselines are those of these rows.
        """
        predicted = self.reconstructor.reconstruct(rows.texts)
        base = baselines(rows.vectors)
        mse = float(normalised_mse(predicted, rows.vectors).mean())
        partner = torch.from_numpy(derange_across_groups(rows.documents))
        shuffled = float(normalised_mse(predicted, rows.vectors[partner]).mean())
        return {
            "mse": mse,
            "fve": 1.0 - mse / base.raw_variance,
            "fve_mean_direction": 1.0 - mse / base.normalised_mean,
            "cosine": 1.0 - mse / 2.0,
            "shuffled_fve": 1.0 - shuffled / base.raw_variance,
            "rows": len(rows),
        }

    def save(self, folder: Path) -> None:
        """Write adapter or full weights, head and sidecar."""
        self.reconstructor.save(folder)
