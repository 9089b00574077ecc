"""Sets of (vector, explanation) rows: corpora → plan → capture → explanations → one Parquet file a split.

The output folder is a run folder. Work is kept shard by shard, so that a run killed at any moment goes on
from the last whole shard and ends with the same rows; a finished folder is recognised by its config and
reused. Vectors stay raw.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from dragoman.activations.capture import capture
from dragoman.activations.store import VectorReader, VectorWriter
from dragoman.datagen.config import HELD_OUT, CorpusSpec, DataConfig
from dragoman.datagen.corpora import corpus_fingerprint
from dragoman.datagen.extractive import Extractor
from dragoman.datagen.plan import Item, Plan, make_plan
from dragoman.errors import RunError
from dragoman.runs import Progress, RunFolder, atomic_write_json, content_hash, provenance, remove_temporaries
from dragoman.sidecar import Extraction, Sidecar
from dragoman.subjects import Compute, Subject

__all__ = ["HELD_OUT", "CorpusSpec", "DataConfig", "prepare_sets", "read_counts", "recorded_compute"]

EXTRA_COLUMNS = {
    "passage_id": pa.string(),
    "corpus": pa.string(),
    "token_id": pa.int64(),
    "token_string": pa.string(),
    "explanation": pa.string(),
}
"""Columns beyond the store's: `token_id` and `token_string` are the position's own."""

_KIND = "data"
_RECIPE = 1
"""Raised whenever cleaning, passages, positions or explanations change: a finished folder that an older
recipe made is then not taken for this one's."""
_SHARDS = "shards"
_QUANTILES = {"p001": 0.001, "p50": 0.5, "p999": 0.999}


def prepare_sets(
    subject: Subject,
    config: DataConfig,
    out: Path,
    progress: Progress | None = None,
    *,
    splits: Collection[str] | None = None,
) -> dict[str, Path]:
    """Make the sets, or go on making them, or find them made.

    Args:
        subject: whose states are captured.
        config: what is captured.
        out: run folder of the sets; holds `SPLIT.parquet`, its sidecars, `counts.json`.
        progress: hears of corpora while planning and of vectors while capturing.
        splits: capture these alone, with the rows and explanations they have beside the others; an
            evaluation asks for the held-out one. None captures all.

    Returns:
        For each split with a share its Parquet file.

    Raises:
        RunError: the folder is in use, holds another config, or was begun in another dtype.
        CorpusError, ConfigError, FetchError: as `make_plan`.
        ResourceError: disk or memory ran out; whole shards stay.
    """
    identity = _identity(subject, config, splits)
    shards_folder = out / _SHARDS
    # A finished folder needs no lock: it does not change any more.
    if (finished := _finished(out, identity)) and not shards_folder.exists():
        return finished
    with RunFolder.open(out, identity, kind=_KIND) as run:
        # The process that held the folder before may have finished, or was killed while it tidied up.
        if finished := _finished(out, identity):
            shutil.rmtree(shards_folder, ignore_errors=True)
            return finished
        _keep_compute(run, subject)
        plan = make_plan(subject, config, progress)
        extractor = Extractor.fit(plan.training_texts())
        if splits is not None:
            plan = plan.only(splits)
        sidecar = _sidecar(subject, config, run)
        shards = _capture_shards(subject, config, plan, extractor, sidecar, run, progress)
        training = [part for split, parts in shards.items() if split != HELD_OUT for part in parts]
        sidecar = sidecar.model_copy(
            update={"norm_quantiles": _norm_quantiles(training) if training else None}
        )
        files = {
            split: _joined(out / f"{split}.parquet", parts, subject.d_model, config, sidecar)
            for split, parts in shards.items()
        }
        atomic_write_json(out / "counts.json", plan.counts())
        run.save_state("finished", files={split: path.name for split, path in files.items()})
        shutil.rmtree(shards_folder)
    return files


def read_counts(out: Path) -> dict[str, Any]:
    """Documents, passages, tokens and vectors of finished sets, by corpus and by split."""
    return orjson.loads((out / "counts.json").read_bytes())


def recorded_compute(out: Path) -> Compute | None:
    """How the subject ran when the folder was begun; load it the same way to resume to the same bytes."""
    path = out / "state-compute.json"
    return Compute.from_json(orjson.loads(path.read_bytes())) if path.is_file() else None


# --- identity -------------------------------------------------------------------------------------------


def _identity(subject: Subject, config: DataConfig, splits: Collection[str] | None) -> dict[str, Any]:
    """What the rows depend on. Equal identities give equal rows, up to rounding of the hardware."""
    return {
        **({} if splits is None else {"splits": sorted(splits)}),
        "subject": {"name": subject.name, "revision": subject.revision, "fingerprint": subject.fingerprint},
        "data": config.model_dump(mode="json"),
        "sources": {spec.name: corpus_fingerprint(spec.name) for spec in config.corpora},
    }


def _finished(out: Path, identity: Mapping[str, Any]) -> dict[str, Path] | None:
    """The files of a finished folder of this identity, or None."""
    state, config = out / "state-finished.json", out / "config.json"
    if not (state.is_file() and config.is_file()):
        return None
    if content_hash(orjson.loads(config.read_bytes())) != content_hash(identity):
        return None
    files = {split: out / name for split, name in orjson.loads(state.read_bytes())["files"].items()}
    return files if all(path.is_file() for path in files.values()) else None


