from __future__ import annotations

import pytest
import yaml

from dragoman.errors import ConfigError
from dragoman.training import PairTraining, parse_config, read_config

GOOD = """
subject: smollm2-135m
layer_index: 20
output: somewhere
data:
  fractions: {av_sft: 0.5, ar_sft: 0.3, calibration: 0.1, test: 0.1}
"""


def _with(text: str) -> str:
    document = yaml.safe_load(GOOD)
    for key, value in yaml.safe_load(text).items():
        if isinstance(value, dict):
            document[key] = {**document.get(key, {}), **value}
        else:
            document[key] = value
    return yaml.safe_dump(document)


def test_the_layer_stands_once_and_reaches_the_data_section():
    assert parse_config(GOOD, name="c").data.layer_index == 20


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("verbalizer: {learning_rte: 0.1}", "verbalizer.learning_rte: unknown key"),
        ("surprise: 1", "surprise: unknown key"),
        ("verbalizer: {rank: 0}", "verbalizer.rank"),
        ("verbalizer: {learning_rate: .inf}", "verbalizer.learning_rate"),
        ("injection_scale: -3", "injection_scale"),
        ("layer_index: -1", "layer_index"),
        ("data: {layer_index: 3}", "layer_index is 3 but layer_index is 20"),
        ("data: {fractions: {av_sft: 0.5, test: 0.2}}", "data.fractions"),
        ("refit: {reference_share: 1.5}", "refit.reference_share"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(change, named):
    with pytest.raises(ConfigError) as caught:
        parse_config(_with(change), name="c.yaml")
    assert "c.yaml" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("[1, 2]", "a: [", "", "!!python/object/apply:os.system ['true']", b"\xff\xfe\x00"),
        *("[" * 5000, "d: 2020-99-99"),
    ],
)
def test_what_is_no_mapping_is_refused(text):
    with pytest.raises(ConfigError):
        parse_config(text, name="c.yaml")


def test_a_missing_and_an_oversized_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="No config file"):
        read_config(tmp_path / "none.yaml")
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="bytes"):
        read_config(big)


def test_a_config_without_a_split_that_a_stage_needs_is_refused_before_anything_is_loaded():
    config = parse_config(
        _with("data: {fractions: {av_sft: 0.9, test: 0.1}}")
        .replace("ar_sft: 0.3", "ar_sft: 0.0")
        .replace("calibration: 0.1\n", "calibration: 0.0\n"),
        name="c",
    )
    with pytest.raises(ConfigError, match="ar_sft, calibration"):
        PairTraining(config)
