"""The suite on planted pairs whose figures are known, and its controls on pairs that cheat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest
import torch
from tests.evaluation.oracle import Oracle, planted_set, written

from dragoman.errors import ConfigError, VectorError
from dragoman.evaluation import (
    HeldOut,
    evaluate_fve,
    failed_requirements,
    parse_requirement,
)
from dragoman.evaluation.figures import FIGURE_NAMES
from dragoman.nla import Decoding
from dragoman.runs import RunFolder


@pytest.fixture(scope="module")
def report():
    return evaluate_fve(Oracle(), planted_set(), n=560, seed=3)


def test_a_pair_that_writes_every_number_down_scores_near_one_and_finds_every_vector(report):
    assert report.value("round_trip_fve") > 0.99
    assert report.value("round_trip_top1") == 1.0
    assert report.value("round_trip_cosine_centred") > 0.99
    assert report.value("repeated") == report.value("truncated") == 0.0


def test_round_trip_figures_equal_a_float64_loop_over_the_rows(report):
    held = planted_set().sample(560, 3)
    unit = np.array([v / np.linalg.norm(v) * 4.0 for v in held.vectors.astype(np.float64)])
    mean = unit.mean(0)
    errors, deviations, cosines = [], [], []
    for row, x in zip(report.rows, unit, strict=True):
        said = np.array([float(word) for word in row["explanation"].split()])
        said = said / np.linalg.norm(said) * 4.0
        errors.append(((said - x) ** 2).mean())
        deviations.append(((x - mean) ** 2).mean())
        cosines.append(said @ x / 16.0)
        assert row["mse"] == pytest.approx(errors[-1], abs=1e-5)
        assert row["fve"] == pytest.approx(1 - errors[-1] / report.value("raw_variance"), abs=1e-5)
    assert report.value("raw_variance") == pytest.approx(np.mean(deviations), rel=1e-5)
    assert report.value("round_trip_fve") == pytest.approx(
        1 - np.mean(errors) / np.mean(deviations), abs=1e-5
    )
    assert report.value("round_trip_cosine") == pytest.approx(np.mean(cosines), abs=1e-5)


def test_the_shuffled_control_of_a_good_pair_lies_below_zero(report):
    shuffled = report.figures["round_trip_shuffled_fve"].estimate
    # Two independent rows: twice the variance of one, hence 1 - 2 = -1.
    assert shuffled.value == pytest.approx(-1.0, abs=0.1)
    assert shuffled.high < 0


def test_the_gap_is_the_planted_one_per_response_token_and_per_content_token(report):
    assert report.value("av_gap_content") == pytest.approx(0.5)
    assert report.value("av_gap") == pytest.approx(0.25)
    assert report.value("av_loss_content") == pytest.approx(1.0)
    assert report.figures["av_gap"].unit == "nat/token"


def test_every_figure_names_its_comparison_its_n_and_an_interval_around_it(report):
    assert tuple(report.figures) == FIGURE_NAMES
    for figure in report.figures.values():
        found = figure.estimate
        assert figure.compared_with and figure.meaning
        assert found.low - 1e-9 <= found.value <= found.high + 1e-9
        assert found.n == (512 if figure.name.endswith(("top1", "top5", "mrr")) else 560)
        assert found.documents > 100


def test_a_pair_that_hears_nothing_fails_every_question_though_its_cosine_looks_fair():
    report = evaluate_fve(Oracle(deaf=True), planted_set(), n=560)
    assert report.value("round_trip_cosine") > 0.5
    assert report.value("round_trip_fve") < 0.0
    assert report.value("round_trip_fve_mean_direction") < 0.02
    assert report.value("round_trip_top1") < 0.03
    assert report.value("av_gap") == 0.0
    assert report.value("repeated") == 1.0
    assert report.value("round_trip_fve") == pytest.approx(report.value("zero_vector_fve"), abs=1e-6)
    assert report.calibration.youden_j < 0.1


def test_rows_without_a_word_count_as_right_angles_and_are_not_left_out():
    silent = evaluate_fve(Oracle(mute_every=4), planted_set(), n=560)
    assert silent.value("truncated") == pytest.approx(0.25)
    empty = [row for row in silent.rows if not row["explanation"]]
    assert len(empty) == 140
    assert all(row["cosine"] == 0.0 and row["mse"] == 2.0 for row in empty)
    assert silent.value("round_trip_fve") < 0.5


def test_the_threshold_lies_between_own_and_foreign_scores_on_the_scale_of_the_sidecar():
    report = evaluate_fve(Oracle(baseline=0.25), planted_set(), n=560)
    own = [row["score"] for row in report.rows]
    assert own[0] == pytest.approx(1 - report.rows[0]["mse"] / 0.25)
    assert report.calibration.youden_j > 0.99
    assert np.quantile(own, 0.01) >= report.calibration.threshold
    assert report.settings["score_baseline"] == 0.25


def test_the_same_seed_gives_the_same_report_whatever_the_order_of_the_file():
    held = planted_set()
    turned = held.rows(list(reversed(range(len(held)))))
    first = evaluate_fve(Oracle(), held, n=300, seed=7)
    second = evaluate_fve(Oracle(), turned, n=300, seed=7)
    other = evaluate_fve(Oracle(), held, n=300, seed=8)
    assert first.to_json() == second.to_json()
    assert first.rows == second.rows
    assert first.test_set["fingerprint"] != other.test_set["fingerprint"]


def test_a_smaller_sample_is_a_part_of_a_larger_one():
    held = planted_set()
    small, large = held.sample(100, 1), held.sample(200, 1)
    assert set(small.tokens) < set(large.tokens)


def test_a_killed_evaluation_goes_on_without_asking_again_and_ends_the_same(tmp_path):
    class Killed(Exception):
        pass

    class Mortal(Oracle):
        def explain(self, vectors, decoding, *, score):
            if self.said >= 128:
                raise Killed
            return super().explain(vectors, decoding, score=score)

    held = planted_set()
    with RunFolder.open(tmp_path / "run", {"a": 1}, kind="evaluate") as work, pytest.raises(Killed):
        evaluate_fve(Mortal(), held, n=300, work=work)
    survivor = Oracle()
    with RunFolder.open(tmp_path / "run", {"a": 1}, kind="evaluate") as work:
        resumed = evaluate_fve(survivor, held, n=300, work=work)
    assert survivor.said == 300 - 128 + 2
    assert resumed.rows == evaluate_fve(Oracle(), held, n=300).rows


def test_progress_reaches_the_total_of_every_unit():
    seen = {}
    evaluate_fve(
        Oracle(), planted_set(), n=130, progress=lambda done, total, unit: seen.update({unit: (done, total)})
    )
    assert seen == dict.fromkeys(("rows", "explanations", "reconstructions"), (130, 130))


def test_the_report_is_json_without_numpy_or_nan(report):
    document = orjson.loads(orjson.dumps({**report.to_json(), "rows": report.rows}))
    assert document["round_trip_fve"]["value"] == report.value("round_trip_fve")
    assert set(document["rows"][0]) >= {
        *("position", "doc_id", "token", "reference", "explanation", "truncated"),
        *("cosine", "mse", "fve", "fve_mean_direction", "score", "rank"),
    }
    assert sum(row["rank"] is None for row in document["rows"]) == 48


def test_vectors_of_another_layer_are_refused():
    with pytest.raises(VectorError, match=r"layer 5.*layer 3"):
        evaluate_fve(Oracle(), replace(planted_set(), layer_index=5))


def test_vectors_of_another_width_are_refused():
    with pytest.raises(VectorError, match=r"width 16.*width 8"):
        evaluate_fve(Oracle(d=8), planted_set())


def test_a_held_out_set_of_one_document_is_refused():
    held = planted_set(n=40, per_document=40)
    with pytest.raises(VectorError, match="40 of 40 rows come from one document"):
        evaluate_fve(Oracle(), held)


def test_an_empty_held_out_set_is_refused():
    with pytest.raises(VectorError, match="0 vectors"):
        evaluate_fve(Oracle(), planted_set().rows([]))


def test_columns_of_unequal_length_are_refused():
    held = planted_set(n=8)
    with pytest.raises(VectorError, match="8 vectors but 7 doc_ids"):
        HeldOut(held.vectors, held.doc_ids[:-1], held.positions, held.references)


def test_a_nan_from_the_reconstructor_stops_the_run_instead_of_entering_a_mean():
    class Broken(Oracle):
        def reconstruct(self, texts):
            return super().reconstruct(texts) * float("nan")

    with pytest.raises(VectorError, match="reconstructions hold NaN"):
        evaluate_fve(Broken(), planted_set(n=64))


def test_decoding_is_greedy_unless_asked_otherwise():
    seen = []

    class Listening(Oracle):
        def explain(self, vectors, decoding, *, score):
            seen.append((decoding, score))
            return super().explain(vectors, decoding, score=score)

    evaluate_fve(Listening(), planted_set(n=64))
    evaluate_fve(Listening(), planted_set(n=64), decoding=Decoding(temperature=0.5))
    assert {decoding.temperature for decoding, _ in seen} == {0.0, 0.5}
    assert not any(score for _, score in seen)


def test_text_written_by_the_oracle_reads_back_as_its_direction():
    vector = torch.randn(16)
    read = Oracle(digits=6).reconstruct([written(vector, 6)])
    assert float(torch.nn.functional.cosine_similarity(read, vector[None])) > 0.999999


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("round_trip_fve>=0.5", False),
        (" round_trip_fve >= 1.5 ", True),
        ("round_trip_shuffled_fve<0", False),
        ("round_trip_shuffled_fve>-0.2", True),
        ("av_gap<=2.5e-1", False),
        ("truncated<=0", False),
    ],
)
def test_requirements_compare_the_value_of_the_named_figure(report, text, broken):
    requirement = parse_requirement(text, FIGURE_NAMES)
    assert bool(failed_requirements([requirement], report.figures)) is broken


@pytest.mark.parametrize(
    "text", ["round_trip_fve", "round_trip_fve=0.2", "fvee>=0.2", "av_gap>=x", "av_gap>=nan", "av_gap<inf"]
)
def test_a_requirement_that_could_not_fail_is_refused(text):
    with pytest.raises(ConfigError, match="--require"):
        parse_requirement(text, FIGURE_NAMES)
