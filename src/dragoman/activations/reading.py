"""Reading vectors: the store's Parquet, foreign Parquet and .npy, without a Python list of floats.

Arrow's decoded values are viewed by numpy without a copy, batch by batch; `read_vectors` lays the batches
into one array, which is the only copy. Nothing in a file is executed: no pickles.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dragoman.errors import ResourceError, SidecarError, VectorError
from dragoman.shapes import VectorArray
from dragoman.sidecar import Sidecar, read_sidecar, sidecar_path

VECTOR_COLUMN = "activation_vector"

_BATCH_BYTES = 32 << 20
"""Vectors decoded at once, in bytes of float32: bounds memory beside the result."""


@dataclass(frozen=True)
class VectorBatch:
    """Consecutive rows of a file.

    Attributes:
        start: index of the first row.
        vectors: [rows, d_model]; a read-only view of Arrow's memory where the file holds float32.
        columns: the other columns asked for.
    """

    start: int
    vectors: VectorArray
    columns: pa.RecordBatch


class VectorReader:
    """Reads a Parquet file of vectors.

    Also reads files that other tools wrote: lists of equal length and other float types become float32.

    Args:
        path: the Parquet file.
        column: name of the vector column.
        require_sidecar: refuse a file without `{path}.nla_meta.yaml`. Without it, nobody can tell which
            model and layer the vectors come from.

    Attributes:
        rows: rows of the file.
        d_model: width of a vector.
        columns: names of the other columns.
        sidecar: the sidecar, or None where there is none and none is required.

    Raises:
        VectorError: no such file, no Parquet, truncated, or no vector column.
        SidecarError: the sidecar is missing, damaged or of another width.
    """

    def __init__(
        self, path: str | Path, *, column: str = VECTOR_COLUMN, require_sidecar: bool = True
    ) -> None:
        self.path = Path(path)
        self.column = column
        self._file = _open_parquet(self.path)
        try:
            self.rows: int = self._file.metadata.num_rows
            self._check_names()
            self.columns = [name for name in self._file.schema_arrow.names if name != column]
            self.d_model = self._width()
            self.sidecar = _sidecar_beside(self.path, self.d_model, required=require_sidecar)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> VectorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read_vectors(self) -> VectorArray:
        """All vectors, [rows, d_model] float32, writable, in file order.

        Raises:
            VectorError: damaged pages, a missing vector or value, another width, NaN or infinity.
            ResourceError: they do not fit into memory.
        """
        try:
            vectors = np.empty((self.rows, self.d_model), dtype=np.float32)
        except (MemoryError, ValueError) as error:
            raise ResourceError(
                f"the file {self.path.name} announces {self.rows} vectors of width {self.d_model}",
                expected="vectors that fit into memory",
                consequence="the process would be stopped by the system",
                remedy="read the file in batches with iter_batches",
            ) from error
        filled = 0
        for batch in self.iter_batches(columns=[]):
            vectors[filled : filled + len(batch.vectors)] = batch.vectors
            filled += len(batch.vectors)
        return vectors

    def read_table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Other columns as an Arrow table; all but the vectors by default.

        Raises:
            VectorError: a column is not there, or damaged pages.
        """
        names = self._present(self.columns if columns is None else columns)
        with _reading(self.path):
            return self._file.read(columns=names)

    def iter_batches(
        self, columns: Sequence[str] | None = None, *, batch_rows: int | None = None
    ) -> Iterator[VectorBatch]:
        """Rows in file order, in bounded memory whatever the row groups.

        Args:
            columns: other columns to read along; all by default.
            batch_rows: most rows of a batch; 32 MiB of vectors by default.

        Raises:
            VectorError: as `read_vectors` and `read_table`.
        """
        names = self._present(self.columns if columns is None else columns)
        rows = batch_rows or max(1, _BATCH_BYTES // (4 * self.d_model))
        start = 0
        batches = self._file.iter_batches(batch_size=rows, columns=[self.column, *names])
        while True:
            with _reading(self.path):
                batch = next(batches, None)
            if batch is None:
                break
            vectors = _view(batch.column(self.column), self.d_model, self.path, start)
            yield VectorBatch(start, vectors, batch.select(names))
            start += batch.num_rows
        if start != self.rows:
            raise _damaged(self.path, f"{start} rows of {self.rows}")

    def _present(self, columns: Sequence[str]) -> list[str]:
        missing = [name for name in columns if name not in self.columns]
        if missing:
            raise VectorError(
                f"the file {self.path.name} has no column {missing[0]!r} beside its vectors",
                expected=f"one of {', '.join(self.columns) or 'none at all'}",
                consequence="what the vectors are about would be unknown",
                remedy="name a column that is there, or make the file anew",
            )
        return list(columns)

    def _check_names(self) -> None:
        names = self._file.schema_arrow.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise VectorError(
                f"the file {self.path.name} has {names.count(twice)} columns called {twice!r}",
                expected="every column under a name of its own",
                consequence="one of them would be taken for the other",
                remedy="rename one of them",
            )

    def _width(self) -> int:
        schema = self._file.schema_arrow
        found: Any = schema.field(self.column).type if self.column in schema.names else None
        if _is_float_list(found) and pa.types.is_fixed_size_list(found) and found.list_size:
            return int(found.list_size)
        if _is_float_list(found) and (width := self._width_of_first_row()):
            return width
        raise VectorError(
            f"the file {self.path.name} has "
            + (
                f"a column {self.column!r} of type {found}"
                if found is not None
                else f"no column {self.column!r}, only {', '.join(schema.names)[:300]}"
            ),
            expected=f"vectors in {self.column!r}, a fixed-size list of float32",
            consequence="there would be nothing to read",
            remedy="name the column that holds the vectors, or convert the file",
        )

    def _width_of_first_row(self) -> int:
        """Parquet itself knows no fixed size: files of other writers tell it only by their rows."""
        with _reading(self.path):
            batch = next(self._file.iter_batches(batch_size=1, columns=[self.column]), None)
        if batch is None or batch.num_rows == 0 or batch.column(0).null_count:
            return 0
        return len(batch.column(0)[0])


def load_vectors(path: str | Path, *, column: str = VECTOR_COLUMN, d_model: int | None = None) -> VectorArray:
    """Any vectors from a `.parquet` or `.npy` file: states, differences, probe or steering directions.

    Args:
        path: Parquet (no sidecar needed), or `.npy` with one vector or a matrix of rows.
        column: vector column of a Parquet file.
        d_model: width that is needed; any width by default.

    Returns:
        [n, d_model] float32 with n at least 1. Numbers of other types are converted.

    Raises:
        VectorError: no such file, another format, damaged, pickled objects, no vectors, another width,
            NaN or infinity.
        ResourceError: they do not fit into memory.
    """
    path = Path(path)
    if path.suffix.lower() == ".parquet":
        with VectorReader(path, column=column, require_sidecar=False) as reader:
            vectors = reader.read_vectors()
    elif path.suffix.lower() == ".npy":
        vectors = _load_npy(path)
    else:
        raise VectorError(
            f"the file {path.name} is neither Parquet nor .npy",
            expected="a file ending in .parquet or .npy",
            consequence="its bytes would be taken for numbers",
            remedy="save the vectors with numpy.save, or convert the file",
        )
    _check_loaded(vectors, path, d_model)
    return vectors


def _is_float_list(kind: Any) -> bool:
    if kind is None:
        return False
    is_list = pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and pa.types.is_floating(kind.value_type)


def _open_parquet(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise _no_file(path)
    if path.stat().st_size == 0:
        raise _damaged(path, "0 bytes")
    with _reading(path):
        return pq.ParquetFile(path, page_checksum_verification=True)


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except (pa.ArrowMemoryError, MemoryError) as error:
        raise ResourceError(
            f"reading {path.name} needs more memory than there is",
            expected="a file that fits, or smaller row groups",
            consequence="the process would be stopped by the system",
            remedy="write the file again with smaller row groups",
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error).splitlines()[0][:300] if str(error) else "no detail") from error


def _view(array: pa.Array, d_model: int, path: Path, start: int) -> VectorArray:
    """Numpy's view of a list array, [rows, d_model]; every row checked."""
    _check_complete(array, d_model, path, start)
    # flatten, not .values: the latter ignores the offset of a sliced array and would shift all rows.
    flat = array.flatten()
    if flat.null_count:
        raise _bad_row(path, start + flat.is_null().index(True).as_py() // d_model, "a missing value")
    zero_copy = pa.types.is_float32(flat.type)
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite and is refused below
        values = flat.to_numpy(zero_copy_only=zero_copy).astype(np.float32, copy=False)
    vectors = values.reshape(len(array), d_model)
    _check_finite(vectors, path, start)
    return vectors


def _check_complete(array: pa.Array, d_model: int, path: Path, start: int) -> None:
    if array.null_count:
        raise _bad_row(path, start + array.is_null().index(True).as_py(), "no vector")
    if not pa.types.is_fixed_size_list(array.type):
        widths = np.diff(array.offsets.to_numpy())
        if (widths != d_model).any():
            row = int(np.argmax(widths != d_model))
            raise _bad_row(path, start + row, f"a vector of width {widths[row]} among others of {d_model}")


def _check_finite(vectors: VectorArray, path: Path, start: int) -> None:
    finite = np.isfinite(vectors)
    if not finite.all():
        raise _bad_row(path, start + int(np.argmin(finite.all(axis=1))), "NaN or infinite values")


def _load_npy(path: Path) -> VectorArray:
    if not path.is_file():
        raise _no_file(path)
    try:
        # mmap: the header's shape is held against the size of the file before any memory is taken.
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        # numpy names pickled objects, a truncated file and a foreign header in its own words
        raise _damaged(path, str(error).splitlines()[0][:300]) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu" or array.ndim not in (1, 2):
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        raise VectorError(
            f"the file {path.name} holds {found}",
            expected="real numbers, one vector [d_model] or rows [n, d_model]",
            consequence="its entries would be taken for other vectors than meant",
            remedy="save float32 rows with numpy.save (bfloat16 tensors: call .float() first)",
        )
    with np.errstate(over="ignore"):
        return np.array(np.atleast_2d(array), dtype=np.float32, order="C")


def _check_loaded(vectors: VectorArray, path: Path, d_model: int | None) -> None:
    if vectors.size == 0:
        raise VectorError(
            f"the file {path.name} holds no vectors (shape {list(vectors.shape)})",
            expected="at least one",
            consequence="there would be nothing to read",
            remedy="check how the file was made",
        )
    if d_model is not None and vectors.shape[1] != d_model:
        raise VectorError(
            f"the file {path.name} holds vectors of width {vectors.shape[1]}",
            expected=f"{d_model}, the width of the subject's residual stream",
            consequence="they would be vectors of another model",
            remedy="give vectors of the pair's own subject, or another pair",
        )
    _check_finite(vectors, path, 0)


def _sidecar_beside(path: Path, d_model: int, *, required: bool) -> Sidecar | None:
    beside = sidecar_path(path)
    if not beside.is_file():
        if not required:
            return None
        raise SidecarError(
            f"there is no {beside.name} beside {path.name}",
            expected="a sidecar that says which model and layer the vectors come from",
            consequence="vectors of another model or layer could be read as if they were the right ones",
            remedy="copy the sidecar along with the file, or give the file as plain vectors (--vectors)",
        )
    sidecar = read_sidecar(path)
    if sidecar.d_model != d_model:
        raise SidecarError(
            f"the sidecar {beside.name} says d_model {sidecar.d_model}",
            expected=f"{d_model}, the width of the vectors in {path.name}",
            consequence="the sidecar of another file would be believed",
            remedy="put the sidecar that was written with the file beside it",
        )
    return sidecar


def _no_file(path: Path) -> VectorError:
    return VectorError(
        f"there is no file {path}",
        expected="a file of vectors",
        consequence="there would be nothing to read",
        remedy="check the path",
    )


def _damaged(path: Path, detail: str) -> VectorError:
    return VectorError(
        f"the file {path.name} cannot be read ({detail})",
        expected="a complete file of vectors (Parquet, or .npy without Python objects)",
        consequence="vectors would be missing or wrong",
        remedy="copy or make the file again",
    )


def _bad_row(path: Path, row: int, what: str) -> VectorError:
    return VectorError(
        f"row {row} of {path.name} holds {what}",
        expected="a complete vector of finite numbers in every row",
        consequence="rows would shift, or every figure computed with them would be NaN",
        remedy="drop the row or capture it again",
    )
