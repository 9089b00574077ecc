"""Hidden states at block outputs: which positions to read, one truncated forward, stores on disk."""

from __future__ import annotations

from dragoman.activations.capture import Captured, capture
from dragoman.activations.positions import PositionRule, parse_position_rule
from dragoman.activations.store import VectorReader, VectorWriter, load_vectors

__all__ = [
    "Captured",
    "PositionRule",
    "VectorReader",
    "VectorWriter",
    "capture",
    "load_vectors",
    "parse_position_rule",
]
