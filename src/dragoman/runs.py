"""Run folders, provenance, atomic writes, and where this package keeps its files.

A run folder holds `config.json` (the resolved config, nothing else), `run.json` (kind and provenance of the
process that created it), `metrics.jsonl` (one line of figures a step) and `state-NAME.json` files. One
process at a time holds its lock; the system releases the lock when the process dies, however it dies.

This is the only module outside cli that reads the environment: `DRAGOMAN_HOME`, so that the Python API finds
the cache, and the variables by which each platform names the user's cache folder.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import filelock
import orjson

from dragoman.errors import DragomanError, ResourceError, RunError
from dragoman.files import (
    atomic_folder,
    atomic_path,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    canonical_json,
    check_disk_space,
    denials_explained,
    full_disk_explained,
    remove_temporaries,
)

__all__ = [
    "Progress",
    "RunFolder",
    "atomic_folder",
    "atomic_path",
    "atomic_write_bytes",
    "atomic_write_json",
    "atomic_write_text",
    "check_disk_space",
    "content_hash",
    "home",
    "provenance",
    "remove_temporaries",
]

Progress = Callable[[int, int, str], None]
"""Called with (done, total, unit); unit is a plural such as "tokens", "vectors", "steps"."""

_REPORTED_PACKAGES = ("torch", "transformers", "peft")


def home() -> Path:
    """The folder for what can be fetched or made again: `DRAGOMAN_HOME`, or the user's cache folder.

    It is not created here.
    """
    chosen = os.environ.get("DRAGOMAN_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
        return Path(base) / "dragoman" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dragoman"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification tells programs to ignore a relative path here.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "dragoman"


def provenance(**extra: Any) -> dict[str, Any]:
    """Where an artefact comes from: versions, git revision, platform, time; `extra` is added by name.

    Returns:
        `dragoman`, `torch`, `transformers`, `peft` (version or None), `python`, `platform`, `git_revision`
        and `git_changed` (None outside a checkout of this package), `created` (UTC, ISO 8601, seconds).
    """
    revision, changed = _git_state()
    return {
        "dragoman": _version("dragoman"),
        "git_revision": revision,
        "git_changed": changed,
        "python": platform.python_version(),
        **{package: _version(package) for package in _REPORTED_PACKAGES},
        "platform": platform.platform(),
        "created": _now(),
        **extra,
    }


def content_hash(obj: Any) -> str:
    """The first 16 hex digits of the sha256 of the canonical JSON of `obj`."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()[:16]


