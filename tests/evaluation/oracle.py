"""A pair made of planted functions, whose figures can be worked out by hand.

The oracle writes a vector's direction to `digits` decimals into its text and reads it back, so that its
round trip is exact up to that rounding. A deaf oracle hears nothing: it says the same about every vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dragoman import scaling
from dragoman.evaluation import HeldOut
from dragoman.nla import Decoding, Explanation
from dragoman.nla.verbalizer import VerbalizerLoss
from dragoman.sidecar import Baseline, Extraction, Sidecar

LAYER = 3


def written(vector: torch.Tensor, digits: int) -> str:
    return " ".join(f"{x:.{digits}f}" for x in scaling.normalised(vector[None])[0].tolist())


def planted_set(n: int = 600, d: int = 16, per_document: int = 4, seed: int = 0) -> HeldOut:
    rng = np.random.default_rng(seed)
    vectors = ((rng.normal(size=(n, d)) + 0.8) * rng.uniform(10, 300, (n, 1))).astype(np.float32)
    return HeldOut(
        vectors=vectors,
        doc_ids=[f"doc{i // per_document}" for i in range(n)],
        positions=[50 + i % per_document for i in range(n)],
        references=[written(torch.from_numpy(v), 0) for v in vectors],
        tokens=[f"t{i}" for i in range(n)],
        layer_index=LAYER,
        source={"file": "planted"},
    )


class OracleVerbalizer:
    """Loss per token: 1 nat, plus `gap` where the text is not about the vector; tags are free."""

    def __init__(self, gap: float) -> None:
        self.gap = gap

    def loss(self, vectors: Any, texts: Sequence[str]) -> VerbalizerLoss:
        content = torch.tensor([len(text.split()) for text in texts])
        foreign = torch.tensor([written(v, 0) != t for v, t in zip(vectors, texts, strict=True)])
        nll = content * (1.0 + self.gap * foreign)
        return VerbalizerLoss(nll=nll, tokens=content * 2, content_nll=nll, content_tokens=content)


class Oracle:
    def __init__(
        self,
        d: int = 16,
        *,
        digits: int = 1,
        gap: float = 0.5,
        deaf: bool = False,
        mute_every: int = 0,
        baseline: float | None = None,
    ) -> None:
        self.digits, self.deaf, self.mute_every, self.said = digits, deaf, mute_every, 0
        self.verbalizer = OracleVerbalizer(0.0 if deaf else gap)
        self.layer_index = LAYER
        stored = None if baseline is None else Baseline(raw_variance=baseline, normalised_mean=1.0, n=9)
        extraction = Extraction(
            layer_index=LAYER, base_model="oracle", injection_scale=1.0, mse_scale=None, norm="none"
        )
        self.sidecar = Sidecar(kind="nla_model", d_model=d, extraction=extraction, baseline=stored)

    def explain(self, vectors: torch.Tensor, decoding: Decoding, *, score: bool) -> list[Explanation]:
        return [self._explain(vector) for vector in vectors]

    def _explain(self, vector: torch.Tensor) -> Explanation:
        self.said += 1
        if self.mute_every and self.said % self.mute_every == 0:
            return Explanation(text="", token_ids=[], truncated=True)
        told = torch.ones_like(vector) if self.deaf or not vector.any() else vector
        return Explanation(text=written(told, self.digits), token_ids=[], truncated=False)

    def reconstruct(self, texts: Sequence[str]) -> torch.Tensor:
        assert all(text.strip() for text in texts), "a real reconstructor refuses an empty text"
        return torch.tensor([[float(x) for x in text.split()] for text in texts])
