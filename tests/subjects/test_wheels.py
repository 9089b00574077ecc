"""Files out of wheels, through the real pip, from a folder that pip itself is configured for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dragoman.errors import FetchError
from dragoman.subjects.wheels import WheelTag, fetch_wheel_members, file_sha256

MEMBER = "tinydata/data/poem.txt"
POEM = b"Two roads diverged in a wood\n" * 1000


def make_wheel(folder: Path, *, tag: str = "py3-none-any") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tinydata-1.0-{tag}.whl"
    info = "tinydata-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, POEM)
        archive.writestr("tinydata/__init__.py", "raise SystemExit('a fetched wheel was imported')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinydata\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip finds wheels in, and nothing else to find them in."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


def test_a_member_arrives_through_pips_own_settings(tmp_path: Path, links: Path) -> None:
    wheel = make_wheel(links)
    seen: list[tuple[int, int, str]] = []
    target = tmp_path / "out"
    got = fetch_wheel_members(
        "tinydata", "1.0", file_sha256(wheel), [MEMBER], target, progress=lambda *step: seen.append(step)
    )
    assert got == target
    assert (target / "poem.txt").read_bytes() == POEM
    assert [path.name for path in target.iterdir()] == ["poem.txt"]
    assert seen[-1] == (2, 2, "steps")


def test_a_wheel_of_another_platform_is_fetched_for_its_data(tmp_path: Path, links: Path) -> None:
    wheel = make_wheel(links, tag="cp39-cp39-win_amd64")
    tag = WheelTag(python="3.9", abi="cp39", platform="win_amd64")
    fetch_wheel_members("tinydata", "1.0", file_sha256(wheel), [MEMBER], tmp_path / "out", tag=tag)
    assert (tmp_path / "out" / "poem.txt").read_bytes() == POEM


def test_a_wrong_wheel_hash_is_refused_with_both_hashes_and_nothing_is_left(
    tmp_path: Path, links: Path
) -> None:
    wheel = make_wheel(links)
    with pytest.raises(FetchError) as caught:
        fetch_wheel_members("tinydata", "1.0", "0" * 64, [MEMBER], tmp_path / "out")
    assert file_sha256(wheel) in str(caught.value)
    assert "0" * 64 in caught.value.expected
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wrong_member_hash_is_refused_and_nothing_is_left(tmp_path: Path, links: Path) -> None:
    make_wheel(links)
    right = hashlib.sha256(POEM).hexdigest()
    fetch_wheel_members("tinydata", "1.0", None, {MEMBER: right}, tmp_path / "right")
    with pytest.raises(FetchError, match=right):
        fetch_wheel_members("tinydata", "1.0", None, {MEMBER: "1" * 64}, tmp_path / "wrong")
    assert list((tmp_path / "wrong").iterdir()) == []


def test_a_member_that_is_not_there_is_named(tmp_path: Path, links: Path) -> None:
    wheel = make_wheel(links)
    with pytest.raises(FetchError, match=r"tinydata/other\.txt"):
        fetch_wheel_members("tinydata", "1.0", file_sha256(wheel), ["tinydata/other.txt"], tmp_path / "out")


def test_a_wheel_that_cannot_be_found_says_what_to_do_offline(tmp_path: Path, links: Path) -> None:
    with pytest.raises(FetchError) as caught:
        fetch_wheel_members("tinydata", "1.0", "0" * 64, [MEMBER], tmp_path / "out")
    assert "tinydata 1.0" in caught.value.found
    assert "PIP_FIND_LINKS" in caught.value.remedy


def test_an_environment_without_pip_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(FetchError, match="ensurepip"):
        fetch_wheel_members("tinydata", "1.0", "0" * 64, [MEMBER], tmp_path / "out")
