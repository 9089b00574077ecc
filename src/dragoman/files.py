"""Files that appear under their final name only when they are complete.

Everything this package writes goes to a temporary name in the same folder, is flushed to the disk, and is
renamed. A kill, an exception or a full disk at any moment therefore leaves either the old file or the new
one, never half of one. Temporary names start with `TEMPORARY_PREFIX`; what a SIGKILL leaves behind is removed
by whoever next holds the folder's lock (`remove_temporaries`).

This module stands below the sidecar in the house, because the sidecar is written through it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import filelock
import orjson
import pydantic

from dragoman.errors import ResourceError

TEMPORARY_PREFIX = ".tmp-"
_REPLACED_PREFIX = ".replaced-"
_FULL_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Rust (safetensors, parquet) and C++ writers report a full disk in words only.
_FULL_DISK_WORDS = (
    "No space left on device",
    "Disk quota exceeded",
    "(os error 28)",
    "not enough space on the disk",
)
_DENIED_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR}
)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes `data` to `path`, complete or not at all.

    Raises:
        ResourceError: the disk is full or the folder cannot be written to.
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` as UTF-8 with newlines as they are, complete or not at all.

    Raises:
        ResourceError: the disk is full or the folder cannot be written to.
    """
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON (keys sorted, two spaces of indentation), complete or not at all.

    Non-finite floats become null, as JSON has no word for them.

    Raises:
        ResourceError: the disk is full or the folder cannot be written to.
    """
    atomic_write_bytes(path, canonical_json(value, indent=True) + b"\n")


def canonical_json(value: Any, *, indent: bool = False) -> bytes:
    """The one JSON spelling of `value`: keys sorted, paths as text, numpy and torch scalars as numbers.

    Pydantic models and dataclasses are written by their fields, sets in sorted order.
    """
    options = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    options |= orjson.OPT_PASSTHROUGH_DATACLASS  # orjson's own way leaves their fields unsorted
    if indent:
        options |= orjson.OPT_INDENT_2
    return orjson.dumps(value, default=_json_default, option=options)


def _json_default(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    to_number = getattr(value, "item", None)  # a torch scalar, without importing torch here
    if to_number is not None:
        return to_number()
    raise TypeError(f"{type(value).__name__} has no JSON spelling")


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Generator[Path]:
    """Yields a temporary path in the same folder; it becomes `path` when the block ends well.

    The folder is created. The temporary keeps the suffix of `path`, because some writers look at it. A `path`
    that is a device or a pipe (`/dev/stdout`) is written to, not replaced.

    Raises:
        ResourceError: the disk is full (also when a writer reports it in words only), `path` is a folder, or
            the folder cannot be written to. Nothing is left under the final or the temporary name.
    """
    target = Path(path)
    if _is_stream(target):
        with _spooled_to_stream(target) as temporary:
            yield temporary
        return
    with denials_explained(target):
        if target.is_dir():
            raise _denied(target, "it is a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}{target.suffix}"
    try:
        # Creating it here reports a folder that cannot be written to before any work is done.
        with denials_explained(target):
            temporary.touch(exist_ok=False)
        with full_disk_explained(target):
            yield temporary
            _flush_to_disk(temporary)
            temporary.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _flush_folder(target.parent)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Generator[Path]:
    """Yields an empty temporary folder beside `path`, which becomes `path` when the block ends well.

    An existing folder is set aside, replaced, and removed. Should the process be killed between the two
    renames, the folder set aside is put back by the next `atomic_folder` for the same path.

    Raises:
        ResourceError: the disk is full or the parent folder cannot be written to.
    """
    target = Path(path)
    aside = target.parent / f"{_REPLACED_PREFIX}{target.name}"
    temporary = target.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}"
    try:
        with denials_explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with _swap_lock(target):
                _recover_set_aside(target, aside)
            temporary.mkdir()
        with full_disk_explained(target):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file() and not file.is_symlink():
                    _flush_to_disk(file)
            with _swap_lock(target):
                _swap_folders(temporary, target, aside)
                shutil.rmtree(aside, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush_folder(target.parent)


def remove_temporaries(folder: str | os.PathLike[str]) -> list[Path]:
    """Removes what killed writers left directly in `folder`; call it only while holding the folder's lock.

    Returns:
        The paths removed.
    """
    leftovers = sorted(Path(folder).glob(f"{TEMPORARY_PREFIX}*"))
    for leftover in leftovers:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
    return leftovers


def check_disk_space(folder: str | os.PathLike[str], needed_bytes: int) -> None:
    """Refuses work that cannot fit: `folder` (or its nearest existing parent) must have `needed_bytes` free.

    Raises:
        ResourceError: too little space is free.
    """
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ResourceError(
            f"{existing} has {_size(free)} free",
            expected=f"at least {_size(needed_bytes)} for what is about to be written there",
            consequence="the work would run until the disk is full and then be lost",
            remedy="free some space, or choose another folder (DRAGOMAN_HOME moves the cache)",
        )


@contextlib.contextmanager
def full_disk_explained(target: Path) -> Generator[None]:
    """Turns a full disk, however the writer reports it, into a `ResourceError` about `target`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ResourceError) or not is_full_disk(error):
            raise
        raise ResourceError(
            f"the disk of {target.parent} filled up while {target.name} was being written",
            expected="enough free space for the whole file",
            consequence="a truncated file would stand under its final name",
            remedy="free some space there or choose another folder, then run the same command again",
        ) from error


