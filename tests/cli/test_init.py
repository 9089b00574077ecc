from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from dragoman.cli import app as app_module
from dragoman.cli.budget import FRACTIONS, plan_budget
from dragoman.cli.init import two_thirds
from dragoman.cli.init_config import _scalar, slug
from dragoman.scaling import suggest_injection_scale
from dragoman.sidecar import render_prompt_ids
from dragoman.training.config import read_config
from dragoman.training.stages import REQUIRED_SPLITS


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def prose(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prose") / "prose.txt"
    words = "the tower stood above the river and people came from far to see how it was lit at night"
    file.write_text("\n\n".join(f"{words}, {number}. " * 12 for number in range(8)))
    return file


def init(*arguments: object):
    return CliRunner().invoke(app_module.app, ["init", *map(str, arguments)])


def test_the_real_subject_gets_layer_20_a_marker_that_stands_once_and_scale_250(here, smollm2):
    result = init("smollm2-135m", "--minutes", 45, "--device", "cpu")
    assert result.exit_code == 0, result.output
    target = here / "smollm2-135m-L20.yaml"
    config = read_config(target)
    assert (config.layer_index, config.injection_scale) == (20, 250.0)
    tokenizer = smollm2.tokenizer
    marker_id = tokenizer.convert_tokens_to_ids(config.prompt.marker)
    ids = render_prompt_ids(
        tokenizer, config.prompt.av_template, config.prompt.marker, marker_id, system_prompt=""
    )
    assert ids.count(marker_id) == 1 and len(ids) <= 24
    assert "dragoman train pair smollm2-135m-L20.yaml" in result.stdout
    assert list(here.iterdir()) == [target]


def test_the_proposed_scale_is_the_round_number_above_the_norms_of_a_plain_forward(
    here, tiny_folder, tiny_subject, prose
):
    result = init(tiny_folder, "--corpus", prose, "--out", "c.yaml", "--json", "found.json", "--layer", 1)
    assert result.exit_code == 0, result.output
    found = json.loads((here / "found.json").read_text())
    ids = tiny_subject.encode(prose.read_text()[:2000])[:200]
    with torch.no_grad():
        states = tiny_subject.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[2][0, 50:]
    assert found["mean_norm"] == pytest.approx(float(states.float().norm(dim=-1).mean()), rel=0.1)
    assert found["injection_scale"] == suggest_injection_scale(found["mean_norm"])
    config = read_config(here / "c.yaml")
    assert config.injection_scale == found["injection_scale"] and config.layer_index == 1
    assert config.data.corpora[0].name == str(prose)
    assert all(config.data.fractions[split] > 0 for split in REQUIRED_SPLITS)
    assert found["schema"] == "dragoman/init/1" and found["next"] == "dragoman train pair c.yaml"


def test_a_budget_too_small_is_said_on_the_terminal_and_in_the_file(here, tiny_folder, prose, monkeypatch):
    starved = plan_budget(60, forward_rate=30, depth=0.7, device="cpu", batch_size=16)
    monkeypatch.setattr("dragoman.cli.budget.plan_budget", lambda *_, **__: starved)
    result = init(tiny_folder, "--corpus", prose, "--out", "c.yaml", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "Give it more minutes" in result.stderr
    assert "\n# This is little: " in (here / "c.yaml").read_text()
    quiet = init(tiny_folder, "--corpus", prose, "--out", "c.yaml", "--force", "--quiet", "--device", "cpu")
    assert quiet.exit_code == 0 and quiet.stderr == ""


def test_every_setting_stands_under_a_comment_or_explains_itself(here, tiny_folder, prose):
    assert init(tiny_folder, "--corpus", prose, "--out", "c.yaml").exit_code == 0
    text = (here / "c.yaml").read_text()
    assert sum(line.lstrip().startswith("#") for line in text.splitlines()) >= 15
    assert "$" not in text
    assert set(yaml.safe_load(text)) == {
        "subject", "layer_index", "output", "injection_scale", "max_new_tokens", "data", "prompt",
        "verbalizer", "reconstructor", "refit",
    }  # fmt: skip


def test_an_existing_config_is_kept_unless_forced_and_refused_before_the_model_is_loaded(
    here, tiny_folder, prose
):
    Path("c.yaml").write_text("mine")
    result = init("no-such-model", "--out", "c.yaml")
    assert result.exit_code == 2 and "c.yaml exists" in result.stderr
    assert Path("c.yaml").read_text() == "mine"
    assert init(tiny_folder, "--corpus", prose, "--out", "c.yaml", "--force").exit_code == 0
    assert Path("c.yaml").read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such-model",), "no-such-model"),
        (("{folder}", "--layer", "4"), "0 to 3"),
        (("{folder}", "--corpus", "no-such-corpus"), "no-such-corpus"),
        (("{folder}", "--minutes", "0"), "--minutes"),
        (("{folder}", "--minutes", "inf"), "--minutes"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_file(arguments, said, here, tiny_folder):
    result = init(*(argument.replace("{folder}", str(tiny_folder)) for argument in arguments))
    assert result.exit_code == 2
    assert said in result.stderr and "Traceback" not in result.stderr
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("blocks", "layer"), [(30, 20), (48, 32), (62, 41), (80, 53), (28, 19), (4, 3), (2, 1), (1, 0)]
)
def test_the_layer_is_two_thirds_deep_and_exists(blocks, layer):
    assert two_thirds(blocks) == layer


@pytest.mark.parametrize("minutes", [1, 15, 60, 600])
@pytest.mark.parametrize(("device", "rate"), [("cpu", 3000.0), ("cuda", 60_000.0), ("mps", 9000.0)])
def test_the_estimate_fills_the_budget_unless_a_bound_is_named(minutes, device, rate):
    budget = plan_budget(60 * minutes, forward_rate=rate, depth=0.7, device=device, batch_size=16)
    assert budget.verbalizer_examples % 16 == 0 and budget.refit_examples % 16 == 0
    assert budget.vectors * FRACTIONS["test"] >= 500
    if not (budget.starved or budget.saturated):
        assert 0.75 * 60 * minutes <= budget.seconds <= 60 * minutes
    if budget.saturated:
        assert budget.seconds <= 60 * minutes


def test_more_time_or_a_faster_machine_never_means_fewer_examples():
    def examples(minutes: float, rate: float) -> int:
        budget = plan_budget(60 * minutes, forward_rate=rate, depth=0.7, device="cpu", batch_size=16)
        return budget.verbalizer_examples

    by_time = [examples(minutes, 3000) for minutes in (1, 5, 15, 30, 60, 120, 600)]
    by_speed = [examples(60, rate) for rate in (50, 500, 3000, 20_000)]
    assert by_time == sorted(by_time) and by_speed == sorted(by_speed)


@pytest.mark.parametrize(
    "text",
    ['a"b', "x # y", "line\nbreak", "\u2028", "💡 ㈎", "\U000e0001", "$name", "{a: b}", "- x", "", "\x85"],
)
def test_any_name_survives_the_yaml_on_one_line(text):
    scalar = _scalar(text)
    assert len(scalar.splitlines()) == 1
    assert yaml.safe_load(f"key: {scalar}  # comment\nother: 1") == {"key": text, "other": 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf:Org/My Model@v1", "My-Model-v1"),
        ("/a/b/model.gguf", "model"),
        ("C:\\m\\x/", "x"),
        ("../..", "model"),
    ],
)
def test_file_names_hold_plain_characters_only(name, expected):
    assert slug(name) == expected
