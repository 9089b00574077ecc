"""`dragoman subjects`: list, fetch, show, and their refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dragoman.cli.app import app
from dragoman.subjects import Subject


def test_list_names_the_embedded_subjects_and_their_state() -> None:
    done = CliRunner().invoke(app, ["subjects", "list"])
    assert done.exit_code == 0
    assert "smollm2-135m" in done.stdout
    assert "Apache-2.0" in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80


def test_list_as_json_carries_schema_provenance_and_rows() -> None:
    done = CliRunner().invoke(app, ["subjects", "list", "--json", "-"])
    document = json.loads(done.stdout)
    assert document["schema"] == "dragoman/subjects/1"
    assert {row["name"] for row in document["rows"]} == {"smollm2-135m", "gemma3-270m"}
    assert document["provenance"]["torch"]


def test_show_tells_what_was_measured(smollm2: Subject, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["subjects", "show", "smollm2-135m", "--device", "cpu", "--json", str(tmp_path / "out.json")]
    )
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["num_layers"], row["d_model"], row["embedding_gain"]) == (30, 576, 1.0)
    assert row["fingerprint"] == smollm2.fingerprint
    assert "LlamaModel.layers" in done.stdout


def test_show_downloads_nothing_and_says_how_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["subjects", "show", "gemma3-270m"])
    assert done.exit_code == 2
    assert "dragoman subjects fetch gemma3-270m --accept-terms" in " ".join(done.stderr.split())
    assert not (tmp_path / "subjects").exists()


def test_fetching_an_unknown_name_is_one_paragraph_and_exit_code_2() -> None:
    done = CliRunner().invoke(app, ["subjects", "fetch", "smollm2"])
    assert done.exit_code == 2
    assert "did you mean smollm2-135m" in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_fetching_what_is_cached_prints_its_folder(smollm2: Subject) -> None:
    done = CliRunner().invoke(app, ["subjects", "fetch", "smollm2-135m", "--quiet"])
    assert done.exit_code == 0
    assert Path(done.stdout.strip()) == smollm2.source
