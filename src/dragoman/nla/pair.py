"""A verbalizer and its reconstructor: vector → words → vector, with a score of what the words carry.

A pair's folder holds `pair.json` (subject, layer, provenance), `av/` and `ar/`, with a sidecar in each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dragoman.errors import PairError, TextError
from dragoman.nla.explanation import Decoding, Explanation, Scores
from dragoman.nla.reconstructor import Reconstructor
from dragoman.nla.sources import PAIR_FILE, resolve_folder
from dragoman.nla.vectors import as_vectors
from dragoman.nla.verbalizer import Verbalizer
from dragoman.runs import atomic_folder, atomic_write_json, atomic_write_text, provenance
from dragoman.scaling import cosine, normalised_mse
from dragoman.shapes import Vectors
from dragoman.sidecar import Sidecar, read_sidecar
from dragoman.subjects import load_subject

if TYPE_CHECKING:
    from dragoman.runs import Progress
    from dragoman.subjects import Subject

SCHEMA = "dragoman/pair/1"
MAX_PAIR_BYTES = 1 << 20
EMPTY_MSE = 2.0
"""Normalised MSE of an answer without a word: that of an unrelated direction, since it says nothing."""
_SHARED_KEYS = ("baseline", "score_threshold", "norm_quantiles")


class Pair:
    """A verbalizer with its reconstructor.

    Args:
        verbalizer: vector → text.
        reconstructor: text → vector.
        name: how it was asked for, for reports.

    Raises:
        PairError: the two read different layers, widths or base models.
    """

    def __init__(self, verbalizer: Verbalizer, reconstructor: Reconstructor, *, name: str = "") -> None:
        check_belong_together(verbalizer.sidecar, reconstructor.sidecar)
        self.verbalizer = verbalizer
        self.reconstructor = reconstructor
        self.name = name

    @property
    def subject(self) -> Subject:
        """The frozen model that the pair reads."""
        return self.verbalizer.subject

    @property
    def sidecar(self) -> Sidecar:
        """The verbalizer's sidecar; what it lacks of baseline, threshold and norms is the reconstructor's."""
        own, other = self.verbalizer.sidecar, self.reconstructor.sidecar
        missing = {key: getattr(other, key) for key in _SHARED_KEYS if getattr(own, key) is None}
        return own.model_copy(update=missing)

    @property
    def layer_index(self) -> int:
        """The block whose output the vectors are, counted from 0."""
        return self.verbalizer.sidecar.extraction.layer_index

    def explain(
        self,
        vectors: Any,
        decoding: Decoding | None = None,
        *,
        score: bool = True,
        batch_size: int = 32,
        progress: Progress | None = None,
    ) -> list[Explanation]:
        """Put vectors into words, and say how much of each vector the words carry.

        Args:
            vectors: raw, [n, d_model]: activations, differences, probe or steering directions.
            decoding: default greedy; with `best_of` the candidate of highest cosine is kept.
            score: run the reconstructor and fill cosine, mse and fve.
            batch_size: answers decoded side by side.
            progress: called with (done, n, "vectors"), then (done, texts, "texts") while these are scored.

        Returns:
            One explanation a vector, in order. An answer without a word counts as an unrelated direction
            (cosine 0, mse 2).

        Raises:
            VectorError: no vectors, another width or not finite.
        """
        decoding = decoding or Decoding()
        checked = as_vectors(vectors, self.subject.d_model)
        candidates = self.verbalizer.sample(
            checked, decoding.best_of, decoding, batch_size=batch_size, progress=progress
        )
        flat = [explanation for row in candidates for explanation in row]
        if score or decoding.best_of > 1:
            self._fill_scores(checked.repeat_interleave(decoding.best_of, dim=0), flat, progress)
        # Without a score there is one candidate; ties keep the earliest.
        return [
            max(row, key=lambda explanation: explanation.cosine or 0.0) if len(row) > 1 else row[0]
            for row in candidates
        ]

    def reconstruct(self, texts: Sequence[str], *, progress: Progress | None = None) -> Vectors:
        """Turn explanations into vectors, float32 [n, d_model]; see `Reconstructor.reconstruct`."""
        return self.reconstructor.reconstruct(texts, progress=progress)

    def score(self, vectors: Any, texts: Sequence[str], *, progress: Progress | None = None) -> Scores:
        """How much of each vector its text carries.

        Args:
            vectors: raw, [n, d_model].
            texts: n explanations.
            progress: called with (done, n, "texts").

        Raises:
            VectorError: no vectors, another width or not finite.
            TextError: an empty text, or another number of texts.
        """
        checked = as_vectors(vectors, self.subject.d_model)
        if len(texts) != len(checked):
            raise TextError(
                f"{len(texts)} texts for {len(checked)} vectors",
                expected="one text a vector",
                consequence="vectors would be compared with the texts of others",
                remedy="pass both in the same order and number",
            )
        predicted = self.reconstruct(texts, progress=progress)
        mse = normalised_mse(predicted, checked)
        return Scores(cosine=cosine(predicted, checked), mse=mse, fve=self._fve(mse))

    def _fve(self, mse: torch.Tensor) -> torch.Tensor | None:
        baseline = self.sidecar.baseline
        return None if baseline is None else 1.0 - mse / baseline.raw_variance

    def _fill_scores(
        self, vectors: Vectors, explanations: Sequence[Explanation], progress: Progress | None
    ) -> None:
        said = [row for row, explanation in enumerate(explanations) if explanation.text]
        similar = torch.zeros(len(explanations))
        mse = torch.full((len(explanations),), EMPTY_MSE)
        if said:
            scores = self.score(vectors[said], [explanations[row].text for row in said], progress=progress)
            similar[said], mse[said] = scores.cosine, scores.mse
        fve = self._fve(mse)
        for row, explanation in enumerate(explanations):
            explanation.cosine, explanation.mse = float(similar[row]), float(mse[row])
            explanation.fve = None if fve is None else float(fve[row])


def load_pair(
    spec: str | Path | None = None,
    subject: Subject | str | None = None,
    *,
    av: str | Path | None = None,
    ar: str | Path | None = None,
    merge: bool = True,
    device: str = "auto",
    progress: Progress | None = None,
) -> Pair:
    """Load a pair and, where none is given, the subject it was trained on.

    Args:
        spec: a pair's folder, `zoo:NAME` or `hf:ORG/NAME[@revision]`; None when `av` and `ar` are given.
        subject: the base model, loaded or by name; default is the one that pair.json or the sidecar names.
        av: the verbalizer alone, a folder or `hf:`; wins over the spec's.
        ar: the reconstructor alone, likewise.
        merge: add adapters into copies of the linear layers: faster; False shares all
            weights.
        device: where a subject that is loaded here goes.
        progress: reports fetching and converting of a subject that is loaded here.

    Raises:
        PairError: a half is missing, the halves do not belong together, or the subject is another model.
        SidecarError: a sidecar is missing or disagrees with the live tokenizer.
        FetchError: a hub could not be reached.
        SubjectError: the base model cannot be loaded.
    """
    folder = None if spec is None else resolve_folder(spec)
    described = {} if folder is None else read_description(folder)
    av_folder = _half(folder, av, "av")
    ar_folder = _half(folder, ar, "ar")
    av_sidecar, ar_sidecar = read_sidecar(av_folder), read_sidecar(ar_folder)
    check_belong_together(av_sidecar, ar_sidecar)
    if subject is None:
        subject = str(described.get("subject", {}).get("name") or av_sidecar.extraction.base_model)
    if isinstance(subject, str):
        subject = load_subject(subject, device=device, progress=progress)
    _check_fingerprint(described, subject)
    name = str(spec) if spec is not None else f"{av} + {ar}"
    verbalizer = Verbalizer.load(av_folder, subject, merge=merge)
    reconstructor = Reconstructor.load(ar_folder, subject, merge=merge)
    return Pair(verbalizer, reconstructor, name=name)


def save_pair(
    folder: str | Path,
    verbalizer: Verbalizer,
    reconstructor: Reconstructor,
    *,
    name: str | None = None,
    extra: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write a pair's folder, complete or not at all.

    Args:
        folder: replaced if it is there.
        verbalizer: with its unmerged adapter, or its full weights.
        reconstructor: likewise.
        name: default is the folder's name.
        extra: more keys for pair.json, for example measured figures.
        texts: more files by name, for example a model card.

    Raises:
        PairError: the two do not belong together.
        ResourceError: the disk is full.
    """
    target = Path(folder)
    check_belong_together(verbalizer.sidecar, reconstructor.sidecar)
    extraction = verbalizer.sidecar.extraction
    described = {
        **(extra or {}),
        "schema": SCHEMA,
        "name": name or target.name,
        "subject": {**verbalizer.subject.provenance(), **_identity(verbalizer.subject)},
        "layer_index": extraction.layer_index,
        "d_model": verbalizer.sidecar.d_model,
        "provenance": provenance(),
    }
    with atomic_folder(target) as temporary:
        verbalizer.save(temporary / "av")
        reconstructor.save(temporary / "ar")
        for file, text in (texts or {}).items():
            assert Path(file).name == file, "texts go beside pair.json"
            atomic_write_text(temporary / file, text)
        atomic_write_json(temporary / PAIR_FILE, described)
    return target


