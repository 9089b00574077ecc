"""Where vectors enter: found on the ids that the model really receives, never precomputed."""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman.errors import InjectionError
from dragoman.injection.marker import Marker
from dragoman.shapes import Sites, TokenIds

_NO_TOKEN = -1


def find_sites(
    ids: TokenIds,
    marker: Marker,
    *,
    expected: int | None = None,
    per_row: int | None = None,
    left_context: Tensor | int | None = None,
) -> Sites:
    """Places of the marker with the right token on both sides, in row-major order.

    A marker with another neighbour is text that happens to contain it, not a site. The function is pure.

    Args:
        ids: what the embedding receives, pads included.
        marker: the marker and its neighbours.
        expected: how many sites there must be in all; None checks nothing.
        per_row: how many sites each row must have; None checks nothing.
        left_context: the token before column 0, when this forward continues a prefix: one id for all rows or
            one a row. None means that nothing stands before column 0.

    Returns:
        [sites 2], row and position, int64 on the device of `ids`.

    Raises:
        InjectionError: the counts differ; found, expected and the likely cause stand in the message.
    """
    before = _edge_column(ids, left_context)
    left = torch.cat([before, ids[:, :-1]], dim=1)
    right = torch.cat([ids[:, 1:], _edge_column(ids, None)], dim=1)
    is_site = (ids == marker.token_id) & (left == marker.left_id) & (right == marker.right_id)
    sites = is_site.nonzero()
    if expected is not None and len(sites) != expected:
        raise _count_error(ids, marker, sites, expected)
    if per_row is not None:
        _check_rows(is_site, ids, marker, sites, per_row)
    return sites


def _edge_column(ids: Tensor, token: Tensor | int | None) -> Tensor:
    rows = ids.shape[0]
    if isinstance(token, Tensor):
        return token.to(ids.device, ids.dtype).reshape(-1, 1).expand(rows, 1)
    return ids.new_full((rows, 1), _NO_TOKEN if token is None else token)


def _check_rows(is_site: Tensor, ids: Tensor, marker: Marker, sites: Tensor, per_row: int) -> None:
    counts = is_site.sum(dim=1)
    wrong = (counts != per_row).nonzero().flatten()
    if not len(wrong):
        return
    row = int(wrong[0])
    raise InjectionError(
        f"row {row} has {int(counts[row])} injection sites, and {len(wrong)} of {len(ids)} rows differ "
        f"from what is asked ({len(sites)} sites in all)",
        expected=f"{per_row} in every row",
        consequence="vectors would enter the prompts of other vectors",
        remedy=_likely_cause(ids[row : row + 1], marker, int(counts[row]), per_row),
    )


def _count_error(ids: Tensor, marker: Marker, sites: Tensor, expected: int) -> InjectionError:
    return InjectionError(
        f"found {len(sites)} injection sites in {ids.shape[0]} rows of {ids.shape[1]} tokens",
        expected=f"{expected}, one for each vector",
        consequence="vectors would be lost or enter the prompts of other vectors",
        remedy=_likely_cause(ids, marker, len(sites), expected),
    )


def _likely_cause(ids: Tensor, marker: Marker, found: int, expected: int) -> str:
    """A remedy that starts from what the ids show."""
    markers = (ids == marker.token_id).nonzero()
    name = f"the marker {marker.char!r} (token {marker.token_id})"
    if found > expected:
        return (
            f"check the prompts: {name} stands between its neighbours more often than there are vectors, "
            "as when rows are packed, a prompt is repeated or a text quotes the prompt; pass a vector a site"
        )
    if not len(markers):
        return (
            f"check the prompt and the tokenizer: {name} does not occur at all, as when the prompt was "
            "truncated, or encoded by another tokenizer"
        )
    row, place = (int(value) for value in markers[0])
    left = int(ids[row, place - 1]) if place > 0 else None
    right = int(ids[row, place + 1]) if place + 1 < ids.shape[1] else None
    if len(markers) == found:
        return (
            f"check the number of vectors: {name} occurs {len(markers)} times and each is a site, so rows "
            "are missing or some prompts were truncated"
        )
    return (
        f"check the template and the tokenizer: {name} occurs {len(markers)} times, {found} of them with the "
        f"right neighbours; the first (row {row}, position {place}) stands between {_shown(left)} and "
        f"{_shown(right)}, the sidecar says between {marker.left_id} and {marker.right_id}"
    )


def _shown(token: int | None) -> str:
    return "the edge" if token is None else str(token)
