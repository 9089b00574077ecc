"""How much of a pair can be trained in a given time, from the measured speed of the forward pass.

Estimates, and called so in the config: a run shows its own time left.
"""

from __future__ import annotations

from dataclasses import dataclass

# How many forward tokens a token of each kind costs. CPU: bf16 measured on 2 cores with SmolLM2-135M
# (forward 3,450 tokens/s, LoRA training 254, greedy decoding in batches of 32 252). Accelerators, assumed: a
# training token is forward, backward and the adapters; decoding is bound by memory.
_TRAINING_COST = {"cpu": 13.5, "cuda": 5.0, "mps": 6.0}
_DECODING_COST = {"cpu": 14.0, "cuda": 25.0, "mps": 20.0}

_AV_TOKENS = 66
"""Prompt and answer of one verbalizer example, mean over the shipped pair's training rows (22 + 44)."""
_AR_TOKENS = 48
_EXPLANATION_TOKENS = 46
_SHARE_USED = 0.9
"""Of the budget; the rest is loading, evaluation and checkpoints."""

# Shares of the documents by split, as the shipped pair has them, with more held out for small runs.
FRACTIONS = {"av_sft": 0.48, "ar_sft": 0.35, "calibration": 0.05, "test": 0.12}
_MIN_VECTORS = 4_200  # below it the held-out set has fewer than 500 vectors and its figures wobble
_MAX_VECTORS = 60_000  # more than the embedded corpora give at 12 positions a passage
_MAX_EPOCHS = 3
_MIN_BATCHES = 8
_POSITIONS = 6

# Sizes of the later stages for one AV example, as in the shipped pair's config.
_RECONSTRUCTOR_EXAMPLES = 1.25
_REFIT_SAMPLES = 0.35
_REFIT_EXAMPLES = 0.83


@dataclass(frozen=True)
class Budget:
    """Sizes that fit a time budget.

    Attributes:
        vectors: captured in all, over all splits.
        positions_per_passage: vectors a passage.
        verbalizer_examples: rows the AV sees.
        reconstructor_examples: rows the AR sees.
        refit_samples: vectors the AV puts into words for the refit.
        refit_examples: rows the AR sees in the refit.
        seconds: estimated time of all stages.
        starved: the budget is too small for figures that mean much.
        saturated: the corpora end before the budget does.
    """

    vectors: int
    positions_per_passage: int
    verbalizer_examples: int
    reconstructor_examples: int
    refit_samples: int
    refit_examples: int
    seconds: float
    starved: bool
    saturated: bool


def plan_budget(
    seconds: float, *, forward_rate: float, depth: float, device: str, batch_size: int, max_tokens: int = 256
) -> Budget:
    """Sizes of every stage for a time budget.

    Args:
        seconds: for the whole pair, from capture to refit.
        forward_rate: tokens a second of a forward through all blocks.
        depth: share of the blocks up to the one read, 0 to 1.
        device: cpu, cuda or mps.
        batch_size: examples are multiples of it.
        max_tokens: longest passage.
    """
    cost = _Cost.of(forward_rate, depth, device, max_tokens)
    time_used = seconds * _SHARE_USED
    coupled = cost.per_example + cost.per_vector / FRACTIONS["av_sft"]
    vectors = round(time_used / coupled / FRACTIONS["av_sft"])
    vectors = min(max(vectors, _MIN_VECTORS), _MAX_VECTORS)
    affordable = int((time_used - vectors * cost.per_vector) / cost.per_example)
    ceiling = int(_MAX_EPOCHS * vectors * FRACTIONS["av_sft"])
    examples = _whole_batches(min(max(affordable, _MIN_BATCHES * batch_size), ceiling), batch_size)
    return Budget(
        vectors=vectors,
        positions_per_passage=_POSITIONS if vectors <= 20_000 else 2 * _POSITIONS,
        verbalizer_examples=examples,
        reconstructor_examples=_whole_batches(round(examples * _RECONSTRUCTOR_EXAMPLES), batch_size),
        refit_samples=max(batch_size, round(examples * _REFIT_SAMPLES)),
        refit_examples=_whole_batches(round(examples * _REFIT_EXAMPLES), batch_size),
        seconds=vectors * cost.per_vector + examples * cost.per_example,
        starved=affordable < 2_000,
        saturated=affordable > ceiling,
    )


@dataclass(frozen=True)
class _Cost:
    """Seconds for capturing one vector, and for one AV example with its part of every later stage."""

    per_vector: float
    per_example: float

    @classmethod
    def of(cls, rate: float, depth: float, device: str, max_tokens: int) -> _Cost:
        training, decoding = _TRAINING_COST[device], _DECODING_COST[device]
        verbalizer = _AV_TOKENS * training
        reconstructor = (_RECONSTRUCTOR_EXAMPLES + _REFIT_EXAMPLES) * _AR_TOKENS * depth * training
        samples = _REFIT_SAMPLES * _EXPLANATION_TOKENS * decoding
        return cls(
            per_vector=max_tokens / _POSITIONS * depth / rate,
            per_example=(verbalizer + reconstructor + samples) / rate,
        )


def _whole_batches(examples: int, batch_size: int) -> int:
    return max(1, round(examples / batch_size)) * batch_size
