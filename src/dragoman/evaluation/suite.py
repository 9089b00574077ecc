"""The `fve` suite: what a pair's words carry of the vectors they were read from.

Four questions, each with its control:

    reference     how much of a vector does the reconstructor (AR) find in the words it was trained on?
    AV gap        does the verbalizer (AV) read its vector? Loss of the reference under the row's own
                  vector against the loss under a vector of another document.
    round trip    vector -> the AV's own greedy words -> vector. The figure a user gets.
    retrieval     is a reconstruction nearer to its own vector than to 255 others?

Controls: words paired with vectors of other documents; the words the AV says about the zero vector
and about the mean vector (what it says when there is nothing to read).

Both denominators are those of the held-out vectors themselves (predict *their* mean), which is the
strictest choice. Scores that a single row gets outside of an evaluation use the baseline stored in the
sidecar; rows carry that as `score`, and the threshold of `low-score` is calibrated on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from dragoman import scaling
from dragoman.errors import VectorError
from dragoman.evaluation.figures import Blank, Losses, Measured, PerRow, Reconstructed, figures_of, rows_of
from dragoman.evaluation.fve import Baselines, baselines, centred_cosine, check_finite, fve
from dragoman.evaluation.held_out import HeldOut, read_held_out
from dragoman.evaluation.report import FveReport
from dragoman.evaluation.retrieval import POOL, retrieval_ranks
from dragoman.evaluation.stats import LEVEL, RESAMPLES, calibrate_threshold, derange_across_groups
from dragoman.nla.explanation import Decoding, Explanation
from dragoman.nla.verbalizer import VerbalizerLoss
from dragoman.runs import Progress, RunFolder
from dragoman.shapes import Vectors
from dragoman.sidecar import Sidecar

CHUNK = 64
"""Rows between two reports of progress and two saved states."""


class MeasuredVerbalizer(Protocol):
    """What the suite asks of a verbalizer."""

    def loss(self, vectors: Vectors, texts: Sequence[str]) -> VerbalizerLoss:
        """Loss of texts given vectors."""
        ...


class MeasuredPair(Protocol):
    """What the suite asks of a pair; `dragoman.nla.Pair` is one."""

    @property
    def sidecar(self) -> Sidecar:
        """Of the AV; its baseline scores single rows."""
        ...

    @property
    def layer_index(self) -> int:
        """The block whose output the pair reads."""
        ...

    @property
    def verbalizer(self) -> MeasuredVerbalizer:
        """The AV."""
        ...

    def explain(self, vectors: Vectors, decoding: Decoding, *, score: bool) -> list[Explanation]:
        """Vectors in words."""
        ...

    def reconstruct(self, texts: Sequence[str]) -> Vectors:
        """Words as vectors."""
        ...


def evaluate_fve(
    pair: MeasuredPair,
    test_set: Path | HeldOut,
    *,
    n: int = 512,
    seed: int = 0,
    decoding: Decoding | None = None,
    work: RunFolder | None = None,
    progress: Progress | None = None,
) -> FveReport:
    """Measure a pair on held-out vectors.

    Args:
        pair: the pair; it is read, never changed.
        test_set: the held-out set or its Parquet file (see `read_held_out`).
        n: vectors to use; all when the set is smaller.
        seed: decides the sample, the pairing of the shuffled control, the pools and the resampling.
        decoding: how the round trip decodes; greedy by default.
        work: a run folder that keeps finished explanations, so that a killed evaluation resumes.
        progress: called with (done, total, "rows" | "explanations" | "reconstructions").

    Raises:
        VectorError: the set is empty, of another layer or width, not finite, or of too few documents.
    """
    decoding = decoding or Decoding()
    everything = read_held_out(test_set) if isinstance(test_set, Path) else test_set
    sample = everything.sample(n, seed)
    _check_fits(pair, sample)
    vectors = sample.tensor()
    base = baselines(vectors)
    partner = torch.from_numpy(derange_across_groups(sample.doc_ids, seed=seed))

    losses = _losses(pair, vectors, sample.references, partner, progress)
    explanations = _explanations(pair, vectors, decoding, work, progress)
    said = [explanation.text for explanation in explanations]
    reference, round_trip = (
        _compare(_reconstruct(pair, texts, progress), vectors, base, partner, seed)
        for texts in (sample.references, said)
    )
    zero_vector, mean_vector = _blanks(pair, vectors, decoding)
    measured = Measured(
        held_out=sample,
        base=base,
        explanations=explanations,
        losses=losses,
        reference=reference,
        round_trip=round_trip,
        zero_vector=zero_vector,
        mean_vector=mean_vector,
        score_baseline=_score_baseline(pair, base),
    )
    return FveReport(
        figures=figures_of(measured, seed=seed),
        rows=rows_of(measured),
        calibration=calibrate_threshold(
            fve(round_trip.mse, measured.score_baseline).numpy(),
            fve(round_trip.shuffled_mse, measured.score_baseline).numpy(),
        ),
        test_set={
            **everything.source,
            "rows_available": len(everything),
            "rows_used": len(sample),
            "documents_used": len(set(sample.doc_ids)),
            "fingerprint": sample.fingerprint(),
        },
        settings=_settings(measured, n, seed, decoding),
    )


def _settings(measured: Measured, n: int, seed: int, decoding: Decoding) -> dict[str, Any]:
    """What the figures depend on beside pair and rows."""
    return {
        "n": n,
        "seed": seed,
        "decoding": asdict(decoding),
        "pool": measured.round_trip.ranks.pool,
        "pools": measured.round_trip.ranks.pools,
        "resamples": RESAMPLES,
        "level": LEVEL,
        "score_baseline": measured.score_baseline,
        "said_about_zero_vector": measured.zero_vector.text,
        "said_about_mean_vector": measured.mean_vector.text,
    }


def _check_fits(pair: MeasuredPair, sample: HeldOut) -> None:
    width, wanted = sample.vectors.shape[1], pair.sidecar.d_model
    if sample.layer_index is not None and sample.layer_index != pair.layer_index:
        found, expected = f"vectors of layer {sample.layer_index}", f"layer {pair.layer_index}, as the pair's"
    elif width != wanted:
        found, expected = f"vectors of width {width}", f"width {wanted}, as the pair's subject"
    else:
        return
    raise VectorError(
        f"the held-out set holds {found}",
        expected=expected,
        consequence="every figure would describe vectors the pair was never meant for",
        remedy="evaluate on the pair's own test set (leave --test out), or on one captured for it",
    )


# ---------------------------------------------------------------- measuring


def _losses(
    pair: MeasuredPair,
    vectors: Vectors,
    texts: Sequence[str],
    partner: Int[Tensor, " n"],
    progress: Progress | None,
) -> Losses:
    """Loss of each reference under its own vector and under one of another document."""
    parts: list[Losses] = []
    for rows in _chunks(len(texts), progress, "rows"):
        chosen = list(texts[rows])
        with torch.no_grad():
            real = pair.verbalizer.loss(vectors[rows], chosen)
            shuffled = pair.verbalizer.loss(vectors[partner[rows]], chosen)
        parts.append(Losses.of(real, shuffled))
    return Losses.joined(parts)


def _explanations(
    pair: MeasuredPair,
    vectors: Vectors,
    decoding: Decoding,
    work: RunFolder | None,
    progress: Progress | None,
) -> list[Explanation]:
    """The AV's words, chunk by chunk; chunks are fixed so that a resumed run batches as the first did."""
    said: list[Explanation] = []
    for rows in _chunks(len(vectors), progress, "explanations"):
        name = f"explanations-{rows.start}"
        saved = None if work is None else work.state(name)
        if saved is None:
            chunk = pair.explain(vectors[rows], decoding, score=False)
            if work is not None:
                work.save_state(name, rows=[asdict(explanation) for explanation in chunk])
        else:
            chunk = [Explanation(**row) for row in saved["rows"]]
        said += chunk
    return said


