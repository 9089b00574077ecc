"""Vectors on disk: Parquet with the reference column names and a sidecar beside.

Columns: `activation_vector`, `doc_id`, `n_raw_tokens` (= position + 1), `activation_layer`,
`detokenized_text_truncated`, then whatever the writer declares.

Physical form. The vector column is an Arrow `fixed_size_list<float32>[d_model]`; neither lists nor values
are nullable. Variable-length lists carry 32-bit offsets that overflow at 2^31 values, and Arrow's `take`
corrupts large ones past 4 GiB: rows are picked in numpy, never with `take`. `float32` is stored plain, since
raw states do not compress. `bfloat16` keeps the logical type: each value is rounded to bfloat16 and written
as the float32 whose lower 16 bits are zero, byte-stream-split and under zstd. The two empty byte planes cost
nothing, so that the file is a third of the size, every bfloat16 comes back exactly, and any other Parquet
reader sees ordinary floats (float16 would overflow at 65504; raw 16-bit integers would be noise elsewhere).

Pages carry checksums, which the reader verifies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from torch import Tensor

from dragoman.activations.reading import VECTOR_COLUMN, VectorReader, load_vectors
from dragoman.errors import SidecarError, VectorError
from dragoman.runs import atomic_path
from dragoman.shapes import VectorArray
from dragoman.sidecar import Sidecar, write_sidecar

__all__ = ["REFERENCE_COLUMNS", "VECTOR_COLUMN", "ValueType", "VectorReader", "VectorWriter", "load_vectors"]

REFERENCE_COLUMNS: Mapping[str, pa.DataType] = {
    "doc_id": pa.string(),
    "n_raw_tokens": pa.int64(),
    "activation_layer": pa.int64(),
    "detokenized_text_truncated": pa.string(),
}
ValueType = Literal["float32", "bfloat16"]

_ROW_GROUP_BYTES = 32 << 20
"""Vectors held before a row group is written, in bytes of float32: bounds the writer's memory."""


