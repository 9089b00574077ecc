"""Folders that are expensive to build: built once, checksummed, rebuilt when damaged, safe for two processes.

A cached folder is complete exactly if its manifest is there and every file has the size and the sha256
that the manifest says. The folder appears under its name by one rename, after the manifest was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock

from dragoman.runs import atomic_folder, atomic_write_json, home, remove_temporaries
from dragoman.subjects.wheels import file_sha256

CONTENT = "model"
MANIFEST = "manifest.json"
SCHEMA = "dragoman/subject-cache/2"
MAX_MANIFEST_BYTES = 2**20
ALWAYS_HASHED_BYTES = 2**31


def subjects_home() -> Path:
    """Folder that holds all cached subjects."""
    return home() / "subjects"


def ensure_cached(entry: Path, key: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Return the complete folder `entry/model`, building it where it is missing, damaged or of another key.

    Args:
        entry: a folder of its own for this cache entry; it also holds the lock.
        key: what the content depends on (hash of the source, converter version).
        build: writes all files into the empty folder it is given.

    Returns:
        The folder with the files and their manifest.

    Raises:
        ResourceError: the disk is full or the cache cannot be written.
    """
    folder = entry / CONTENT
    if damage(folder, key) is None:
        return folder
    entry.mkdir(parents=True, exist_ok=True)
    # The lock is released by the system if its holder dies, so waiting cannot last for ever.
    with FileLock(entry / "lock"):
        if damage(folder, key) is None:
            return folder
        remove_temporaries(entry)
        with atomic_folder(folder) as partial:
            build(partial)
            _write_manifest(partial, key)
    return folder


def damage(folder: Path, key: Mapping[str, Any] | None = None, *, deep: bool = True) -> str | None:
    """Why a cached folder cannot be used, or None if it is whole.

    Files up to 2 GiB are hashed every time (about a second a gigabyte, which also brings them into the
    page cache for the load that follows); larger ones only where size or modification time has changed.

    Args:
        folder: the folder with the manifest.
        key: what it should have been built from; None accepts any.
        deep: hash the files; False looks at names and sizes only.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return "no readable manifest"
    if key is not None and manifest["key"] != dict(key):
        return "built from another source or by another version"
    for name, expected in manifest["files"].items():
        fault = _file_damage(folder / name, expected, deep)
        if fault is not None:
            return f"{name} {fault}"
    return None


def _file_damage(path: Path, expected: Mapping[str, Any], deep: bool) -> str | None:
    if not path.is_file():
        return "is missing"
    stat = path.stat()
    if stat.st_size != expected["bytes"]:
        return f"has {stat.st_size} bytes instead of {expected['bytes']}"
    untouched = stat.st_size > ALWAYS_HASHED_BYTES and stat.st_mtime_ns == expected["mtime_ns"]
    if deep and not untouched and file_sha256(path) != expected["sha256"]:
        return "has changed"
    return None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a cached folder; None where it is missing, torn or of another schema."""
    path = folder / MANIFEST
    if not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
        return None
    try:
        manifest = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        return None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        return None
    files = manifest.get("files")
    whole = isinstance(files, dict) and files and all(_is_entry(entry) for entry in files.values())
    return manifest if whole and "key" in manifest else None


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and {"bytes", "mtime_ns", "sha256"} <= entry.keys()


def _write_manifest(folder: Path, key: Mapping[str, Any]) -> None:
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sha256": file_sha256(path),
        }
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    assert files, "a cache entry was built without files"
    atomic_write_json(folder / MANIFEST, {"schema": SCHEMA, "key": dict(key), "files": files})
