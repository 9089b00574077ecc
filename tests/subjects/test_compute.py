"""The rule for device, dtype and attention, and the measurement that overrides it."""

from __future__ import annotations

import pytest
import torch

from dragoman.errors import SubjectError
from dragoman.subjects import Compute, Subject, choose_compute, compute, measure_attention


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_computes_in_bfloat16_only_where_it_is_native(
    monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(compute, "cpu_has_bfloat16", lambda: native)
    assert choose_compute("cpu").dtype is dtype
    assert "bfloat16" in choose_compute("cpu").reason


def test_what_is_asked_for_is_kept() -> None:
    chosen = choose_compute("cpu", "float32", "eager")
    assert (chosen.dtype, chosen.attention, chosen.device.type) == (torch.float32, "eager", "cpu")


def test_a_decision_survives_the_way_through_json() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        decision = Compute(dtype, "eager", torch.device("cpu"), "measured")
        assert Compute.from_json(decision.to_json()) == decision


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("tpu", "auto", "auto"), "tpu"),
        (("cuda:99", "auto", "auto"), "cuda:99"),
        (("cpu", "float8", "auto"), "float8"),
        (("cpu", "auto", "org/kernel"), "org/kernel"),
    ],
)
def test_an_unknown_choice_is_refused_by_name(arguments: tuple[str, str, str], word: str) -> None:
    with pytest.raises(SubjectError, match=word):
        choose_compute(*arguments)


def test_a_stored_decision_with_a_missing_key_is_refused() -> None:
    with pytest.raises(SubjectError, match="attention"):
        Compute.from_json({"dtype": "float32", "device": "cpu"})


@pytest.mark.parametrize("training", [False, True])
def test_the_measurement_times_both_ways_and_restores_the_subject(
    tiny_llama: Subject, training: bool
) -> None:
    before = tiny_llama.text_config._attn_implementation
    chosen = measure_attention(tiny_llama, training, batch=2, seq=8, repeats=1)
    assert chosen.attention in ("sdpa", "eager")
    assert "sdpa" in chosen.reason
    assert "eager" in chosen.reason
    assert tiny_llama.text_config._attn_implementation == before
    assert all(p.grad is None for p in tiny_llama.model.parameters())


def test_the_measurement_picks_the_faster_way(tiny_llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"sdpa": 3.0, "eager": 1.0}
    monkeypatch.setattr(
        compute, "_fastest_pass", lambda subject, *_: seconds[subject.text_config._attn_implementation]
    )
    assert measure_attention(tiny_llama, training=True).attention == "eager"
