"""Training and test sets: corpora, passages, document splits, capture, extractive explanations."""

from __future__ import annotations

from dragoman.datagen.corpora import Document, load_corpus
from dragoman.datagen.extractive import Extractor
from dragoman.datagen.passages import Passage, cut_passages
from dragoman.datagen.split import assign_split

__all__ = ["Document", "Extractor", "Passage", "assign_split", "cut_passages", "load_corpus"]
