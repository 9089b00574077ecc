from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dragoman.activations import VectorReader, load_vectors
from dragoman.activations.reading import _view
from dragoman.errors import VectorError

RNG = np.random.default_rng()


def rows(n: int, width: int, dtype=np.float32) -> np.ndarray:
    return (RNG.standard_normal((n, width)) * 50).astype(dtype)


def fixed(vectors: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_an_npy_matrix_of_any_number_type_loads_as_float32(tmp_path, dtype):
    vectors = rows(5, 7, dtype)
    np.save(tmp_path / "v.npy", vectors)
    loaded = load_vectors(tmp_path / "v.npy", d_model=7)
    assert loaded.dtype == np.float32
    assert loaded.flags.writeable
    np.testing.assert_array_equal(loaded, vectors.astype(np.float32))


def test_an_npy_vector_is_one_row_and_fortran_order_is_undone(tmp_path):
    vectors = rows(3, 6)
    np.save(tmp_path / "one.npy", vectors[1])
    np.save(tmp_path / "fortran.npy", np.asfortranarray(vectors))
    np.testing.assert_array_equal(load_vectors(tmp_path / "one.npy"), vectors[1:2])
    loaded = load_vectors(str(tmp_path / "fortran.npy"))
    np.testing.assert_array_equal(loaded, vectors)
    assert loaded.flags.c_contiguous


def test_an_npy_file_with_pickled_objects_is_refused_and_nothing_in_it_runs(tmp_path):
    flag = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return (flag.write_text, ("x",))

    np.save(tmp_path / "v.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    with pytest.raises(VectorError, match=r"without Python objects"):
        load_vectors(tmp_path / "v.npy")
    import pickle

    (tmp_path / "bare.npy").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(VectorError):
        load_vectors(tmp_path / "bare.npy")
    assert not flag.exists()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 2, 2), np.float32),
        np.float32(3),
        np.array([True, False]),
        np.array(["a"]),
        np.array([1j]),
    ],
    ids=["three axes", "a scalar", "booleans", "text", "complex"],
)
def test_an_npy_array_that_is_not_rows_of_real_numbers_is_refused(tmp_path, array):
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(VectorError, match=r"one vector \[d_model\] or rows"):
        load_vectors(tmp_path / "v.npy")


def test_an_npy_file_that_announces_more_than_it_holds_is_refused_before_memory_is_taken(tmp_path):
    np.save(tmp_path / "v.npy", rows(10, 10))
    whole = (tmp_path / "v.npy").read_bytes()
    for cut in (0, 5, 40, len(whole) - 1):
        (tmp_path / "v.npy").write_bytes(whole[:cut])
        with pytest.raises(VectorError, match=r"v\.npy cannot be read"):
            load_vectors(tmp_path / "v.npy")
    (tmp_path / "v.npy").write_bytes(
        whole.replace(b"(10, 10)", b"(10, 9000000000000)".ljust(8))[: len(whole)]
    )
    with pytest.raises(VectorError):
        load_vectors(tmp_path / "v.npy")


def test_an_archive_under_the_name_npy_is_refused(tmp_path):
    np.savez(tmp_path / "v.npz", rows(2, 2))
    (tmp_path / "v.npz").rename(tmp_path / "v.npy")
    with pytest.raises(VectorError, match=r"an archive"):
        load_vectors(tmp_path / "v.npy")


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_values_that_are_not_finite_as_float32_are_refused_with_their_row(tmp_path, value, suffix):
    vectors = rows(6, 3, np.float64)
    vectors[4, 2] = value
    path = tmp_path / f"v.{suffix}"
    if suffix == "npy":
        np.save(path, vectors)
    else:
        pq.write_table(pa.table({"activation_vector": fixed(vectors)}), path)
    with pytest.raises(VectorError, match=rf"ow 4 of v\.{suffix} holds NaN or infinite"):
        load_vectors(path)


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_another_width_than_the_subjects_is_refused_with_both_numbers(tmp_path, suffix):
    path = tmp_path / f"v.{suffix}"
    if suffix == "npy":
        np.save(path, rows(2, 6))
    else:
        pq.write_table(pa.table({"activation_vector": fixed(rows(2, 6))}), path)
    with pytest.raises(VectorError, match=r"width 6.*Expected: 5"):
        load_vectors(path, d_model=5)


@pytest.mark.parametrize("name", ["v.pt", "v.txt", "v"])
def test_other_formats_and_missing_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(VectorError, match=r"neither Parquet nor .npy"):
        load_vectors(tmp_path / name)
    for suffix in ("parquet", "npy"):
        with pytest.raises(VectorError, match=r"here is no file"):
            load_vectors(tmp_path / f"nowhere.{suffix}")
        (tmp_path / f"folder.{suffix}").mkdir()
        with pytest.raises(VectorError, match=r"here is no file"):
            load_vectors(tmp_path / f"folder.{suffix}")


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_files_without_a_single_vector_are_refused(tmp_path, suffix):
    path = tmp_path / f"v.{suffix}"
    if suffix == "npy":
        np.save(path, np.zeros((0, 4), np.float32))
    else:
        pq.write_table(pa.table({"activation_vector": fixed(rows(0, 4))}), path)
    with pytest.raises(VectorError):
        load_vectors(path)
    path.write_bytes(b"")
    with pytest.raises(VectorError, match=r"cannot be read"):
        load_vectors(path)


