"""One self-contained page of readings: tokens coloured by score, a card to read, a sortable table.

The page makes no request: styles and script stand inside it and a Content-Security-Policy allows
exactly those two by their hashes, so that text of a model or a corpus can never run, whatever it
holds. All such text is escaped here, once, on its way in; the script only copies text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from dragoman.cli.common import visible_text

FLAG_MEANINGS: Mapping[str, str] = {
    "early-position": "one of the first ten positions: little has been said yet; pairs are not trained there",
    "outlier-norm": "the vector's length lies outside nearly all the pair was trained on",
    "cjk": "the words hold Chinese, Japanese or Korean characters, often a sign of a vector misread",
    "low-score": "below the threshold calibrated on held-out documents: take the words as a guess",
    "truncated": "the explanation reached the token limit before it ended",
}

EDGES = (-0.25, 0.0, 0.1, 0.2, 0.3, 0.45, 0.6)
"""Upper edges of the colour classes in FVE; fixed, so that two pages compare by eye."""
COLOURS = ("n2", "n1", "p0", "p1", "p2", "p3", "p4", "p5")


@dataclass(frozen=True)
class PageToken:
    """One token of the text that was read.

    Args:
        text: the token as text.
        row: index into the page's rows, or None where this position was not read.
        special: a template or control token, shown as a small chip.
    """

    text: str
    row: int | None
    special: bool = False


@dataclass(frozen=True)
class ScoreFacts:
    """What the score on the page is compared with.

    Args:
        baseline_n: vectors behind the baseline (always answer their mean), if known.
        threshold: FVE below which a reading is flagged `low-score`, if calibrated.
        shuffled: mean FVE of explanations that belong to other vectors, if measured.
    """

    baseline_n: int | None = None
    threshold: float | None = None
    shuffled: float | None = None


@dataclass(frozen=True)
class Page:
    """Everything a page shows; `rows` have the keys of the JSON rows of `dragoman explain`."""

    title: str
    lede: str
    rows: Sequence[Mapping[str, Any]]
    score: ScoreFacts
    provenance: Mapping[str, Any]
    tokens: Sequence[PageToken] = ()


def colour_class(fve: float | None) -> str:
    """The colour class of an FVE; empty where there is no finite score."""
    if fve is None or fve != fve:
        return ""
    return COLOURS[sum(fve >= edge for edge in EDGES)]


def render_page(page: Page) -> str:
    """The complete HTML document; every text of the page is escaped."""
    style, script = _asset("report.css"), _asset("report.js")
    body_class = "no-script" if page.tokens else "no-script vectors-only"
    return "".join(
        [
            "<!doctype html>\n",
            '<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1, viewport-fit=cover">\n',
            '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n',
            f"<title>{_text(page.title)} · Dragoman</title>\n<style>{style}</style>\n</head>\n",
            f'<body class="{body_class}">\n',
            _header(page),
            _legend(page),
            _reading(page.tokens, page.rows),
            _table(page.rows),
            _footer(page.provenance),
            f'<script type="application/json" id="meanings">{_json_block(FLAG_MEANINGS)}</script>\n',
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


# ---------------------------------------------------------------- frame


def _asset(name: str) -> str:
    return files("dragoman.cli").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    def source(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; style-src '{source(style)}'; script-src '{source(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _text(value: object, *, keep_newlines: bool = False) -> str:
    return escape(visible_text(str(value), keep_newlines=keep_newlines), quote=True)


def _json_block(value: Any) -> str:
    # Inside a script element only "<" can end it or open a comment.
    return json.dumps(value).replace("<", "\\u003c")


def _header(page: Page) -> str:
    return (
        '<header><div class="top"><span class="brand">Dragoman</span>'
        '<button id="theme" type="button">Light / dark</button></div>\n'
        f'<h1>{_text(page.title)}</h1>\n<p class="lede">{_text(page.lede)}</p></header>\n'
    )


def _footer(provenance: Mapping[str, Any]) -> str:
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in _flatten(provenance))
    return (
        f"<footer><details open><summary>Where this comes from</summary><dl>{items}</dl></details></footer>\n"
    )


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name} ")
        elif value is not None:
            yield f"{prefix}{name}", value


# ---------------------------------------------------------------- legend

_BIN = 40
_CHART = 62


def _legend(page: Page) -> str:
    classes = [colour_class(row.get("fve")) for row in page.rows]
    counts = [classes.count(colour) for colour in COLOURS]
    return (
        '<section class="legend" aria-label="What the colours mean">'
        f"{_histogram(counts, page.score.threshold)}<div>{_legend_words(page.score)}</div></section>\n"
    )


def _histogram(counts: Sequence[int], threshold: float | None) -> str:
    """The colour scale, with the number of readings of each colour standing on it."""
    width, tallest = _BIN * len(COLOURS), max([*counts, 1])
    parts: list[str] = []
    for index, (colour, count) in enumerate(zip(COLOURS, counts, strict=True)):
        x, height = index * _BIN + 2, round(_CHART * count / tallest)
        parts.append(
            f'<rect class="bar {colour}" x="{x}" y="{14 + _CHART - height}" width="{_BIN - 4}" '
            f'height="{height}"/><rect class="swatch {colour}" x="{x}" y="{16 + _CHART}" '
            f'width="{_BIN - 4}" height="11" rx="2"/>'
        )
        if count:
            parts.append(
                f'<text class="count" x="{x + _BIN / 2 - 2}" y="{10 + _CHART - height}" '
                f'text-anchor="middle">{count}</text>'
            )
    for index, edge in enumerate(EDGES, start=1):
        label = f"{edge:g}".replace("-", "−")
        parts.append(f'<text x="{index * _BIN}" y="{40 + _CHART}" text-anchor="middle">{label}</text>')
    if threshold is not None:
        x = _place(threshold)
        parts.append(f'<line class="threshold" x1="{x}" x2="{x}" y1="{12 + _CHART}" y2="{31 + _CHART}"/>')
    return (
        f'<svg viewBox="0 0 {width} {46 + _CHART}" role="img" '
        'aria-label="Number of readings for each class of FVE">' + "".join(parts) + "</svg>"
    )


def _place(fve: float) -> float:
    """The x of an FVE on the scale, linear inside a class; the open end classes are drawn one wide."""
    index = COLOURS.index(colour_class(fve))
    if index in (0, len(EDGES)):
        return (index + 0.5) * _BIN
    low, high = EDGES[index - 1], EDGES[index]
    return round((index + (fve - low) / (high - low)) * _BIN, 1)


def _legend_words(score: ScoreFacts) -> str:
    n = f" of {score.baseline_n:,} vectors" if score.baseline_n else " vector"
    first = (
        "<p><b>The colour is the FVE: how much of the vector the words carry.</b> The reconstructor, which "
        "sees the words and never the vector, turns them back into a vector; FVE is 1 minus its squared "
        f"error, divided by the error of always answering the mean{n}.</p>"
    )
    second = "<p><b>1</b> exact · <b>0</b> no better than that mean · <b>below 0</b> worse (dashed)"
    if score.shuffled is not None:
        second += f" · words of another vector score <b>{score.shuffled:.2f}</b>".replace("-", "−")
    if score.threshold is not None:
        limit = f"{score.threshold:.2f}".replace("-", "−")
        second += f" · below <b>{limit}</b> (dotted line) a reading is flagged low-score"
    return first + second + ". A detail can be wrong even where the score is high.</p>"


# ---------------------------------------------------------------- text and table


def _reading(tokens: Sequence[PageToken], rows: Sequence[Mapping[str, Any]]) -> str:
    if not tokens:
        return ""
    spans = "".join(_token(token, rows) for token in tokens)
    hint = "Point at a token, tap it, or walk with the arrow keys, to read what the model holds there."
    return (
        '<main class="reading"><div><h2>The text, as the model received it</h2>'
        f'<div class="text" dir="auto">{spans}</div></div>'
        f'<aside class="reader empty" aria-live="polite" aria-label="Reading" data-hint="{hint}">'
        '<button class="close" type="button" aria-label="Close">✕</button>'
        f'<div class="content"><p class="hint">{hint}</p></div></aside></main>\n'
    )


def _token(token: PageToken, rows: Sequence[Mapping[str, Any]]) -> str:
    shown = _token_text(token)
    if token.row is None:
        return f'<span class="special">{shown}</span>' if token.special else shown
    row = rows[token.row]
    kinds = " ".join(filter(None, ["t", colour_class(row.get("fve")), "special" if token.special else ""]))
    return f'<a class="{kinds}" href="#r{token.row}">{shown}</a>'


def _token_text(token: PageToken) -> str:
    if token.special:
        return _text(token.text)
    # A newline is shown as a mark and still breaks the line, so that the text keeps its shape.
    lines = [_text(line) for line in token.text.split("\n")]
    return '<i class="nl">⏎</i>\n'.join(lines)


_NUMBERS = (("fve", "FVE", "{:.2f}"), ("cosine", "cosine", "{:.2f}"), ("norm", "norm", "{:,.1f}"))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    place = "row" if rows and rows[0].get("position") is None else "position"
    with_tokens = any(row.get("token") is not None for row in rows)
    heads = [("num", place), *([("", "token")] if with_tokens else []), ("", "explanation")]
    heads += [("num", name) for _, name, _ in _NUMBERS] + [("", "flags")]
    head = "".join(
        f'<th scope="col"{f" class={kind}" if kind else ""}><button type="button">{name}</button></th>'
        for kind, name in heads
    )
    body = "".join(_table_row(index, row, place, with_tokens) for index, row in enumerate(rows))
    return (
        '<section class="all"><div class="bartop"><h2>All readings</h2><label class="filter">Filter '
        '<input type="search" placeholder="a word, a flag" autocomplete="off"></label></div>'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></section>\n"
    )


def _table_row(index: int, row: Mapping[str, Any], place: str, with_tokens: bool) -> str:
    at = row.get("position")
    at = row.get("row", index) if at is None else at
    cells = [f'<td class="num" data-key="position" data-label="{place}" data-value="{at}">{at}</td>']
    if with_tokens:
        token, colour = _text(row.get("token") or ""), colour_class(row.get("fve"))
        cells.append(f'<td class="tok" data-key="token"><code class="{colour}">{token}</code></td>')
    words = _text(row.get("explanation") or "", keep_newlines=True)
    cells.append(f'<td class="say" data-key="explanation" dir="auto">{words}</td>')
    cells += [_number_cell(row.get(key), key, label, pattern) for key, label, pattern in _NUMBERS]
    flags = list(row.get("flags") or [])
    if row.get("truncated") and "truncated" not in flags:
        flags.append("truncated")
    shown = ", ".join(f"<span>{_text(flag)}</span>" for flag in flags)
    cells.append(f'<td class="flagged" data-key="flags">{shown}</td>')
    return f'<tr id="r{index}">{"".join(cells)}</tr>\n'


def _number_cell(value: float | None, key: str, label: str, pattern: str) -> str:
    if value is None or value != value:
        return f'<td class="num" data-key="{key}" data-label="{label}" data-value=""></td>'
    shown = pattern.format(float(value)).replace("-", "−")
    return (
        f'<td class="num" data-key="{key}" data-label="{label}" data-value="{float(value):.6g}">{shown}</td>'
    )