def check_belong_together(av: Sidecar, ar: Sidecar) -> None:
    """Raise PairError where two sidecars name swapped roles, or different layers, widths or base models."""
    for wanted, sidecar, other in (("av", av, "ar"), ("ar", ar, "av")):
        if sidecar.role == other:
            raise PairError(
                f"the sidecar of the half given as {wanted} says role {other}",
                expected=f"role {wanted}",
                consequence="a model would be asked for what it was never trained to say",
                remedy="swap the two halves, or load the two halves of one pair",
            )
    ar_layer = ar.extraction.layer_index if ar.ar_layer_index is None else ar.ar_layer_index
    compared = [
        ("layer_index", av.extraction.layer_index, ar_layer),
        ("d_model", av.d_model, ar.d_model),
        ("base_model", av.extraction.base_model, ar.extraction.base_model),
    ]
    for key, of_av, of_ar in compared:
        # An empty base model means that the file does not say.
        if of_av != of_ar and not (key == "base_model" and "" in (of_av, of_ar)):
            raise PairError(
                f"the verbalizer's {key} is {of_av!r}, the reconstructor's {of_ar!r}",
                expected="two halves trained on the same layer of the same subject",
                consequence="words about one space would be scored in another",
                remedy="load the two halves of one pair",
            )


def _half(folder: Path | None, given: str | Path | None, role: str) -> Path:
    if given is not None:
        return resolve_folder(given)
    if folder is not None and (folder / role).is_dir():
        return folder / role
    raise PairError(
        f"no {role} was given" if folder is None else f"{folder} has no folder {role}",
        expected="a pair's folder with av/ and ar/, or both halves by name",
        consequence="a reading could not be made, or not be scored",
        remedy="name a pair (zoo:NAME, a folder, hf:ORG/NAME), or pass both --av and --ar",
    )


