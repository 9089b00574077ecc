"""`dragoman evaluate` from end to end on a real, tiny, untrained pair saved to a folder."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from dragoman.cli.app import app
from dragoman.errors import VectorError
from dragoman.evaluation.figures import FIGURE_NAMES
from dragoman.subjects import load_subject

LAYER = 2
WORDS = ["river", "stone", "lantern", "harbour", "music", "winter", "bridge", "orchard", "signal", "copper"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("DRAGOMAN_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def pair_folder(tiny_pair, tiny_subject, home, tmp_path_factory) -> Path:
    """The tiny untrained pair with a train.yaml over a corpus of 80 short documents."""
    root = tmp_path_factory.mktemp("evaluated")
    with (root / "corpus.jsonl").open("w") as file:
        for d in range(80):
            text = " ".join(random.Random(d).choices(WORDS, k=90))
            file.write(json.dumps({"id": f"d{d}", "text": text}) + "\n")
    config = {
        "subject": tiny_subject.name,
        "layer_index": LAYER,
        "output": str(root / "run"),
        "data": {
            "corpora": [{"name": str(root / "corpus.jsonl")}],
            "positions_per_passage": 2,
            "fractions": {"av_sft": 0.4, "ar_sft": 0.2, "test": 0.4},
        },
    }
    shutil.copytree(tiny_pair, root / "pair")
    (root / "pair" / "train.yaml").write_text(yaml.safe_dump(config))
    return root / "pair"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def card(evaluated, out):
    return (out / "card.md").read_text()


@pytest.fixture(scope="module")
def evaluated(pair_folder, out):
    """One call with everything that can be asked for: (result, JSON document, HTML text)."""
    call = ["evaluate", str(pair_folder), "--suite", "fve", "--n", "40", "--seed", "3"]
    call += ["--json", str(out / "r.json"), "--html", str(out / "r.html"), "--device", "cpu"]
    call += ["--card", str(out / "card.md")]
    call += ["--require", "truncated>=0", "--require", "reference_cosine>1.5"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 1, result.output
    return result, json.loads((out / "r.json").read_text()), (out / "r.html").read_text()


def test_the_card_carries_the_reports_figures_and_the_pairs_own_facts(evaluated, card, pair_folder):
    _, document, _ = evaluated
    measured = document["round_trip_fve"]
    assert f"**{measured['value']:.3f}**" in card
    assert f"{measured['n']} ({measured['documents']})" in card
    assert f"dragoman train pair {pair_folder.name}/train.yaml" in card
    assert "split by document" in card


def test_the_json_carries_all_figures_beside_forty_rows_and_its_provenance(evaluated, pair_folder):
    _, document, _ = evaluated
    assert document["schema"] == "dragoman/evaluate/1"
    assert set(FIGURE_NAMES) <= set(document)
    assert len(document["rows"]) == 40
    assert document["provenance"]["pair"] == str(pair_folder)
    assert document["provenance"]["layer_index"] == LAYER
    assert {"value", "low", "high", "n", "documents", "compared_with"} <= set(document["round_trip_fve"])


def test_an_untrained_pair_is_told_from_one_that_reads(evaluated):
    _, document, _ = evaluated
    assert abs(document["av_gap"]["value"]) < 0.5
    assert document["round_trip_fve"]["value"] < 0.2


def test_the_table_names_every_figure_and_what_became_of_the_requirements(evaluated):
    result, _, _ = evaluated
    shown = result.stdout
    for name in ("round_trip_fve", "av_gap", "reference_top1"):
        assert name in shown
    assert "holds truncated>=0" in shown
    assert "failed reference_cosine>1.5" in shown
    assert "compared with" in shown


def test_the_page_shows_the_explanations_and_its_comparison(evaluated):
    _, _, page = evaluated
    assert "Content-Security-Policy" in page
    assert "words of another document" in page


def test_only_the_test_split_is_captured_and_it_is_the_one_that_training_held_out(
    evaluated, pair_folder, home, tmp_path
):
    from dragoman.datagen.sets import prepare_sets
    from dragoman.evaluation import read_held_out
    from dragoman.training.config import read_config

    _, document, _ = evaluated
    made = list((home / "sets").glob("test-*/*.parquet"))
    assert [path.name for path in made] == ["test.parquet"]
    config = read_config(pair_folder / "train.yaml")
    subject = load_subject(config.subject, device="cpu", dtype="float32")
    sets = prepare_sets(subject, config.data, tmp_path / "all")
    alone, beside = read_held_out(made[0]), read_held_out(sets["test"])
    for column in ("doc_ids", "positions", "references", "tokens"):
        assert getattr(alone, column) == getattr(beside, column)
    # The command may have chosen bfloat16 for the subject.
    np.testing.assert_allclose(alone.vectors, beside.vectors, rtol=0.05, atol=0.05 * beside.vectors.std())
    trained_on = {doc for split in ("av_sft", "ar_sft") for doc in read_held_out(sets[split]).doc_ids}
    assert not trained_on & {row["doc_id"] for row in document["rows"]}


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("doc_id", ["a", None]),
        ("n_raw_tokens", [60, None]),
        ("n_raw_tokens", ["60", "x"]),
        ("n_raw_tokens", [60, 0]),
        ("n_raw_tokens", [60.0, 61.5]),
        ("explanation", ["words", None]),
        ("explanation", ["words", " "]),
        ("explanation", [1, 2]),
    ],
)
def test_a_test_file_with_a_value_missing_or_of_another_kind_is_refused(tmp_path, column, values):
    from dragoman.evaluation import read_held_out
    from dragoman.sidecar import Extraction, Sidecar, write_sidecar

    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(8, np.float32)), 4)
    columns = {"doc_id": ["a", "b"], "n_raw_tokens": [60, 61], "explanation": ["one", "two"], column: values}
    pq.write_table(pa.table({"activation_vector": vectors, **columns}), tmp_path / "t.parquet")
    write_sidecar(
        tmp_path / "t.parquet",
        Sidecar(kind="nla_dataset", d_model=4, extraction=Extraction(layer_index=1)),
    )
    with pytest.raises(VectorError, match=rf"t\.parquet has {column} = "):
        read_held_out(tmp_path / "t.parquet")


def test_a_test_file_can_be_named_and_gives_the_same_figures(evaluated, pair_folder, home):
    _, document, _ = evaluated
    file = next((home / "sets").glob("test-*/test.parquet"))
    call = [
        "evaluate",
        str(pair_folder),
        "--n",
        "40",
        "--seed",
        "3",
        "--test",
        str(file),
        "--json",
        "-",
        "-q",
    ]
    result = CliRunner().invoke(app, [*call, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    again = json.loads(result.stdout)
    assert again["rows"] == document["rows"]
    assert again["round_trip_fve"] == document["round_trip_fve"]
    assert document["test_set"]["made_from"] == "train.yaml"
    assert "made_from" not in again["test_set"]


def test_nothing_is_left_of_the_working_folder_and_the_pair_is_untouched(evaluated, pair_folder, home):
    assert not list((home / "runs").iterdir())
    assert {p.name for p in pair_folder.iterdir()} == {"av", "ar", "pair.json", "train.yaml"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--require", "fve>=1"], "is not a figure"),
        (["--test", "/no/such/file.parquet"], "file.parquet"),
        (["--json", "/no/such/folder/r.json"], "does not exist"),
    ],
)
def test_a_users_mistake_is_one_paragraph_and_exit_code_2(pair_folder, arguments, told):
    result = CliRunner().invoke(app, ["evaluate", str(pair_folder), *arguments])
    assert result.exit_code == 2
    assert told in result.stderr and "Traceback" not in result.stderr


def test_a_pair_without_its_train_config_says_that_its_held_out_documents_are_unknown(pair_folder):
    result = CliRunner().invoke(
        app, ["evaluate", "--av", str(pair_folder / "av"), "--ar", str(pair_folder / "ar")]
    )
    assert result.exit_code == 2
    assert "held-out documents are not known" in result.stderr


def test_no_pair_at_all_is_exit_code_2():
    result = CliRunner().invoke(app, ["evaluate"])
    assert result.exit_code == 2 and "No pair was named" in result.stderr
