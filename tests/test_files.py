"""Files and folders that appear whole or not at all: exceptions, kills, full disks, two processes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.processes import names, run_python

from dragoman.errors import ResourceError
from dragoman.runs import (
    atomic_folder,
    atomic_path,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    check_disk_space,
)

# ---------------------------------------------------------------- one file


def test_a_file_is_written_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "table.parquet"
    atomic_write_bytes(target, b"first")
    atomic_write_bytes(target, b"second")
    assert target.read_bytes() == b"second"
    assert names(target.parent) == ["table.parquet"]


def test_text_is_utf8_with_its_newlines(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "a.txt", "㈎\r\nb\n")
    assert (tmp_path / "a.txt").read_bytes() == "㈎\r\nb\n".encode()


def test_json_has_sorted_keys_and_plain_numbers_whatever_made_them(tmp_path: Path) -> None:
    atomic_write_json(
        tmp_path / "a.json",
        {"b": np.float32(0.5), "a": torch.tensor(3), "p": Path("x/y"), "s": {2, 1}, "nan": float("nan")},
    )
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"a": 3, "b": 0.5, "nan": None, "p": "x/y", "s": [1, 2]}
    assert re.findall(r'"(\w+)":', text) == ["a", "b", "nan", "p", "s"]


def test_the_temporary_keeps_the_suffix_and_stands_in_the_same_folder(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "vectors.npy") as temporary:
        assert temporary.suffix == ".npy"
        assert temporary.parent == tmp_path
        np.save(temporary, np.arange(3))
        assert not (tmp_path / "vectors.npy").exists()
    assert np.load(tmp_path / "vectors.npy", allow_pickle=False).tolist() == [0, 1, 2]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_exception_in_the_block_keeps_the_old_file_and_removes_the_temporary(
    tmp_path: Path, raised: type[BaseException]
) -> None:
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(raised), atomic_path(tmp_path / "a.json") as temporary:
        temporary.write_text("half of the n")
        raise raised
    assert (tmp_path / "a.json").read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_a_file_gets_the_permissions_that_the_user_s_umask_gives(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    atomic_write_text(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out.json").mkdir()
    with pytest.raises(ResourceError, match=r"out\.json cannot be written: it is a folder"):
        atomic_write_text(tmp_path / "out.json", "x")


def test_a_file_among_the_parents_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="a part of its folder's path is a file"):
        atomic_write_text(tmp_path / "file" / "out.json", "x")


def test_a_name_that_is_too_long_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be written"):
        atomic_write_text(tmp_path / ("n" * 300), "x")
    assert names(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have no path there")
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = run_python("import sys; print(open(sys.argv[1]).read())", pipe)
    atomic_write_text(pipe, "through the pipe")
    assert reader.communicate(timeout=20)[0].strip() == "through the pipe"
    assert pipe.is_fifo()


# ---------------------------------------------------------------- a full disk


@contextlib.contextmanager
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB, where the system lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here; the file-size limit test covers the same path")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], capture_output=True, check=True)


def test_a_disk_that_fills_up_keeps_the_old_file_and_leaves_no_temporary(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        target = disk / "vectors.parquet"
        atomic_write_bytes(target, b"old")
        with pytest.raises(ResourceError, match=r"filled up while vectors\.parquet"):
            atomic_write_bytes(target, b"x" * 200_000)
        assert target.read_bytes() == b"old"
        assert names(disk) == ["vectors.parquet"]


def test_a_disk_that_fills_up_in_the_middle_of_a_folder_leaves_the_old_folder(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        with atomic_folder(disk / "pair") as temporary:
            (temporary / "pair.json").write_text("old")
        with pytest.raises(ResourceError), atomic_folder(disk / "pair") as temporary:
            (temporary / "pair.json").write_text("new")
            (temporary / "weights").write_bytes(b"x" * 200_000)
        assert (disk / "pair" / "pair.json").read_text() == "old"
        assert names(disk) == ["pair"]


LIMITED = """
import resource, sys
from pathlib import Path
from dragoman.errors import ResourceError
from dragoman.runs import atomic_write_bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    atomic_write_bytes(sys.argv[1], b"x" * 100_000)
except ResourceError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no file-size limits there")
def test_a_write_that_the_system_cuts_off_leaves_no_file_at_all(tmp_path: Path) -> None:
    output, errors = run_python(LIMITED, tmp_path / "vectors.parquet").communicate(timeout=30)
    assert "filled up while vectors.parquet was being written" in output, errors
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_every_way_of_reporting_a_full_disk_becomes_a_resource_error(
    tmp_path: Path, error: Exception
) -> None:
    with pytest.raises(ResourceError) as raised, atomic_path(tmp_path / "a.safetensors") as temporary:
        temporary.write_bytes(b"half")
        raise error
    assert raised.value.__cause__ is error
    assert names(tmp_path) == []


def test_a_rename_that_fails_on_a_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ResourceError):
        atomic_write_text(tmp_path / "a.json", "x")
    assert names(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_device_is_a_resource_error() -> None:
    with pytest.raises(ResourceError, match="filled up"):
        atomic_write_text("/dev/full", "x")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "a"):
        (tmp_path / "missing").read_text()
    assert names(tmp_path) == []


def test_work_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    check_disk_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(
        ResourceError, match=r"GiB free.*at least 9\.095e\+05 TiB|TiB free.*at least 9\.095e\+05 TiB"
    ):
        check_disk_space(tmp_path / "not" / "yet", 10**18)


# ---------------------------------------------------------------- a folder


def test_a_folder_replaces_another_as_a_whole(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "pair") as temporary:
            (temporary / "deep").mkdir()
            (temporary / "deep" / content).write_text(content)
    assert names(tmp_path) == ["pair"]
    assert names(tmp_path / "pair" / "deep") == ["new"]


def test_a_folder_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "old").write_text("")
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "pair") as temporary:
        (temporary / "new").write_text("")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["pair"]
    assert names(tmp_path / "pair") == ["old"]


def test_a_folder_set_aside_by_a_killed_process_is_put_back(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "pair") as temporary:
        (temporary / "old").write_text("")
    # What a kill between the two renames leaves:
    (tmp_path / "pair").rename(tmp_path / ".replaced-pair")
    with pytest.raises(ValueError, match="stop"), atomic_folder(tmp_path / "pair"):
        raise ValueError("stop")
    assert names(tmp_path / "pair") == ["old"]
    assert names(tmp_path) == ["pair"]


REPLACE_OFTEN = """
import sys
from pathlib import Path
from dragoman.runs import atomic_folder
for turn in range(20):
    with atomic_folder(sys.argv[1]) as temporary:
        for name in "ab":
            (temporary / name).write_text(sys.argv[2] + str(turn))
"""


def test_two_processes_replacing_one_folder_leave_one_whole_result(tmp_path: Path) -> None:
    workers = [run_python(REPLACE_OFTEN, tmp_path / "pair", name) for name in ("x", "y")]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    assert (tmp_path / "pair" / "a").read_text() == (tmp_path / "pair" / "b").read_text()
    assert [name for name in names(tmp_path) if not name.startswith(".replaced")] == ["pair"]
