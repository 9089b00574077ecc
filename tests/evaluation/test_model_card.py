"""The model card says every measured figure with its control, and nothing that was not measured."""

from __future__ import annotations

import re

import orjson
import pytest
import yaml
from tests.evaluation.oracle import Oracle, planted_set

from dragoman.errors import PairError
from dragoman.evaluation import evaluate_fve, render_model_card
from dragoman.runs import provenance

META = {
    "name": "tiny-L3",
    "subject": "tiny-llama",
    "revision": "abc",
    "layer_index": 3,
    "licence": "apache-2.0",
    "reproduce": ["dragoman train pair train.yaml", "dragoman evaluate tiny-L3 --suite fve"],
    "data": {"corpora": ["a", "b"], "vectors": 15000},
    "limits": ["Trained on extractive explanations."],
}


@pytest.fixture(scope="module")
def document():
    report = evaluate_fve(Oracle(), planted_set(), n=560)
    return orjson.loads(orjson.dumps({"provenance": provenance(seed=1), **report.to_json()}))


def test_every_headline_stands_in_the_table_with_value_interval_n_and_comparison(document):
    card = render_model_card(document, pair_meta=META)
    rows = [line.split(" | ") for line in card.splitlines() if line.startswith("| ") and "**" in line]
    by_title = {row[0].removeprefix("| "): row for row in rows}
    expected = {
        "AR FVE from reference explanations": "reference_fve",
        "Round-trip FVE, vector → own words → vector": "round_trip_fve",
        "control: own words about another document's vector": "round_trip_shuffled_fve",
        "round-trip cosine": "round_trip_cosine",
        "AV gap over all response tokens": "av_gap",
        "retrieval from the AV's own words, first": "round_trip_top1",
    }
    for title, name in expected.items():
        figure = document[name]
        assert by_title[title][1].startswith(f"**{figure['value']:.3f}**")
        assert by_title[title][2] == f"{figure['low']:.3f} to {figure['high']:.3f}"
        assert by_title[title][3] == f"{figure['n']} ({figure['documents']})"
        assert by_title[title][4].removesuffix(" |") == figure["compared_with"]
    assert all(len(row) == 5 for row in rows)


def test_the_card_names_both_denominators_the_threshold_the_commands_and_the_limits(document):
    card = render_model_card(document, pair_meta=META)
    assert f"*raw variance* {document['raw_variance']['value']:.4f}" in card
    assert f"*normalised mean* {document['normalised_mean']['value']:.4f}" in card
    assert f"below {document['score_threshold']['threshold']:.3f} are flagged" in card
    assert "dragoman train pair train.yaml\ndragoman evaluate tiny-L3 --suite fve" in card
    sections = re.findall(r"^## (.+)$", card, re.MULTILINE)
    assert sections == ["Measured", "Data", "Intended use", "Limits", "How to reproduce", "Provenance"]
    assert "- Trained on extractive explanations." in card


def test_the_card_claims_held_out_documents_only_where_that_is_known(document):
    assert "no stage of training saw" not in render_model_card(document, pair_meta=META)
    known = {**document, "test_set": {**document["test_set"], "made_from": "train.yaml"}}
    assert "no stage of training saw" in render_model_card(known, pair_meta=META)


def test_the_front_matter_is_yaml_whatever_characters_the_names_hold(document):
    card = render_model_card(document, pair_meta={**META, "subject": 'a: "b" #c'})
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == 'a: "b" #c'
    assert front["license"] == "apache-2.0"


def test_a_card_without_one_of_its_figures_is_refused(document):
    with pytest.raises(PairError, match="av_gap"):
        render_model_card({k: v for k, v in document.items() if k != "av_gap"}, pair_meta=META)
    with pytest.raises(PairError, match="reproduce"):
        render_model_card(document, pair_meta={k: v for k, v in META.items() if k != "reproduce"})