class RunFolder:
    """A run's folder, held by this process until it is closed.

    Attributes:
        path: the folder.
        config: the resolved config as it stands in `config.json`.
        resumed: whether the folder held this run already.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], *, resumed: bool, lock: filelock.BaseFileLock
    ) -> None:
        # Use `RunFolder.open`; this only ties together what it has checked.
        self.path = path
        self.config = config
        self.resumed = resumed
        self._lock = lock

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: Mapping[str, Any], *, kind: str) -> RunFolder:
        """Creates or resumes the run of `kind` with `config` in the folder `path`.

        Args:
            path: the folder, created when missing.
            config: the resolved config; anything with a JSON spelling.
            kind: what the run does, such as "train-verbalizer"; a folder never changes its kind.

        Raises:
            RunError: another process holds the folder, or it belongs to another kind or config.
            ResourceError: the folder cannot be written to.
        """
        folder = Path(path).absolute()
        wanted: dict[str, Any] = orjson.loads(canonical_json(dict(config)))
        lock = _acquire(folder)
        try:
            remove_temporaries(folder)
            resumed = _claim(folder, wanted, kind)
            _drop_torn_line(folder / "metrics.jsonl")
        except BaseException:
            _release(folder, lock)
            raise
        return cls(folder, wanted, resumed=resumed, lock=lock)

    def log(self, **figures: Any) -> None:
        """Appends one line of figures to `metrics.jsonl`, with `time` in seconds since the epoch.

        The line is written in one call; a kill can tear only the last line, which readers drop. Non-finite
        figures become null.

        Raises:
            ResourceError: the disk is full; the torn line is removed.
        """
        line = canonical_json({"time": round(time.time(), 3), **figures}) + b"\n"
        metrics_path = self.path / "metrics.jsonl"
        try:
            with full_disk_explained(metrics_path), metrics_path.open("ab", buffering=0) as handle:
                written = handle.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except ResourceError:
            _drop_torn_line(metrics_path)
            raise

    def metrics(self) -> list[dict[str, Any]]:
        """All logged lines, oldest first; a torn last line is left out.

        Raises:
            RunError: a line before the last is not JSON.
        """
        return _read_metrics(self.path / "metrics.jsonl")

    def rewind(self, step: int) -> None:
        """Drops logged lines whose `step` is greater than `step`.

        A run that resumes from the checkpoint of that step logs the later steps again.
        """
        kept = [line for line in self.metrics() if not line.get("step", step) > step]
        atomic_write_bytes(
            self.path / "metrics.jsonl", b"".join(canonical_json(line) + b"\n" for line in kept)
        )

    def state(self, name: str) -> dict[str, Any] | None:
        """What `save_state` last kept under `name`, or None."""
        path = self._state_path(name)
        return orjson.loads(path.read_bytes()) if path.exists() else None

    def save_state(self, name: str, **values: Any) -> None:
        """Keeps `values` under `name` (`state-NAME.json`), replacing what was there as a whole."""
        atomic_write_json(self._state_path(name), values)

    def close(self) -> None:
        """Gives the folder free for other processes; closing twice is fine."""
        if self._lock.is_locked:
            _release(self.path, self._lock)

    def _state_path(self, name: str) -> Path:
        assert name.replace("-", "").replace("_", "").isalnum(), f"state name {name!r} is not a plain word"
        return self.path / f"state-{name}.json"

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A config that was refused before any work must not hold the folder against the corrected one.
        if isinstance(error, DragomanError) and not self.resumed and not self._has_work():
            (self.path / "config.json").unlink(missing_ok=True)
        self.close()

    def _has_work(self) -> bool:
        own = {"config.json", "run.json", "lock.json", ".lock"}
        return any(path.name not in own for path in self.path.iterdir())


def _acquire(folder: Path) -> filelock.BaseFileLock:
    with denials_explained(folder / "run.json"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise _held_error(folder) from error
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
    try:
        atomic_write_json(folder / "lock.json", holder)
    except BaseException:
        lock.release()
        raise
    return lock


def _release(folder: Path, lock: filelock.BaseFileLock) -> None:
    # lock.json goes first: it must never describe this process while another holds the lock.
    (folder / "lock.json").unlink(missing_ok=True)
    lock.release()


def _held_error(folder: Path) -> RunError:
    holder = _read_holder(folder / "lock.json")
    who = (
        f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        if holder
        else "another process that has only just started"
    )
    return RunError(
        f"{folder} is in use by {who}",
        expected="a run folder that no other process holds",
        consequence="two processes would write over each other's checkpoints and figures",
        remedy="wait for that process or end it, or name another folder",
    )


def _read_holder(path: Path) -> dict[str, Any] | None:
    # The holder writes lock.json just after it got the lock: give it a moment.
    for _ in range(20):
        try:
            holder = orjson.loads(path.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            time.sleep(0.025)
            continue
        return holder if {"pid", "host", "since"} <= holder.keys() else None
    return None


def _claim(folder: Path, wanted: dict[str, Any], kind: str) -> bool:
    """Checks or writes `run.json` and `config.json`; returns whether the folder held this run already."""
    config_path, run_path = folder / "config.json", folder / "run.json"
    if not config_path.exists():
        # config.json is written last: a folder without it was never claimed to the end.
        atomic_write_json(run_path, {"schema": "dragoman/run/1", "kind": kind, "provenance": provenance()})
        atomic_write_json(config_path, wanted)
        return False
    found_kind = _read_json(run_path).get("kind")
    if found_kind != kind:
        raise RunError(
            f"{folder} holds a run of kind {found_kind!r}",
            expected=f"a new folder or one of kind {kind!r}",
            consequence="files of two different kinds of run would be mixed",
            remedy="name another folder",
        )
    difference = _first_difference(_read_json(config_path), wanted)
    if difference is not None:
        key, found, expected = difference
        raise RunError(
            f"{config_path} has {key} = {found}",
            expected=f"{key} = {expected}, as asked for now",
            consequence="one run would be continued under two configs and its figures would mean nothing",
            remedy="name another folder, or ask for the config that stands in this one",
        )
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError) as error:
        raise _damaged(path, "is missing or is not JSON") from error
    if not isinstance(value, dict):
        raise _damaged(path, f"holds a {type(value).__name__}, not a mapping")
    return value


def _damaged(path: Path, what: str) -> RunError:
    return RunError(
        f"{path} {what}",
        expected="the file as a run of this program left it",
        consequence="the run would continue from a state that nobody knows",
        remedy="restore the file, or start again in another folder",
    )


def _first_difference(found: Any, wanted: Any, key: str = "") -> tuple[str, str, str] | None:
    """The first differing key in sorted order, dotted, with both values as JSON ("absent" when missing)."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() | wanted.keys()):
            dotted = f"{key}.{name}" if key else str(name)
            difference = _first_difference(found.get(name, _ABSENT), wanted.get(name, _ABSENT), dotted)
            if difference is not None:
                return difference
        return None
    if type(found) is type(wanted) and found == wanted:
        return None
    return key, _shown(found), _shown(wanted)


_ABSENT = object()


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else orjson.dumps(value).decode()


def _drop_torn_line(path: Path) -> None:
    """Cuts what a kill left after the last newline."""
    if not path.exists():
        return
    with path.open("rb+") as handle:
        content = handle.read()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            handle.truncate(whole)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    parsed: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise _damaged(path, f"has a line {number} that is not JSON") from error
    return parsed


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@functools.cache
def _git_state() -> tuple[str | None, bool | None]:
    """(commit, whether files differ from it) when this package runs from its own checkout."""
    package = Path(__file__).resolve().parent
    root = package.parent.parent
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None, None
    revision = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    return revision, None if status is None else bool(status)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git, no commit yet, or a checkout that belongs to somebody else
    return finished.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