def _reconstruct(pair: MeasuredPair, texts: Sequence[str], progress: Progress | None) -> Vectors:
    """Words back to vectors; a row of zeros where nothing was said.

    A verbalizer may answer nothing at all, and a reconstructor refuses an empty text. Leaving such rows
    out would reward silence; a zero row has cosine 0 with everything and the error of a right angle.
    """
    spoken = [i for i, text in enumerate(texts) if text.strip()]
    parts: list[Vectors] = []
    for rows in _chunks(len(spoken), progress, "reconstructions"):
        parts.append(pair.reconstruct([texts[i] for i in spoken[rows]]).float().cpu())
    found = torch.cat(parts) if parts else torch.empty(0, pair.sidecar.d_model)
    predicted = torch.zeros(len(texts), pair.sidecar.d_model).index_copy(
        0, torch.tensor(spoken).long(), found
    )
    check_finite(predicted, "reconstructions")
    return predicted


def _compare(
    predicted: Vectors, target: Vectors, base: Baselines, partner: Int[Tensor, " n"], seed: int
) -> Reconstructed:
    """Reconstructions against their own vectors, and each vector against another document's words."""
    return Reconstructed(
        mse=_mse(predicted, target),
        cosine=scaling.cosine(predicted, target).double(),
        centred=centred_cosine(predicted, target, base.centre),
        shuffled_mse=_mse(predicted[partner], target),
        ranks=retrieval_ranks(predicted, target, base.centre, pool=POOL, seed=seed),
    )


def _mse(predicted: Vectors, target: Vectors) -> PerRow:
    # By the cosine, so that a row of zeros (nothing said) costs 2 as any other right angle, not 1.
    return 2.0 * (1.0 - scaling.cosine(predicted, target).double())


def _blanks(pair: MeasuredPair, vectors: Vectors, decoding: Decoding) -> tuple[Blank, Blank]:
    """What the AV says about the zero vector and about the mean vector, held against every row."""
    nothing = torch.stack([torch.zeros_like(vectors[0]), vectors.mean(dim=0)])
    texts = [explanation.text for explanation in pair.explain(nothing, decoding, score=False)]
    predicted = _reconstruct(pair, texts, progress=None)
    zero, mean = (
        Blank(text, _mse(row.expand_as(vectors), vectors)) for text, row in zip(texts, predicted, strict=True)
    )
    return zero, mean


def _score_baseline(pair: MeasuredPair, base: Baselines) -> float:
    """Denominator by which `dragoman explain` scores one row; the held-out one until a pair has its own."""
    stored = pair.sidecar.baseline
    return base.raw_variance if stored is None else stored.raw_variance


def _chunks(total: int, progress: Progress | None, unit: str) -> Iterator[slice]:
    for start in range(0, total, CHUNK):
        stop = min(start + CHUNK, total)
        yield slice(start, stop)
        if progress is not None:
            progress(stop, total, unit)