def _keep_compute(run: RunFolder, subject: Subject) -> None:
    recorded = recorded_compute(run.path)
    if recorded is None:
        run.save_state("compute", **subject.compute.to_json())
    elif recorded.dtype != subject.compute.dtype:
        raise RunError(
            f"{run.path} was begun in {recorded.dtype} and the subject now runs in {subject.compute.dtype}",
            expected="one dtype for all vectors of a set",
            consequence="half of the vectors would be rounded differently from the other half",
            remedy=f"load the subject with dtype {str(recorded.dtype).removeprefix('torch.')}, "
            "or name another folder",
        )


def _sidecar(subject: Subject, config: DataConfig, run: RunFolder) -> Sidecar:
    """What the vectors are. Marker and prompts belong to a model and are not decided here."""
    return Sidecar(
        kind="nla_dataset",
        d_model=subject.d_model,
        extraction=Extraction(layer_index=config.layer_index, base_model=subject.name),
        provenance=provenance(
            subject=subject.provenance(),
            data=run.config["data"],
            sources=run.config["sources"],
            compute=run.state("compute"),
        ),
    )


def _norm_quantiles(parts: Iterable[Path]) -> dict[str, float]:
    """Quantiles of the raw norms of all vectors in the parts, float64."""
    norms: list[np.ndarray] = []
    for part in parts:
        with VectorReader(part) as reader:
            batches = reader.iter_batches(columns=[])
            norms += [np.linalg.norm(batch.vectors.astype(np.float64), axis=1) for batch in batches]
    found = np.quantile(np.concatenate(norms), list(_QUANTILES.values()))
    return dict(zip(_QUANTILES, map(float, found), strict=True))


# --- shards ---------------------------------------------------------------------------------------------


def _capture_shards(
    subject: Subject,
    config: DataConfig,
    plan: Plan,
    extractor: Extractor,
    sidecar: Sidecar,
    run: RunFolder,
    progress: Progress | None,
) -> dict[str, list[Path]]:
    """Capture what is missing; returns every shard, by split, in order."""
    folder = run.path / _SHARDS
    folder.mkdir(exist_ok=True)
    remove_temporaries(folder)
    done = 0
    paths: dict[str, list[Path]] = {}
    for split, number, items in plan.shards(config.shard_passages):
        path = folder / f"{split}-{number:06d}.parquet"
        # A shard has its final name only when it is whole, sidecar included.
        if not path.is_file():
            vectors = _captured(subject, config, items)
            with VectorWriter(
                path, subject.d_model, sidecar, EXTRA_COLUMNS, value_type=config.value_type
            ) as writer:
                writer.write(vectors, _columns(subject, config, items, extractor))
        paths.setdefault(split, []).append(path)
        done += sum(len(item.positions) for item in items)
        if progress is not None:
            progress(done, plan.n_vectors, "vectors")
    return paths


def _captured(subject: Subject, config: DataConfig, items: Sequence[Item]) -> np.ndarray:
    """Raw vectors of the items' positions in order, [n, d_model] float32."""
    captured = capture(
        subject,
        [item.passage.ids for item in items],
        [config.layer_index],
        [item.positions for item in items],
        batch_tokens=config.batch_tokens,
    )
    return np.concatenate([each.vectors[config.layer_index].numpy() for each in captured])


def _columns(
    subject: Subject, config: DataConfig, items: Sequence[Item], extractor: Extractor
) -> dict[str, list[Any]]:
    """Every column but the vector, one value a position."""
    columns: dict[str, list[Any]] = {}
    for item in items:
        for position in item.positions:
            for name, value in _row(subject, config, item, position, extractor).items():
                columns.setdefault(name, []).append(value)
    return columns


def _row(
    subject: Subject, config: DataConfig, item: Item, position: int, extractor: Extractor
) -> dict[str, Any]:
    ids = item.passage.ids
    text, earlier = _decoded(subject, ids[: position + 1]), _decoded(subject, ids[:position])
    # What the token adds to the text keeps the white space that decoding it alone can lose (SentencePiece).
    token = (
        text[len(earlier) :] if text.startswith(earlier) else _decoded(subject, ids[position : position + 1])
    )
    return {
        "doc_id": item.passage.doc_id,
        "n_raw_tokens": position + 1,
        "activation_layer": config.layer_index,
        "detokenized_text_truncated": text,
        "passage_id": item.passage.passage_id,
        "corpus": item.corpus,
        "token_id": ids[position],
        "token_string": token,
        "explanation": extractor.explain(text, token),
    }


def _decoded(subject: Subject, ids: Sequence[int]) -> str:
    decoded: str = subject.tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return decoded


def _joined(path: Path, parts: Sequence[Path], d_model: int, config: DataConfig, sidecar: Sidecar) -> Path:
    with VectorWriter(path, d_model, sidecar, EXTRA_COLUMNS, value_type=config.value_type) as writer:
        for part in parts:
            with VectorReader(part) as reader:
                for batch in reader.iter_batches():
                    writer.write(batch.vectors, batch.columns.to_pydict())
    return path
