from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from dragoman.cli import app as app_module
from dragoman.cli import reading_view
from dragoman.nla import load_pair
from dragoman.nla.sources import zoo_names
from dragoman.subjects import Subject

TEXT = "The tower was finished in the spring of that year, and people came to see it."
RESULT_KEYS = [
    "position", "token", "token_id", "norm", "explanation", "truncated", "cosine", "mse", "fve", "flags",
]  # fmt: skip


def explain(*arguments: object, text: str | bytes | None = None):
    return CliRunner().invoke(app_module.app, ["explain", *map(str, arguments)], input=text)


def document(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_user_error(result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    said = " ".join(result.stderr.split())
    assert "Traceback" not in said
    for part in ("error: ", "Expected: ", "Otherwise: ", "To fix it: ", *parts):
        assert part in said, said


# ---------------------------------------------------------------- text


def test_rows_name_position_token_and_the_norm_that_the_plain_model_has_there(
    tiny_pair, tiny_subject: Subject
):
    result = document(explain(TEXT, "--pair", tiny_pair, "--positions", "3,7", "--json", "-"))
    assert result["schema"] == "dragoman/explain/1"
    assert [list(row) for row in result["rows"]] == [RESULT_KEYS] * 2
    ids = tiny_subject.encode(TEXT)
    with torch.no_grad():
        states = tiny_subject.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for row, position in zip(result["rows"], (3, 7), strict=True):
        assert row["position"] == position and row["token_id"] == ids[position]
        assert row["token"] == tiny_subject.tokenizer.decode([ids[position]])
        # layer_index K is the output of block K, which transformers calls hidden_states[K + 1].
        norm = states[result["layer_index"] + 1][0, position].double().norm().item()
        assert row["norm"] == pytest.approx(norm, rel=2e-2)
        assert row["fve"] == pytest.approx(1 - row["mse"] / 0.8, abs=1e-5)
        assert row["mse"] == pytest.approx(2 * (1 - row["cosine"]), abs=1e-3)
        assert row["flags"][0] == "early-position"


def test_the_json_says_what_the_score_is_compared_with_and_where_it_comes_from(tiny_pair, tiny_subject):
    result = document(explain(TEXT, "--pair", tiny_pair, "--positions", "last", "--json", "-"))
    assert result["baseline"] == {"raw_variance": 0.8, "normalised_mean": 0.9, "n": 512}
    assert result["score_threshold"] == 0.5
    assert result["n"] == 1 and result["fve_median"] == result["rows"][0]["fve"]
    assert result["provenance"]["subject"]["fingerprint"] == tiny_subject.fingerprint
    assert result["provenance"]["decoding"]["temperature"] == 0.0


def test_text_file_standard_input_and_argument_are_read_alike(tiny_pair, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    options = ("--pair", tiny_pair, "--positions", "2,4", "--json", "-")
    rows = [
        document(explain(TEXT, *options))["rows"],
        document(explain("--file", file, *options))["rows"],
        document(explain(*options, text=TEXT))["rows"],
        document(explain("-", *options, text=TEXT))["rows"],
    ]
    assert rows[0] == rows[1] == rows[2] == rows[3]


def test_a_chat_is_read_in_the_models_own_template(tiny_pair, tiny_subject, tmp_path):
    messages = [{"role": "user", "content": "Hello [b]you[/b]"}, {"role": "assistant", "content": "Hi."}]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": messages}))
    rows = document(explain("--chat", file, "--pair", tiny_pair, "--json", "-", "--max-new-tokens", 2))[
        "rows"
    ]
    ids = tiny_subject.encode_chat(messages)
    expected = [at for at, token in enumerate(ids) if token not in tiny_subject.special_ids]
    assert [row["position"] for row in rows] == expected
    assert [row["token_id"] for row in rows] == [ids[at] for at in expected]


def test_a_pipe_gets_one_tab_separated_line_a_reading(tiny_pair):
    result = explain(TEXT, "--pair", tiny_pair, "--positions", "2,4,6", "--quiet")
    lines = result.stdout.splitlines()
    assert lines[0].split("\t") == ["position", "token", "fve", "flags", "explanation"]
    assert [line.split("\t")[0] for line in lines[1:]] == ["2", "4", "6"]
    assert all(line.count("\t") == 4 for line in lines)
    assert result.stderr == ""


def test_a_terminal_gets_a_table_with_hostile_text_made_harmless(tiny_pair, monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(reading_view, "out_console", lambda: console)
    result = explain("red \x1b[2J [bold]b[/bold] \u202e <script>", "--pair", tiny_pair, "--max-new-tokens", 2)
    assert result.exit_code == 0, result.output
    shown = screen.getvalue()
    assert not {"\x1b", "\u202e"} & set(shown)
    assert "␛" in shown and "bold" in shown and "Median FVE" in shown
    assert "the mean of 512 vectors" in " ".join(shown.split()) and "low-score" in shown


def test_best_of_samples_by_default_and_never_scores_below_its_first_candidate(tiny_pair):
    options = (
        TEXT,
        "--pair",
        tiny_pair,
        "--positions",
        "5,8",
        "--json",
        "-",
        "--seed",
        3,
        "--max-new-tokens",
        6,
    )
    one = document(explain(*options, "--temperature", 0.7))
    best = document(explain(*options, "--best-of", 3))
    assert best["provenance"]["decoding"]["temperature"] == 0.7
    for single, several in zip(one["rows"], best["rows"], strict=True):
        assert several["cosine"] >= single["cosine"] - 1e-4


def test_html_is_written_whole_with_every_token_and_the_row_links(tiny_pair, tiny_subject, tmp_path):
    page = tmp_path / "report.html"
    text = "She said <script>alert(1)</script> and left."
    result = explain(text, "--pair", tiny_pair, "--positions", "4,6", "--html", page, "--max-new-tokens", 3)
    assert result.exit_code == 0, result.output
    html = page.read_text(encoding="utf-8")
    assert "<script>alert" not in html and html.count('<a class="t') == 2
    assert "mean of 512 vectors" in html and tiny_subject.fingerprint in html
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


# ---------------------------------------------------------------- vectors


def test_npy_vectors_are_read_with_row_numbers_and_without_positions(tiny_pair, vectors, tmp_path):
    file = tmp_path / "directions.npy"
    np.save(file, vectors[0] - vectors[1])
    rows = document(explain("--vectors", file, "--pair", tiny_pair, "--json", "-"))["rows"]
    assert [(row["row"], row["position"], row["token"]) for row in rows] == [(0, None, None)]
    assert rows[0]["norm"] == pytest.approx(float(np.linalg.norm(vectors[0] - vectors[1])), rel=1e-5)


def test_parquet_vectors_give_what_the_python_interface_gives(tiny_pair, vectors, vectors_file):
    rows = document(explain("--vectors", vectors_file, "--pair", tiny_pair, "--json", "-"))["rows"]
    expected = load_pair(tiny_pair, device="cpu").explain(vectors)
    assert [row["explanation"] for row in rows] == [item.text for item in expected]
    assert [row["cosine"] for row in rows] == pytest.approx([item.cosine for item in expected], abs=1e-5)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("text", ["", "  \n "])
def test_an_empty_text_is_refused(text):
    assert_user_error(explain(text), "The text is empty")


def test_an_empty_standard_input_is_refused_before_any_model_is_loaded(tmp_path):
    assert_user_error(explain("--pair", tmp_path / "nowhere", text=""), "The text is empty")


def test_two_inputs_are_refused_by_name(tmp_path):
    assert_user_error(explain("hello", "--file", tmp_path / "x"), "2 inputs were given: text, file")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no messages"),
        ('"hello"', "is no list of messages"),
        ('[{"role": "user"}]', "message 0 without a text role"),
        ('[{"role": "user", "content": ["x"]}]', "message 0 without a text role"),
    ],
)
def test_a_chat_that_is_no_conversation_is_refused(content, said, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text(content)
    assert_user_error(explain("--chat", file), said)


def test_another_layer_than_the_pairs_is_refused_with_both_numbers(tiny_pair):
    assert_user_error(explain(TEXT, "--pair", tiny_pair, "--layer", 1), "--layer 1", "layer_index 2")


def test_a_position_beyond_the_text_is_refused(tiny_pair):
    assert_user_error(explain("Short.", "--pair", tiny_pair, "--positions", "99"), "99")


def test_a_misspelt_position_rule_is_refused(tiny_pair):
    assert_user_error(explain(TEXT, "--pair", tiny_pair, "--positions", "evry:2"), "evry:2")


def test_no_such_pair_is_refused_with_what_there_is(tmp_path):
    assert_user_error(explain(TEXT, "--pair", tmp_path / "none"), "There is no folder")
    assert_user_error(explain(TEXT, "--pair", "zoo:nothing"), "'nothing'")


def test_vectors_of_another_width_are_refused_with_both_widths(tiny_pair, tmp_path):
    file = tmp_path / "wide.npy"
    np.save(file, np.ones((2, 33), np.float32))
    assert_user_error(explain("--vectors", file, "--pair", tiny_pair), "width 33", "32")


def test_a_vector_with_nan_is_refused_with_its_row(tiny_pair, vectors, tmp_path):
    vectors[4, 3] = np.nan
    np.save(tmp_path / "bad.npy", vectors)
    result = explain("--vectors", tmp_path / "bad.npy", "--pair", tiny_pair, "--json", tmp_path / "o.json")
    assert_user_error(result, "Row 4 of bad.npy")
    assert not (tmp_path / "o.json").exists()


def test_a_truncated_parquet_file_is_refused_and_leaves_no_result(tiny_pair, vectors_file, tmp_path):
    vectors_file.write_bytes(vectors_file.read_bytes()[:-20])
    out = tmp_path / "words.parquet"
    assert_user_error(explain("--vectors", vectors_file, "--pair", tiny_pair, "--out", out), "cannot be read")
    assert not out.exists()


def test_out_belongs_to_vectors_alone(tmp_path):
    assert_user_error(explain(TEXT, "--out", tmp_path / "x.parquet"), "without --vectors")


def test_a_result_path_in_no_folder_is_refused_before_any_model_is_loaded(tmp_path):
    result = explain(TEXT, "--pair", tmp_path / "nowhere", "--html", tmp_path / "no" / "page.html")
    assert_user_error(result, "does not exist")


def test_bytes_that_are_no_utf8_are_refused_on_standard_input():
    assert_user_error(explain(text=b"caf\xe9"), "Standard input is not UTF-8", "0xe9")


# ---------------------------------------------------------------- as a process


def test_head_may_close_the_pipe_after_one_line(tiny_pair):
    environment = {**os.environ, "PYTHONPATH": str(Path(app_module.__file__).parents[2])}
    code = "from dragoman.cli.app import main; main()"
    command = f'"$0" -c "{code}" explain "$1" --pair "$2" --quiet --max-new-tokens 1 | head -1'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command, sys.executable, TEXT, str(tiny_pair)],
        capture_output=True, text=True, env=environment, timeout=240,
    )  # fmt: skip
    assert done.stdout == "position\ttoken\tfve\tflags\texplanation\n"
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.skipif(
    "smollm2-135m-L20" not in zoo_names(), reason="the shipped pair zoo:smollm2-135m-L20 is not there yet"
)
def test_the_shipped_pair_reads_a_passage_and_its_scores_beat_shuffled_words():
    text = (
        "The lighthouse keeper climbed the stairs every evening to light the lamp, for ships passed close "
        "to the rocks in winter, and in the harbour the fishermen waited for the storm to end."
    )
    result = document(explain(text, "--positions", "sample:8@15", "--json", "-"))
    rows = result["rows"]
    assert len(rows) == 8 and all(row["explanation"] for row in rows)
    pair = load_pair("zoo:smollm2-135m-L20")
    ids = pair.subject.encode(text)
    from dragoman.activations import capture

    places = [row["position"] for row in rows]
    states = capture(pair.subject, [ids], [20], [places])[0].vectors[20]
    shuffled = pair.score(states, [row["explanation"] for row in rows[1:] + rows[:1]]).fve
    assert shuffled is not None
    assert np.mean([row["fve"] for row in rows]) > float(shuffled.mean())
