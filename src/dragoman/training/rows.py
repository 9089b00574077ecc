"""Rows to learn from: vectors with their explanations and documents, as one split's Parquet holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dragoman.activations.store import VectorReader
from dragoman.errors import TrainingError
from dragoman.shapes import Vectors


@dataclass(frozen=True)
class Rows:
    """Vectors and what belongs to each.

    Attributes:
        vectors: raw, float32, on the CPU.
        texts: one explanation a vector, without tags.
        documents: doc_id a vector; shuffled controls never pair rows of one document.
    """

    vectors: Vectors
    texts: tuple[str, ...]
    documents: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, numbers: Sequence[int] | np.ndarray) -> Rows:
        """The rows of these numbers, in this order."""
        chosen = [int(number) for number in numbers]
        return Rows(
            self.vectors[chosen],
            tuple(self.texts[number] for number in chosen),
            tuple(self.documents[number] for number in chosen),
        )

    def sample(self, count: int, seed: int) -> Rows:
        """`count` rows (all, if fewer) chosen by `seed`, in file order."""
        if count >= len(self):
            return self
        picked = np.random.default_rng(seed).choice(len(self), size=count, replace=False)
        return self.take(np.sort(picked))


def read_rows(path: Path) -> Rows:
    """Read one split as `datagen.prepare_sets` writes it.

    Raises:
        VectorError: a damaged file, or a column is missing.
        TrainingError: the split is empty.
    """
    with VectorReader(path) as reader:
        columns = reader.read_table(["explanation", "doc_id"])
        vectors = torch.from_numpy(reader.read_vectors())
    if not len(vectors):
        raise TrainingError(
            f"{path} holds no rows",
            expected="a split with at least one vector",
            consequence="a model would be saved untrained",
            remedy="raise this split's fraction or max_vectors in the config's data section",
        )
    return Rows(vectors, tuple(columns["explanation"].to_pylist()), tuple(columns["doc_id"].to_pylist()))