def is_full_disk(error: BaseException) -> bool:
    """Whether `error` says that the disk or the quota is full, by number or in words."""
    if isinstance(error, OSError) and error.errno in _FULL_DISK_ERRNOS:
        return True
    return any(words in str(error) for words in _FULL_DISK_WORDS)


@contextlib.contextmanager
def denials_explained(target: Path) -> Generator[None]:
    """Turns a missing permission or an impossible path into a `ResourceError` about `target`."""
    try:
        with full_disk_explained(target):
            yield
    except (FileExistsError, NotADirectoryError) as error:
        raise _denied(target, "a part of its folder's path is a file") from error
    except OSError as error:
        if error.errno not in _DENIED_ERRNOS:
            raise
        raise _denied(target, (error.strerror or str(error)).lower()) from error


def _denied(target: Path, reason: str) -> ResourceError:
    return ResourceError(
        f"{target} cannot be written: {reason}",
        expected="a file name in a folder that this user may write to",
        consequence="the results would be lost",
        remedy="name another path, or change the folder's permissions",
    )


def _is_stream(target: Path) -> bool:
    try:
        mode = target.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


@contextlib.contextmanager
def _spooled_to_stream(target: Path) -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="dragoman-") as folder:
        temporary = Path(folder) / f"spool{target.suffix}"
        with full_disk_explained(target):
            yield temporary
            with temporary.open("rb") as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def _recover_set_aside(target: Path, aside: Path) -> None:
    if not aside.exists():
        return
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.rename(target)


def _swap_lock(target: Path) -> filelock.BaseFileLock:
    """One swap of a folder at a time: between its two renames there is nothing under the final name.

    The lock lies in the system's temporary folder, so that nothing of it stays beside the result.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    key = hashlib.sha256(f"{user}/{target.absolute()}".encode()).hexdigest()[:24]
    return filelock.FileLock(Path(tempfile.gettempdir()) / f"dragoman-{key}.lock", timeout=60)


def _swap_folders(temporary: Path, target: Path, aside: Path) -> None:
    _set_aside(target, aside)
    try:
        temporary.rename(target)
    except OSError:
        _recover_set_aside(target, aside)
        raise


def _set_aside(target: Path, aside: Path) -> None:
    if target.is_file() or target.is_symlink():
        target.unlink()
        return
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        target.rename(aside)


def _flush_to_disk(file: Path) -> None:
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())


def _flush_folder(folder: Path) -> None:
    # Makes the rename itself survive a power cut; some systems cannot open a folder, and need not.
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        return
    finally:
        os.close(handle)


def _size(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"