class VectorWriter:
    """Streams vectors and their columns into one Parquet file; a context manager.

    The file and its sidecar appear under their final names only when the block ends without an exception;
    otherwise what stood there before stays as it was.

    Args:
        path: the file to write, ending in `.parquet`.
        d_model: width of every vector.
        sidecar: what the vectors are; written to `{path}.nla_meta.yaml`.
        extra_schema: Arrow types of the columns beyond `REFERENCE_COLUMNS`, by name.
        value_type: `bfloat16` rounds every value to 8 significant bits (see the module).

    Attributes:
        rows: rows written so far.
        schema: Arrow schema of the file.

    Raises:
        VectorError: an extra column takes a reference column's name, or an unknown value_type.
        SidecarError: the sidecar's d_model is another.
        ResourceError: on entering or leaving, the disk is full.
    """

    def __init__(
        self,
        path: str | Path,
        d_model: int,
        sidecar: Sidecar,
        extra_schema: Mapping[str, pa.DataType] | None = None,
        *,
        value_type: ValueType = "float32",
    ) -> None:
        self.path = Path(path)
        self.d_model = d_model
        self.rows = 0
        self.schema = _schema(d_model, extra_schema or {}, value_type)
        _check_sidecar_width(sidecar, d_model)
        self._sidecar = sidecar
        self._value_type: ValueType = value_type
        self._row_group_rows = max(1, _ROW_GROUP_BYTES // (4 * d_model))
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._stack = ExitStack()
        self._parquet: pq.ParquetWriter | None = None

    def __enter__(self) -> VectorWriter:
        assert self._parquet is None and not self.rows, "a writer is entered once"
        with ExitStack() as stack:
            # Left in reverse: last rows, footer, sidecar, and then the data takes its name, so that data
            # never stands without its meaning beside it.
            temporary = stack.enter_context(atomic_path(self.path))
            stack.push(self._write_sidecar_on_success)
            options = _parquet_options(self.schema, self._value_type)
            self._parquet = stack.enter_context(pq.ParquetWriter(temporary, self.schema, **options))
            stack.push(self._flush_on_success)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return self._stack.__exit__(kind, error, trace)
        finally:
            self._parquet = None

    def write(
        self, vectors: Float[Tensor, "n d_model"] | VectorArray, columns: Mapping[str, Sequence[Any]]
    ) -> None:
        """Append rows; the values are copied.

        Args:
            vectors: raw vectors, any float type and device.
            columns: for every other column of the schema its `n` values.

        Raises:
            VectorError: another width, a NaN or infinite value, columns that do not match the schema, or
                a call outside the `with` block.
        """
        if self._parquet is None:
            raise VectorError(
                f"rows were to be written to {self.path.name} while it is not open",
                expected="writes inside the writer's with block",
                consequence="the rows would never reach the disk",
                remedy="write `with VectorWriter(...) as writer:` around all writes",
            )
        values = self._checked(vectors)
        arrays = [_vector_array(values, self.schema)]
        arrays += _column_arrays(columns, self.schema, len(values))
        self._pending.append(pa.Table.from_arrays(arrays, schema=self.schema))
        self._pending_rows += len(values)
        self.rows += len(values)
        if self._pending_rows >= self._row_group_rows:
            self._flush()

    def _checked(self, vectors: Tensor | np.ndarray) -> VectorArray:
        tensor = vectors.detach() if isinstance(vectors, Tensor) else torch.from_numpy(np.array(vectors))
        if tensor.ndim != 2 or tensor.shape[1] != self.d_model:
            raise VectorError(
                f"vectors of shape {tuple(tensor.shape)} were to be written to {self.path.name}",
                expected=f"[n, {self.d_model}]",
                consequence="rows of different models or layers would stand in one file",
                remedy="write one file a model, and a single vector as one row",
            )
        if self._value_type == "bfloat16":
            tensor = tensor.to(torch.bfloat16)
        # copy: rows wait for their row group, and the caller may reuse the memory meanwhile.
        values = tensor.to("cpu", torch.float32, copy=True).contiguous().numpy()
        finite = np.isfinite(values).all(axis=1)
        if not finite.all():
            row = int(np.argmin(finite))
            raise VectorError(
                f"the vector of row {self.rows + row} holds NaN or infinite values",
                expected=f"finite numbers in {self._value_type}",
                consequence="every mean, norm and loss computed with it would be NaN",
                remedy="capture in bfloat16 or float32 (float16 overflows at 65504), or drop the row",
            )
        return values

    def _flush(self) -> None:
        if not self._pending:
            return
        assert self._parquet is not None, "rows are pending only while the file is open"
        self._parquet.write_table(pa.concat_tables(self._pending), row_group_size=self._row_group_rows)
        self._pending, self._pending_rows = [], 0

    def _flush_on_success(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()

    def _write_sidecar_on_success(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            write_sidecar(self.path, self._sidecar)


def _schema(d_model: int, extra: Mapping[str, pa.DataType], value_type: ValueType) -> pa.Schema:
    clash = sorted({VECTOR_COLUMN, *REFERENCE_COLUMNS} & set(extra))
    if clash:
        raise VectorError(
            f"the extra column {clash[0]!r} has a reference column's name",
            expected="other names for extra columns",
            consequence="readers of the reference format would take it for what it is not",
            remedy="rename the column",
        )
    if value_type not in ("float32", "bfloat16"):
        raise VectorError(
            f"value_type is {value_type!r}",
            expected="float32 or bfloat16",
            consequence="the values would be stored in another precision than meant",
            remedy="choose one of the two",
        )
    vector = pa.list_(pa.field("element", pa.float32(), nullable=False), d_model)
    fields = [pa.field(VECTOR_COLUMN, vector, nullable=False)]
    fields += [pa.field(name, kind) for name, kind in {**REFERENCE_COLUMNS, **extra}.items()]
    return pa.schema(fields, metadata={"dragoman.value_type": value_type})


def _check_sidecar_width(sidecar: Sidecar, d_model: int) -> None:
    if sidecar.d_model != d_model:
        raise SidecarError(
            f"the sidecar says d_model {sidecar.d_model}",
            expected=f"{d_model}, the width of the vectors to be written",
            consequence="the file would be read as another model's vectors",
            remedy="give the sidecar of the model that the vectors come from",
        )


def _parquet_options(schema: pa.Schema, value_type: ValueType) -> dict[str, Any]:
    leaf = f"{VECTOR_COLUMN}.list.element"
    others = [field.name for field in schema if field.name != VECTOR_COLUMN]
    rounded = value_type == "bfloat16"
    return {
        "compression": {leaf: "zstd" if rounded else "none", **dict.fromkeys(others, "zstd")},
        "use_dictionary": [name for name in others if schema.field(name).type == pa.string()],
        "use_byte_stream_split": [leaf] if rounded else False,
        "write_statistics": others,
        "write_page_checksum": True,
    }


def _vector_array(values: VectorArray, schema: pa.Schema) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(
        pa.array(values.reshape(-1)), type=schema.field(VECTOR_COLUMN).type
    )


def _column_arrays(columns: Mapping[str, Sequence[Any]], schema: pa.Schema, rows: int) -> list[pa.Array]:
    names = [field.name for field in schema if field.name != VECTOR_COLUMN]
    if set(columns) != set(names):
        missing, unknown = sorted(set(names) - set(columns)), sorted(set(columns) - set(names))
        raise VectorError(
            f"columns are missing: {missing}" if missing else f"columns are not in the schema: {unknown}",
            expected=f"exactly {', '.join(names)}",
            consequence="rows would lose what they are about",
            remedy="give every column in each call, and declare further ones in extra_schema",
        )
    return [_column_array(name, columns[name], schema.field(name).type, rows) for name in names]


def _column_array(name: str, values: Sequence[Any], kind: pa.DataType, rows: int) -> pa.Array:
    try:
        array = pa.array(values, type=kind)
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        raise _column_error(name, f"holds a value that is no {kind} ({error})", f"{kind} values") from error
    if len(array) != rows:
        raise _column_error(name, f"has {len(array)} values", f"{rows}, one a vector")
    if array.null_count and name in REFERENCE_COLUMNS:
        raise _column_error(name, f"has {array.null_count} empty values", "a value in every row")
    return array


def _column_error(name: str, what: str, expected: str) -> VectorError:
    return VectorError(
        f"column {name!r} {what}",
        expected=expected,
        consequence="vectors would stand beside the wrong text, document or layer",
        remedy="correct the column, or its type in extra_schema",
    )
