"""Natural language autoencoders: a verbalizer puts vectors into words, a reconstructor turns them back."""

from __future__ import annotations

from dragoman.nla.explanation import Decoding, Explanation, Scores
from dragoman.nla.pair import Pair, load_pair, save_pair
from dragoman.nla.reading import Reading, ReadingRow, read_text, read_vectors
from dragoman.nla.reconstructor import Reconstructor, ReconstructorBatch
from dragoman.nla.verbalizer import Verbalizer, VerbalizerBatch, VerbalizerLoss

__all__ = [
    "Decoding",
    "Explanation",
    "Pair",
    "Reading",
    "ReadingRow",
    "Reconstructor",
    "ReconstructorBatch",
    "Scores",
    "Verbalizer",
    "VerbalizerBatch",
    "VerbalizerLoss",
    "load_pair",
    "read_text",
    "read_vectors",
    "save_pair",
]
