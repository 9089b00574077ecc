"""User errors carry found, expected, consequence and remedy, whole, into every message and every process."""

from __future__ import annotations

import copy
import pickle

import pytest

from dragoman import errors
from dragoman.errors import DragomanError

KINDS = sorted(
    (
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, DragomanError) and kind is not DragomanError
    ),
    key=lambda kind: kind.__name__,
)


def make(kind: type[DragomanError]) -> DragomanError:
    return kind("the width is 3.", expected="576", consequence="rows would be cut", remedy="use 576.")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_found_expected_consequence_and_remedy_in_one_paragraph(
    kind: type[DragomanError],
) -> None:
    assert (
        str(make(kind)) == "The width is 3. Expected: 576. Otherwise: rows would be cut. To fix it: use 576."
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_also_a_standard_exception_so_that_callers_need_not_know_ours(
    kind: type[DragomanError],
) -> None:
    assert issubclass(kind, (ValueError, OSError, RuntimeError))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicate", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_every_kind_survives_the_trip_between_worker_processes(kind: type[DragomanError], duplicate) -> None:
    original = make(kind)
    arrived = duplicate(original)
    assert type(arrived) is kind
    assert str(arrived) == str(original)
    assert arrived.remedy == original.remedy


def test_a_missing_part_is_a_bug_of_ours_and_refused_at_once() -> None:
    with pytest.raises(TypeError):
        errors.VectorError("the width is 3", expected="576", consequence="rows would be cut")
