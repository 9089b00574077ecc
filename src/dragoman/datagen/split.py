"""Splits by document: a keyed hash of the document's id, so that no text stands on both sides.

The same (seed, document) lands in the same split whatever else the corpus holds, in whatever order it is
read and however many processes read it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from dragoman.errors import ConfigError


def assign_split(doc_id: str, fractions: Mapping[str, float], seed: int) -> str:
    """Name of the split that a document belongs to.

    Args:
        doc_id: id of the document (not of a passage of it).
        fractions: share of the documents by split; sums to 1. Its order does not matter.
        seed: another seed gives an independent assignment.

    Raises:
        ConfigError: no split, a negative share, or a sum other than 1.
    """
    check_fractions(fractions)
    place = keyed_uniform(seed, "split", doc_id)
    edge = 0.0
    # By name: a config written as JSON and read back may have its keys in another order.
    names = sorted(fractions)
    for name in names:
        edge += fractions[name]
        if place < edge:
            return name
    # Rounding can leave the last edge at 1 - 2^-53; an empty last split must still not receive it.
    return next(name for name in reversed(names) if fractions[name] > 0)


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Refuse shares that do not divide a whole."""
    total = math.fsum(fractions.values())
    fine = bool(fractions) and all(math.isfinite(share) and share >= 0 for share in fractions.values())
    if fine and math.isclose(total, 1.0, abs_tol=1e-6):
        return
    raise ConfigError(
        f"The split fractions are {dict(fractions)}, together {total:g}",
        expected="shares that are not negative and sum to 1",
        consequence="documents would fall out of every split, or the last split would be larger than it says",
        remedy="make the fractions sum to 1",
    )


def keyed_uniform(seed: int, purpose: str, key: str) -> float:
    """A number in [0, 1) that depends on (seed, purpose, key) alone: the top 53 bits of a SHA-256."""
    digest = hashlib.sha256(f"{seed}\0{purpose}\0{key}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)
