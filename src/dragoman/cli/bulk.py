"""`dragoman explain --vectors IN --out OUT.parquet`: a whole file of vectors, resumable after any kill.

Work lies in `OUT.parquet.partial/`, a locked run folder: its config names the source by content, the pair
and the decoding, so that an interrupted job can only be continued as what it was. One shard a batch of
rows is written under its final name when it is complete; at the end the shards are laid into one file,
which is renamed, and the folder goes. Shards are cut by row number and decoding is keyed by each vector's
own bytes, so the result does not depend on interruptions.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from dragoman.activations.reading import VectorReader, load_vectors
from dragoman.errors import ConfigError, VectorError
from dragoman.files import TEMPORARY_PREFIX
from dragoman.runs import Progress, RunFolder, atomic_path, provenance
from dragoman.shapes import VectorArray

SHARD_ROWS = 256
RESULT_COLUMNS: Mapping[str, pa.DataType] = {
    "norm": pa.float32(),
    "explanation": pa.string(),
    "truncated": pa.bool_(),
    "cosine": pa.float32(),
    "mse": pa.float32(),
    "fve": pa.float32(),
    "flags": pa.list_(pa.string()),
}

ReadRows = Callable[[VectorArray], Sequence[Mapping[str, Any]]]
"""Vectors to one mapping a row, with at least the keys of RESULT_COLUMNS."""


@dataclass(frozen=True)
class BulkSummary:
    """What a bulk job did: rows in the result, and how many of them an earlier run had finished."""

    rows: int
    resumed_rows: int


def explain_file(
    source: Path,
    target: Path,
    read: ReadRows,
    *,
    job: Mapping[str, Any],
    d_model: int,
    force: bool = False,
    progress: Progress | None = None,
) -> BulkSummary:
    """Explain every vector of a file into a Parquet file, resuming what an earlier run began.

    The result has the source's rows in order: every column of the source except the vector (one whose name
    a result column takes becomes `input_NAME`), then `norm, explanation, truncated, cosine, mse, fve,
    flags`. A `.npy` source gives a column `row`.

    Args:
        source: `.parquet` or `.npy`.
        target: the Parquet file to write.
        read: explains one batch.
        job: what decides the result (pair, decoding, compute): another job cannot resume this one.
        d_model: the width that the pair reads.
        force: replace a finished target.
        progress: called with (rows done, rows in all, "vectors").

    Raises:
        ConfigError: the target is no .parquet, or exists.
        VectorError: the source is damaged, empty, of another width, or holds NaN.
        RunError: another job, or a running process, holds the partial folder.
    """
    folder = target.with_name(target.name + ".partial")
    _check_target(target, folder, force)
    with _open_source(source, d_model) as batches:
        config = {"source": _identity(source), "shard_rows": SHARD_ROWS, **job}
        try:
            with RunFolder.open(folder, config, kind="explain") as run:
                summary = _write_shards(batches, folder, read, progress)
                _merge(folder, target, {**job, **provenance(), "source": run.config["source"]})
        except VectorError:
            # The source must change, and a changed one could not continue this job.
            if not list(folder.glob("shard-*")):
                shutil.rmtree(folder)
            raise
    shutil.rmtree(folder)
    return summary


def _check_target(target: Path, folder: Path, force: bool) -> None:
    if target.suffix != ".parquet":
        raise ConfigError(
            f"--out is {target.name}",
            expected="a name ending in .parquet",
            consequence="nobody could tell what the file is",
            remedy="use --out NAME.parquet, or --json for JSON",
        )
    # A kill between the last rename and the clean-up leaves both: finishing again is harmless.
    if target.exists() and not folder.exists() and not force:
        raise ConfigError(
            f"--out {target} exists",
            expected="a new file",
            consequence="an earlier result would be overwritten",
            remedy="choose another name, or add --force to replace it",
        )
    # It is removed at the end, so it must not be a folder of somebody else's.
    if folder.is_dir() and not (folder / "run.json").exists():
        foreign = next((path for path in folder.iterdir() if path.name not in (".lock", "lock.json")), None)
        if foreign is not None and not foreign.name.startswith(TEMPORARY_PREFIX):
            raise ConfigError(
                f"{folder} holds {foreign.name}, which is no file of an interrupted job",
                expected="no such folder, or the one that an interrupted job left",
                consequence="files of yours would be removed when the job is done",
                remedy="choose another --out, or move that folder away",
            )


# ---------------------------------------------------------------- source


@dataclass(frozen=True)
class _Batches:
    """The source as consecutive batches: (first row, vectors, other columns)."""

    rows: int
    schema: pa.Schema
    each: Callable[[], Iterator[tuple[int, VectorArray, pa.RecordBatch]]]


@contextmanager
def _open_source(source: Path, d_model: int) -> Generator[_Batches]:
    if source.suffix == ".parquet":
        with VectorReader(source, require_sidecar=False) as reader:
            _check_shape(source, reader.rows, reader.d_model, d_model)
            yield _Batches(reader.rows, _first_schema(reader), lambda: _parquet_batches(reader))
        return
    vectors = load_vectors(source, d_model=d_model)
    yield _Batches(len(vectors), pa.schema([("row", pa.int64())]), lambda: _array_batches(vectors))


def _first_schema(reader: VectorReader) -> pa.Schema:
    return next(iter(reader.iter_batches(batch_rows=1))).columns.schema.remove_metadata()


def _parquet_batches(reader: VectorReader) -> Iterator[tuple[int, VectorArray, pa.RecordBatch]]:
    for batch in reader.iter_batches(batch_rows=SHARD_ROWS):
        yield batch.start, batch.vectors, batch.columns


def _array_batches(vectors: VectorArray) -> Iterator[tuple[int, VectorArray, pa.RecordBatch]]:
    for start in range(0, len(vectors), SHARD_ROWS):
        rows = vectors[start : start + SHARD_ROWS]
        numbers = pa.array(range(start, start + len(rows)), type=pa.int64())
        yield start, rows, pa.record_batch([numbers], names=["row"])


def _check_shape(source: Path, rows: int, found: int, d_model: int) -> None:
    if found != d_model or rows == 0:
        raise VectorError(
            f"{source.name} holds {rows} vectors of width {found}",
            expected=f"at least one of width {d_model}, the width of the pair's subject",
            consequence="there would be nothing to read, or vectors of another model would be explained",
            remedy="give vectors of the pair's own subject, or another pair",
        )


def _identity(source: Path) -> dict[str, Any]:
    with source.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return {"name": source.name, "bytes": source.stat().st_size, "sha256": digest}


_SAMPLE_BYTES = 1 << 20


def folder_identity(folder: Path) -> str:
    """What tells whether a pair's folder is still the same: names, sizes, and the files' content.

    Of a file larger than 4 MiB the first, middle and last MiB are taken: full checkpoints have gigabytes.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
        with path.open("rb") as handle:
            if size <= 4 * _SAMPLE_BYTES:
                digest.update(handle.read())
                continue
            for offset in (0, size // 2, size - _SAMPLE_BYTES):
                handle.seek(offset)
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- shards


def _write_shards(batches: _Batches, folder: Path, read: ReadRows, progress: Progress | None) -> BulkSummary:
    schema = _result_schema(batches.schema)
    done = resumed = 0
    for start, vectors, columns in batches.each():
        shard = folder / f"shard-{start:012d}.parquet"
        if _is_whole(shard, len(vectors)):
            resumed += len(vectors)
        else:
            _write_shard(shard, columns, read(vectors), schema)
        done += len(vectors)
        if progress:
            progress(done, batches.rows, "vectors")
    return BulkSummary(rows=done, resumed_rows=resumed)


def _is_whole(shard: Path, rows: int) -> bool:
    """Whether an earlier run finished this shard; one that was damaged since is made again."""
    try:
        return pq.read_metadata(shard).num_rows == rows
    except (OSError, pa.ArrowException):
        return False


def _result_schema(source: pa.Schema) -> pa.Schema:
    renamed = [field.with_name(_free_name(field.name, source.names)) for field in source]
    return pa.schema([*renamed, *(pa.field(name, kind) for name, kind in RESULT_COLUMNS.items())])


def _free_name(name: str, taken: Sequence[str]) -> str:
    if name not in RESULT_COLUMNS:
        return name
    candidate = f"input_{name}"
    while candidate in taken:
        candidate = f"input_{candidate}"
    return candidate


def _write_shard(
    shard: Path, columns: pa.RecordBatch, rows: Sequence[Mapping[str, Any]], schema: pa.Schema
) -> None:
    assert len(rows) == columns.num_rows, "one reading a vector"
    results = [pa.array([row[name] for row in rows], type=kind) for name, kind in RESULT_COLUMNS.items()]
    table = pa.Table.from_arrays([*columns.columns, *results], schema=schema)
    with atomic_path(shard) as temporary:
        pq.write_table(table, temporary)


def _merge(folder: Path, target: Path, origin: Mapping[str, Any]) -> None:
    shards = sorted(folder.glob("shard-*.parquet"))
    schema = pq.read_schema(shards[0]).with_metadata({"dragoman.provenance": orjson.dumps(dict(origin))})
    with atomic_path(target) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for shard in shards:
            writer.write_table(pq.read_table(shard).replace_schema_metadata(schema.metadata))
