"""Sites against a plain loop, and the reasons named when there are too many or too few."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import InjectionError
from dragoman.injection import Marker, find_sites

MARKER = Marker(char="㈎", token_id=7, left_id=5, right_id=6)
PAD = 0


def rows(*ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids)


def plain_sites(ids: list[list[int]], left_context: list[int] | None = None) -> list[list[int]]:
    found = []
    for row, tokens in enumerate(ids):
        for place, token in enumerate(tokens):
            before_row = left_context[row] if left_context else None
            left = tokens[place - 1] if place > 0 else before_row
            right = tokens[place + 1] if place + 1 < len(tokens) else None
            if (left, token, right) == (5, 7, 6):
                found.append([row, place])
    return found


@given(st.data())
def test_sites_are_those_of_a_plain_loop_whatever_the_ids(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 12))
    tokens = st.integers(4, 8)
    ids = data.draw(st.lists(st.lists(tokens, min_size=width, max_size=width), min_size=1, max_size=4))
    context = data.draw(st.none() | st.lists(tokens, min_size=len(ids), max_size=len(ids)))
    sites = find_sites(
        torch.tensor(ids), MARKER, left_context=None if context is None else torch.tensor(context)
    )
    assert sites.tolist() == plain_sites(ids, context)
    assert sites.dtype == torch.int64


def test_several_markers_in_a_row_are_found_in_reading_order() -> None:
    ids = rows([1, 5, 7, 6, 2, 5, 7, 6], [5, 7, 6, 5, 7, 6, 1, 1])
    assert find_sites(ids, MARKER, expected=4, per_row=2).tolist() == [[0, 2], [0, 6], [1, 1], [1, 4]]


def test_a_marker_in_user_text_between_other_words_is_no_site() -> None:
    ids = rows([3, 7, 3, 5, 7, 6, 5, 7, 3, 3, 7, 6])
    assert find_sites(ids, MARKER, expected=1).tolist() == [[0, 4]]


def test_packed_rows_have_as_many_sites_as_prompts() -> None:
    prompt = [1, 5, 7, 6, 2]
    assert find_sites(rows(prompt * 3, [*prompt, *[PAD] * 10]), MARKER, expected=4).tolist() == [
        [0, 2], [0, 7], [0, 12], [1, 2],
    ]  # fmt: skip


@pytest.mark.parametrize("pads", [1, 5])
def test_padding_on_either_side_moves_the_site_and_nothing_else(pads: int) -> None:
    prompt = [1, 5, 7, 6, 2]
    left = find_sites(rows([PAD] * pads + prompt), MARKER, expected=1)
    right = find_sites(rows(prompt + [PAD] * pads), MARKER, expected=1)
    assert left.tolist() == [[0, 2 + pads]]
    assert right.tolist() == [[0, 2]]


def test_a_marker_at_an_edge_has_no_neighbour_and_is_no_site() -> None:
    assert find_sites(rows([7, 6, 1], [1, 5, 7]), MARKER).tolist() == []


def test_ids_do_not_wrap_around_from_one_end_of_the_row_to_the_other() -> None:
    assert find_sites(rows([7, 6, 5], [6, 5, 7]), MARKER).tolist() == []


def test_the_last_prefix_token_counts_as_the_left_neighbour() -> None:
    ids = rows([7, 6, 1], [7, 6, 1])
    assert find_sites(ids, MARKER, left_context=5).tolist() == [[0, 0], [1, 0]]
    assert find_sites(ids, MARKER, left_context=torch.tensor([5, 4])).tolist() == [[0, 0]]
    assert find_sites(ids, MARKER, left_context=torch.tensor([5])).tolist() == [[0, 0], [1, 0]]
    assert find_sites(ids, MARKER, left_context=4).tolist() == []


def test_the_ids_are_not_changed() -> None:
    ids = rows([1, 5, 7, 6])
    before = ids.clone()
    find_sites(ids, MARKER, expected=1)
    assert torch.equal(ids, before)


@pytest.mark.parametrize(
    ("ids", "expected", "message"),
    [
        ([[1, 2, 3, 4]], 1, r"Found 0 .*Expected: 1, one.*does not occur at all.*truncated"),
        ([[1, 5, 7, 9]], 1, r"Found 0 .*occurs 1 times, 0 of them.*between 5 and 9.*says between 5 and 6"),
        ([[7, 6, 1]], 1, r"position 0\) stands between the edge and 6"),
        ([[1, 5, 7]], 1, r"position 2\) stands between 5 and the edge"),
        ([[5, 7, 6, 5, 7, 6]], 1, r"Found 2 .*Expected: 1.*more often than there are vectors.*packed"),
        ([[5, 7, 6], [1, 1, 1]], 2, r"Found 1 injection sites in 2 rows of 3 .*rows are missing"),
    ],
)  # fmt: skip
def test_a_wrong_count_names_found_expected_and_the_likely_cause(ids, expected, message) -> None:
    with pytest.raises(InjectionError, match=message) as raised:
        find_sites(torch.tensor(ids), MARKER, expected=expected)
    assert "'㈎' (token 7)" in str(raised.value)


def test_a_total_that_is_right_by_accident_does_not_hide_rows_that_are_wrong() -> None:
    ids = rows([5, 7, 6, 5, 7, 6], [1, 1, 1, 1, 1, 1], [1, 5, 7, 6, 1, 1])
    assert len(find_sites(ids, MARKER, expected=3)) == 3
    with pytest.raises(InjectionError, match=r"Row 0 has 2 .*2 of 3 rows.*1 in every row"):
        find_sites(ids, MARKER, expected=3, per_row=1)
