"""The held-out set: raw vectors with their documents, positions and reference explanations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman.activations import VectorReader
from dragoman.errors import VectorError
from dragoman.shapes import VectorArray, Vectors


@dataclass(frozen=True)
class HeldOut:
    """Vectors a pair has not been trained on, a row each in every field.

    Attributes:
        vectors: raw, [n, d_model] float32.
        doc_ids: the document of each row; intervals and controls go by it.
        positions: position of the token in the ids the subject received, from 0.
        references: the explanation a row was built with (what training would have shown).
        tokens: the token at the position, as text; "" where unknown.
        layer_index: the captured block; None where unknown.
        source: where the rows came from, for the report.
    """

    vectors: VectorArray
    doc_ids: Sequence[str]
    positions: Sequence[int]
    references: Sequence[str]
    tokens: Sequence[str] = ()
    layer_index: int | None = None
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        n = len(self.vectors)
        columns = {"doc_ids": self.doc_ids, "positions": self.positions, "references": self.references}
        for name, column in columns.items():
            if len(column) != n:
                raise VectorError(
                    f"{n} vectors but {len(column)} {name}",
                    expected="one value a vector",
                    consequence="vectors would be compared with another row's words",
                    remedy="pass columns of equal length",
                )
        if not self.tokens:
            object.__setattr__(self, "tokens", [""] * n)

    def __len__(self) -> int:
        return len(self.vectors)

    def tensor(self) -> Vectors:
        """The vectors as a torch tensor (a copy: the file's pages may be read-only)."""
        return torch.from_numpy(np.array(self.vectors, dtype=np.float32))

    def rows(self, index: Sequence[int]) -> HeldOut:
        """A subset, in the given order."""
        return replace(
            self,
            vectors=self.vectors[np.asarray(index, dtype=np.int64)],
            doc_ids=[self.doc_ids[i] for i in index],
            positions=[self.positions[i] for i in index],
            references=[self.references[i] for i in index],
            tokens=[self.tokens[i] for i in index],
        )

    def sample(self, n: int, seed: int) -> HeldOut:
        """At most n rows, the same for the same (seed, document, position) in whatever order they lie.

        Each row has a key, the hash of seed, document, position and reference; the n smallest keys are
        taken. A set that grows therefore keeps most of its sample.
        """
        keys = [
            hashlib.blake2b(f"{seed}\0{doc}\0{position}\0{text}".encode(), digest_size=16).digest()
            for doc, position, text in zip(self.doc_ids, self.positions, self.references, strict=True)
        ]
        return self.rows(sorted(range(len(self)), key=keys.__getitem__)[:n])

    def fingerprint(self) -> str:
        """Hash (16 hex) of vectors, documents, positions and references: which rows a figure is about."""
        digest = hashlib.sha256(np.ascontiguousarray(self.vectors, dtype=np.float32).tobytes())
        for row in zip(self.doc_ids, self.positions, self.references, strict=True):
            digest.update(repr(row).encode())
        return digest.hexdigest()[:16]


def _check_columns(path: Path, table: Mapping[str, Sequence[Any]]) -> None:
    checks: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "doc_id": ("a name or number", lambda value: isinstance(value, str | int)),
        "n_raw_tokens": ("a whole number from 1", lambda value: isinstance(value, int) and value > 0),
        "explanation": ("at least one word", lambda value: isinstance(value, str) and bool(value.strip())),
    }
    for name, (expected, fits) in checks.items():
        row = next((row for row, value in enumerate(table[name]) if not fits(value)), None)
        if row is not None:
            raise VectorError(
                f"row {row} of {path.name} has {name} = {str(table[name][row])[:80]!r}",
                expected=f"{expected} in every row",
                consequence="figures would be about other rows or other words than they say",
                remedy="correct or drop the row",
            )


def read_held_out(path: Path) -> HeldOut:
    """Read the `test` file of a data set (see dragoman.datagen) or any file with the same columns.

    Args:
        path: Parquet with `activation_vector`, `doc_id`, `n_raw_tokens`, `explanation`; `token_string`
            and `activation_layer` are used where present.

    Raises:
        VectorError: no file, a damaged one, a missing column, a value missing or of another kind, NaN, or
            more than one layer in it.
        SidecarError: the sidecar is missing or damaged.
    """
    with VectorReader(path) as reader:
        optional = [c for c in ("token_string", "activation_layer") if c in reader.columns]
        table = reader.read_table(["doc_id", "n_raw_tokens", "explanation", *optional]).to_pydict()
        vectors, sidecar = reader.read_vectors(), reader.sidecar
    _check_columns(path, table)
    layers = set(table.get("activation_layer", [])) | (
        {sidecar.extraction.layer_index} if sidecar is not None else set()
    )
    if len(layers) > 1:
        raise VectorError(
            f"{path.name} and its sidecar name the layers {sorted(layers)}",
            expected="vectors of one layer",
            consequence="most of them would be read by a pair that was trained on another layer",
            remedy="write one file for each layer",
        )
    return HeldOut(
        vectors=vectors,
        doc_ids=[str(doc) for doc in table["doc_id"]],
        positions=[int(count) - 1 for count in table["n_raw_tokens"]],
        references=[str(text) for text in table["explanation"]],
        tokens=[str(token) for token in table.get("token_string", [])],
        layer_index=next(iter(layers), None),
        source={"file": path.name},
    )
