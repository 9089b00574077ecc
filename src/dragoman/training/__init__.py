"""Supervised training of a pair: verbalizer, reconstructor, and the refit that joins them."""

from __future__ import annotations

from dragoman.training.config import PairConfig, parse_config, read_config
from dragoman.training.stages import PairTraining, Watch

__all__ = ["PairConfig", "PairTraining", "Watch", "parse_config", "read_config"]