def read_description(folder: Path) -> dict[str, Any]:
    """pair.json, or nothing where a folder has none: the sidecars say what is needed to read."""
    path = folder / PAIR_FILE
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_PAIR_BYTES:
            raise ValueError(f"larger than {MAX_PAIR_BYTES} bytes")
        described = json.loads(path.read_text("utf-8"))
        if not isinstance(described, dict) or not isinstance(described.get("subject", {}), dict):
            raise ValueError("not an object with a subject")
    except (OSError, ValueError, RecursionError) as error:
        raise PairError(
            f"{path} is not readable ({error})",
            expected="a JSON object as save_pair writes it",
            consequence="the pair might be run on another subject",
            remedy="write or download the pair again",
        ) from error
    return described


def _identity(subject: Subject) -> dict[str, Any]:
    return {"name": subject.name, "revision": subject.revision, "fingerprint": subject.fingerprint}


def _check_fingerprint(described: Mapping[str, Any], subject: Subject) -> None:
    recorded = described.get("subject", {}).get("fingerprint")
    if recorded is not None and recorded != subject.fingerprint:
        raise PairError(
            f"{subject.name} has the fingerprint {subject.fingerprint}",
            expected=f"{recorded}, the weights this pair was trained on ({described['subject'].get('name')})",
            consequence="the readings would be about another model",
            remedy="load the subject that pair.json names, at its revision",
        )
