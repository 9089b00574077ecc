from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from dragoman.cli import app as app_module
from dragoman.cli import bulk
from dragoman.cli.bulk import RESULT_COLUMNS, explain_file, folder_identity
from dragoman.errors import ConfigError, RunError, VectorError

JOB = {"pair": "p", "decoding": {"seed": 0}}


def tell(vectors: np.ndarray) -> list[dict]:
    """A reader whose answer depends on each vector alone, as the real one's does."""
    return [
        {
            "norm": float(np.linalg.norm(v)), "explanation": f"first {v[0]:.5f}",
            "truncated": bool(v[1] > 0), "cosine": 0.5, "mse": 1.0,
            "fve": None if v[2] > 1 else 0.25, "flags": ["cjk"] if v[0] > 0 else [],
        }
        for v in vectors
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(bulk, "SHARD_ROWS", 3)


def test_every_row_comes_out_in_order_with_its_own_columns(vectors, vectors_file, tmp_path):
    out = tmp_path / "words.parquet"
    summary = explain_file(vectors_file, out, tell, job=JOB, d_model=32)
    table = pq.read_table(out)
    assert (summary.rows, summary.resumed_rows) == (7, 0)
    assert table.column_names == ["doc_id", "input_explanation", *RESULT_COLUMNS]
    assert table["doc_id"].to_pylist() == [f"doc{i}" for i in range(7)]
    assert table["input_explanation"].to_pylist() == [f"reference {i}" for i in range(7)]
    expected = tell(vectors)
    for name in ("explanation", "truncated", "fve", "flags"):
        assert table[name].to_pylist() == [row[name] for row in expected]
    assert np.allclose(table["norm"].to_numpy(), np.linalg.norm(vectors, axis=1))
    origin = json.loads(table.schema.metadata[b"dragoman.provenance"])
    assert origin["source"]["name"] == "vectors.parquet" and origin["decoding"] == {"seed": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vectors.parquet", "words.parquet"]


def test_a_npy_file_gets_row_numbers(vectors, tmp_path):
    np.save(tmp_path / "v.npy", vectors)
    explain_file(tmp_path / "v.npy", tmp_path / "o.parquet", tell, job=JOB, d_model=32)
    table = pq.read_table(tmp_path / "o.parquet")
    assert table["row"].to_pylist() == list(range(7))
    assert table["explanation"].to_pylist() == [row["explanation"] for row in tell(vectors)]


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_an_interrupted_job_continues_to_the_same_table(stop_after, vectors_file, tmp_path):
    whole, out = tmp_path / "whole.parquet", tmp_path / "resumed.parquet"
    explain_file(vectors_file, whole, tell, job=JOB, d_model=32)
    calls = 0

    def interrupted(vectors):
        nonlocal calls
        if calls == stop_after:
            raise KeyboardInterrupt
        calls += 1
        return tell(vectors)

    with pytest.raises(KeyboardInterrupt):
        explain_file(vectors_file, out, interrupted, job=JOB, d_model=32)
    assert not out.exists()
    told: list[int] = []

    def counted(vectors):
        told.append(len(vectors))
        return tell(vectors)

    summary = explain_file(vectors_file, out, counted, job=JOB, d_model=32)
    assert summary.resumed_rows == 3 * stop_after
    assert told == [3, 3, 1][stop_after:]
    assert pq.read_table(out).equals(pq.read_table(whole))
    assert not out.with_name("resumed.parquet.partial").exists()


def test_another_job_or_another_source_cannot_continue_an_interrupted_one(vectors, vectors_file, tmp_path):
    out = tmp_path / "o.parquet"

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explain_file(vectors_file, out, stop, job=JOB, d_model=32)
    other = {"pair": "p", "decoding": {"seed": 1}}
    with pytest.raises(RunError, match=r"decoding\.seed"):
        explain_file(vectors_file, out, tell, job=other, d_model=32)
    pq.write_table(pa.table({"activation_vector": (vectors + 1).tolist()}), vectors_file)
    with pytest.raises(RunError, match=r"source\."):
        explain_file(vectors_file, out, tell, job=JOB, d_model=32)
    assert not out.exists()


def test_a_finished_result_is_not_overwritten_without_force(vectors_file, tmp_path):
    out = tmp_path / "o.parquet"
    explain_file(vectors_file, out, tell, job=JOB, d_model=32)
    with pytest.raises(ConfigError, match="exists"):
        explain_file(vectors_file, out, tell, job=JOB, d_model=32)
    explain_file(vectors_file, out, tell, job=JOB, d_model=32, force=True)


def test_a_kill_between_the_last_rename_and_the_clean_up_is_harmless(vectors_file, tmp_path, monkeypatch):
    out = tmp_path / "o.parquet"
    monkeypatch.setattr(bulk.shutil, "rmtree", lambda folder: None)
    explain_file(vectors_file, out, tell, job=JOB, d_model=32)
    before = pq.read_table(out)
    monkeypatch.undo()
    monkeypatch.setattr(bulk, "SHARD_ROWS", 3)
    summary = explain_file(vectors_file, out, tell, job=JOB, d_model=32)
    assert summary.resumed_rows == 7
    assert pq.read_table(out).equals(before)
    assert not out.with_name("o.parquet.partial").exists()


@pytest.mark.parametrize("name", ["o.csv", "o"])
def test_the_result_must_be_called_parquet(name, vectors_file, tmp_path):
    with pytest.raises(ConfigError, match="--out is"):
        explain_file(vectors_file, tmp_path / name, tell, job=JOB, d_model=32)


def test_vectors_of_another_width_are_refused_and_leave_nothing(vectors_file, tmp_path):
    with pytest.raises(VectorError, match="width 32"):
        explain_file(vectors_file, tmp_path / "o.parquet", tell, job=JOB, d_model=33)
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.parquet"]


def test_a_folder_is_the_same_until_a_byte_or_a_name_changes(tmp_path):
    folder = tmp_path / "pair"
    (folder / "av").mkdir(parents=True)
    (folder / "av" / "w.bin").write_bytes(bytes(5 << 20))
    (folder / "pair.json").write_text("{}")
    first = folder_identity(folder)
    assert folder_identity(folder) == first
    data = bytearray(5 << 20)
    data[-1] = 1
    (folder / "av" / "w.bin").write_bytes(data)
    second = folder_identity(folder)
    (folder / "pair.json").rename(folder / "pear.json")
    assert len({first, second, folder_identity(folder)}) == 3


def test_the_command_explains_a_file_and_says_what_it_wrote(tiny_pair, vectors_file, tmp_path):
    out = tmp_path / "words.parquet"
    options = ["explain", "--vectors", str(vectors_file), "--pair", str(tiny_pair), "--out", str(out)]
    result = CliRunner().invoke(app_module.app, options)
    assert result.exit_code == 0, result.output
    assert result.stdout == "" and "7 rows" in result.stderr
    assert pq.read_table(out)["explanation"].null_count == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_9_in_the_middle_resumes_to_the_same_table(tiny_pair, vectors, tmp_path: Path):
    source = tmp_path / "many.npy"
    np.save(source, np.random.default_rng().standard_normal((64, 32)).astype(np.float32))
    code = (
        "from dragoman.cli import bulk, app\nbulk.SHARD_ROWS = 4\n"
        "import sys; sys.argv[0] = 'dragoman'; app.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(app_module.__file__).parents[2])}

    def command(out: Path) -> list[str]:
        options = [
            "--vectors",
            str(source),
            "--pair",
            str(tiny_pair),
            "--out",
            str(out),
            "--temperature",
            "0.7",
        ]
        return [sys.executable, "-c", code, "explain", *options]

    whole, out = tmp_path / "whole.parquet", tmp_path / "killed.parquet"
    subprocess.run(command(whole), env=environment, check=True, capture_output=True)
    told = tmp_path / "stderr.txt"
    with told.open("w") as stderr:
        process = subprocess.Popen(command(out), env=environment, stderr=stderr)
    partial = out.with_name("killed.parquet.partial")
    deadline = time.monotonic() + 600
    while not len(list(partial.glob("shard-*"))) >= 3 and time.monotonic() < deadline:
        assert process.poll() is None, told.read_text()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists() and list(partial.glob("shard-*"))
    done = subprocess.run(command(out), env=environment, check=True, capture_output=True, text=True)
    assert "from an earlier run" in done.stderr
    assert pq.read_table(out).equals(pq.read_table(whole))
    assert not partial.exists()


def interrupted_after_every_shard(source: Path, out: Path, monkeypatch) -> Path:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bulk, "_merge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        explain_file(source, out, tell, job=JOB, d_model=32)
    return out.with_name(f"{out.name}.partial")


@pytest.mark.parametrize("keep", [0, 10, -9])
def test_a_shard_that_was_damaged_is_made_again(keep, vectors_file, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.parquet", tmp_path / "o.parquet"
    explain_file(vectors_file, whole, tell, job=JOB, d_model=32)
    shard = sorted(interrupted_after_every_shard(vectors_file, out, monkeypatch).glob("shard-*"))[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    summary = explain_file(vectors_file, out, tell, job=JOB, d_model=32)
    assert summary.resumed_rows == 4
    assert pq.read_table(out).equals(pq.read_table(whole))


def test_a_bad_row_leaves_nothing_behind_so_that_the_corrected_file_can_be_read(vectors, tmp_path):
    source, out = tmp_path / "v.parquet", tmp_path / "o.parquet"
    bad = vectors.copy()
    bad[1, 3] = np.nan
    pq.write_table(pa.table({"activation_vector": bad.tolist()}), source)
    with pytest.raises(VectorError, match="Row 1"):
        explain_file(source, out, tell, job=JOB, d_model=32)
    assert [path.name for path in tmp_path.iterdir()] == ["v.parquet"]
    pq.write_table(pa.table({"activation_vector": vectors.tolist()}), source)
    assert explain_file(source, out, tell, job=JOB, d_model=32).rows == 7


def test_a_folder_of_somebody_else_is_neither_used_nor_removed(vectors_file, tmp_path):
    mine = tmp_path / "o.parquet.partial" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        explain_file(vectors_file, tmp_path / "o.parquet", tell, job=JOB, d_model=32)
    assert mine.read_text() == "mine"
