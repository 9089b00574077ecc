"""Evaluation: does a pair read, or guess? Figures always stand beside their control, n and interval."""

from __future__ import annotations

from dragoman.evaluation.fve import Baselines, baselines, centred_cosine, fve
from dragoman.evaluation.held_out import HeldOut, read_held_out
from dragoman.evaluation.model_card import render_model_card
from dragoman.evaluation.report import Figure, FveReport, failed_requirements, parse_requirement
from dragoman.evaluation.retrieval import retrieval_ranks
from dragoman.evaluation.stats import bootstrap_by_group, calibrate_threshold, derange_across_groups
from dragoman.evaluation.suite import evaluate_fve

__all__ = [
    "Baselines",
    "Figure",
    "FveReport",
    "HeldOut",
    "baselines",
    "bootstrap_by_group",
    "calibrate_threshold",
    "centred_cosine",
    "derange_across_groups",
    "evaluate_fve",
    "failed_requirements",
    "fve",
    "parse_requirement",
    "read_held_out",
    "render_model_card",
    "retrieval_ranks",
]