@pytest.mark.parametrize("value_type", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("kind", ["list", "large_list", "fixed"])
def test_foreign_parquet_of_any_list_and_float_type_loads(tmp_path, kind, value_type):
    vectors = rows(40, 5, np.float16)
    to_type = {"list": pa.list_, "large_list": pa.large_list, "fixed": lambda t: pa.list_(t, 5)}[kind]
    column = pa.array([list(row) for row in vectors], type=to_type(value_type))
    pq.write_table(
        pa.table({"direction": column}), tmp_path / "v.parquet", row_group_size=7, store_schema=False
    )
    np.testing.assert_array_equal(
        load_vectors(tmp_path / "v.parquet", column="direction"), vectors.astype(np.float32)
    )


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]],
            r"ow 1 of v\.parquet holds a vector of width 1 among others of 2",
        ),
        ([[1.0, 2.0], None, [3.0, 4.0]], r"ow 1 of v\.parquet holds no vector"),
        ([[1.0, 2.0], [3.0, None]], r"ow 1 of v\.parquet holds a missing value"),
        ([[], []], "type list"),
        ([None, [1.0]], "type list"),
    ],
)
def test_ragged_missing_and_empty_vectors_are_refused_and_do_not_shift_rows(tmp_path, lists, message):
    table = pa.table({"activation_vector": pa.array(lists, type=pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "v.parquet")
    with pytest.raises(VectorError, match=message):
        load_vectors(tmp_path / "v.parquet")


def test_a_missing_vector_in_a_fixed_size_list_is_refused(tmp_path):
    column = pa.array([[1.0, 2.0], None, [3.0, 4.0]], type=pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"activation_vector": column}), tmp_path / "v.parquet")
    with pytest.raises(VectorError, match=r"ow 1 of v\.parquet holds no vector"):
        load_vectors(tmp_path / "v.parquet")


@pytest.mark.parametrize("kind", [pa.string(), pa.float32(), pa.list_(pa.int64()), pa.list_(pa.string())])
def test_a_vector_column_of_another_type_is_refused_with_its_type(tmp_path, kind):
    pq.write_table(pa.table({"activation_vector": pa.array([None], type=kind)}), tmp_path / "v.parquet")
    with pytest.raises(VectorError, match=r"a column 'activation_vector' of type"):
        load_vectors(tmp_path / "v.parquet")


def test_a_file_without_the_vector_column_names_those_it_has(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "v.parquet")
    with pytest.raises(VectorError, match=r"only text, n"):
        VectorReader(tmp_path / "v.parquet", require_sidecar=False)


@pytest.mark.parametrize("twice", ["activation_vector", "n"])
def test_two_columns_of_one_name_are_refused(tmp_path, twice):
    columns = {"activation_vector": fixed(rows(2, 4)), "n": pa.array([1, 2])}
    names = ["activation_vector", "n", twice]
    pq.write_table(pa.Table.from_arrays([columns[name] for name in names], names), tmp_path / "v.parquet")
    with pytest.raises(VectorError, match=f"2 columns called '{twice}'"):
        load_vectors(tmp_path / "v.parquet")


def test_a_sliced_array_is_read_from_its_own_offset(tmp_path):
    vectors = rows(30, 4)
    for array in (fixed(vectors), fixed(vectors).cast(pa.list_(pa.float32()))):
        view = _view(array.slice(11, 7), 4, tmp_path, 0)
        np.testing.assert_array_equal(view, vectors[11:18])


def test_a_batch_of_float32_is_viewed_and_not_copied(tmp_path):
    vectors = rows(30, 4)
    assert np.shares_memory(_view(fixed(vectors), 4, tmp_path, 0), vectors)


def test_a_text_file_named_parquet_is_refused(tmp_path):
    (tmp_path / "v.parquet").write_text("doc_id,vector\n" * 100)
    with pytest.raises(VectorError, match=r"cannot be read"):
        load_vectors(tmp_path / "v.parquet")


def test_a_footer_that_announces_absurdly_many_rows_takes_no_memory_for_them(tmp_path):
    # The reader sizes its result by the footer: rows missing from the pages must be noticed.
    pq.write_table(pa.table({"activation_vector": fixed(rows(3, 4))}), tmp_path / "v.parquet")
    reader = VectorReader(tmp_path / "v.parquet", require_sidecar=False)
    reader.rows = 4
    with pytest.raises(VectorError, match=r"3 rows of 4"):
        reader.read_vectors()
    assert math.prod(reader.iter_batches().__next__().vectors.shape) == 12
