"""The cache of converted models: complete or absent, repaired when damaged, built once by two processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from dragoman.subjects.cache import MANIFEST, damage, ensure_cached

KEY = {"source": "a", "converter": 1}


class Builder:
    """Writes two files and counts how often it is asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "weights.bin").write_bytes(bytes(range(256)) * 100)
        (folder / "config.json").write_text("{}")


@pytest.fixture
def cached(tmp_path: Path) -> tuple[Path, Path, Builder]:
    builder = Builder()
    entry = tmp_path / "entry"
    return entry, ensure_cached(entry, KEY, builder), builder


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    data[1234] ^= 1
    (folder / "weights.bin").write_bytes(data)


def cut_the_weights(folder: Path) -> None:
    (folder / "weights.bin").write_bytes((folder / "weights.bin").read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def tear_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:40])


def replace_the_manifest_by_a_list(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"[]")


def test_a_whole_entry_is_not_built_again(cached: tuple[Path, Path, Builder]) -> None:
    entry, folder, builder = cached
    assert ensure_cached(entry, KEY, builder) == folder
    assert builder.calls == 1


@pytest.mark.parametrize(
    "harm",
    [
        flip_a_byte,
        cut_the_weights,
        lose_a_file,
        lose_the_manifest,
        tear_the_manifest,
        replace_the_manifest_by_a_list,
    ],
    ids=lambda harm: harm.__name__,
)
def test_a_damaged_entry_is_noticed_and_rebuilt(
    cached: tuple[Path, Path, Builder], harm: Callable[[Path], None]
) -> None:
    entry, folder, builder = cached
    harm(folder)
    assert damage(folder, KEY) is not None
    ensure_cached(entry, KEY, builder)
    assert builder.calls == 2
    assert damage(folder, KEY) is None


def test_an_entry_of_another_source_or_version_is_rebuilt(cached: tuple[Path, Path, Builder]) -> None:
    entry, folder, builder = cached
    ensure_cached(entry, {**KEY, "converter": 2}, builder)
    assert builder.calls == 2
    assert orjson.loads((folder / MANIFEST).read_bytes())["key"]["converter"] == 2


def test_a_failed_build_leaves_neither_a_folder_nor_remains(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x" * 1000)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_cached(tmp_path / "entry", KEY, fail)
    assert not (tmp_path / "entry" / "model").exists()
    assert [p.name for p in (tmp_path / "entry").iterdir() if p.name != "lock"] == []


WORKER = """
import sys, time, types
from pathlib import Path
import dragoman
# The package's own __init__ imports torch, which takes longer than everything tested here.
room = types.ModuleType("dragoman.subjects")
room.__path__ = [str(Path(dragoman.__file__).parent / "subjects")]
sys.modules["dragoman.subjects"] = room
from dragoman.subjects.cache import ensure_cached
entry, log, pause = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def build(folder):
    with log.open("a") as stream:
        stream.write("built\\n")
    for part in range(10):
        (folder / f"part{part}").write_bytes(b"x" * 10_000)
        time.sleep(pause / 10)
folder = ensure_cached(entry, {"source": "a"}, build)
assert len(list(folder.glob("part*"))) == 10
"""


def start_worker(tmp_path: Path, pause: float) -> subprocess.Popen[bytes]:
    arguments = [str(tmp_path / "entry"), str(tmp_path / "log"), str(pause)]
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments])


def test_two_processes_at_once_build_one_whole_entry_once(tmp_path: Path) -> None:
    workers = [start_worker(tmp_path, 1.0) for _ in range(2)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    assert (tmp_path / "log").read_text().splitlines() == ["built"]
    assert damage(tmp_path / "entry" / "model", {"source": "a"}) is None


def test_an_entry_whose_builder_was_killed_is_built_by_the_next(tmp_path: Path) -> None:
    victim = start_worker(tmp_path, 600.0)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "entry").glob(".tmp-*/part*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    victim.kill()
    victim.wait()
    assert not (tmp_path / "entry" / "model").exists()
    ensure_cached(tmp_path / "entry", {"source": "a"}, Builder())
    assert list((tmp_path / "entry").glob(".tmp-*")) == []
    assert damage(tmp_path / "entry" / "model", {"source": "a"}) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.pop("key"),
        lambda manifest: manifest.pop("files"),
        lambda manifest: manifest.update(files=5),
        lambda manifest: manifest.update(files={}),
        lambda manifest: manifest.update(files={"weights.bin": 5}),
        lambda manifest: manifest["files"]["weights.bin"].pop("sha256"),
    ],
)
def test_a_manifest_that_lacks_something_counts_as_none(
    cached: tuple[Path, Path, Builder], change: Callable[[dict], object]
) -> None:
    entry, folder, builder = cached
    manifest = orjson.loads((folder / MANIFEST).read_bytes())
    change(manifest)
    (folder / MANIFEST).write_bytes(orjson.dumps(manifest))
    assert damage(folder, KEY) == "no readable manifest"
    assert ensure_cached(entry, KEY, builder) == folder and builder.calls == 2
