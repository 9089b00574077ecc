"""A reading on its way out: table for a terminal, tab-separated lines for a pipe, JSON rows, an HTML page."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from dragoman.cli.common import out_console, visible_text
from dragoman.cli.html import Page, PageToken, ScoreFacts, colour_class

if TYPE_CHECKING:
    from dragoman.nla import Pair
    from dragoman.nla.reading import Reading
    from dragoman.sidecar import Sidecar

_STYLES = {
    "n2": "bold red", "n1": "red", "p0": "yellow", "p1": "yellow",
    "p2": "green", "p3": "green", "p4": "bold green", "p5": "bold green",
}  # fmt: skip
"""Colours of a terminal for the page's classes; the number stands beside them."""


def reading_rows(reading: Reading) -> list[dict[str, Any]]:
    """JSON rows; vectors without a text have `row` and no position."""
    rows = [row.to_json() for row in reading]
    if reading.tokens:
        return rows
    return [{**row, "row": row["position"], "position": None} for row in rows]


def score_figures(pair: Pair, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures beside the rows: the median score and what scores are compared with."""
    sidecar = pair.sidecar
    baseline = None if sidecar.baseline is None else sidecar.baseline.model_dump()
    return {
        "pair": pair.name,
        "subject": pair.subject.name,
        "layer_index": pair.layer_index,
        "n": len(rows),
        "fve_median": _median(rows),
        "baseline": baseline,
        "score_threshold": sidecar.score_threshold,
        "norm_quantiles": sidecar.norm_quantiles,
    }


def print_reading(reading: Reading, sidecar: Sidecar) -> None:
    """Show a reading on standard output: a table, or plain lines where nobody looks at a terminal."""
    rows = reading_rows(reading)
    console = out_console()
    if console.is_terminal:
        console.print(_table(rows, title=_title(reading)))
        console.print(Text(_summary(rows, sidecar), style="dim"))
    else:
        _print_lines(rows)


def page_of(
    reading: Reading, sidecar: Sidecar, special: Sequence[bool], provenance: Mapping[str, Any]
) -> Page:
    """The reading as a page.

    Args:
        reading: what was read.
        sidecar: the pair's, for what scores are compared with.
        special: for each token of the text whether it is a special one.
        provenance: for the footer.
    """
    rows = reading_rows(reading)
    by_position = {} if not reading.tokens else {row.position: at for at, row in enumerate(reading)}
    tokens = [
        PageToken(text, by_position.get(position), is_special)
        for position, (text, is_special) in enumerate(zip(reading.tokens, special, strict=True))
    ]
    baseline = sidecar.baseline
    return Page(
        title=_title(reading),
        lede=_lede(reading, rows),
        rows=rows,
        score=ScoreFacts(None if baseline is None else baseline.n, sidecar.score_threshold),
        provenance=provenance,
        tokens=tokens,
    )


# ---------------------------------------------------------------- words


def _title(reading: Reading) -> str:
    what = reading.subject if reading.tokens else f"{len(reading)} vectors of {reading.subject}"
    holds = "holds" if reading.tokens else "hold"
    return f"What {what} {holds} after block {reading.layer_index}"


def _lede(reading: Reading, rows: Sequence[Mapping[str, Any]]) -> str:
    what = f"{len(rows)} of {len(reading.tokens)} positions" if reading.tokens else f"{len(rows)} vectors"
    median = _median(rows)
    score = "" if median is None else f" Median FVE {median:.2f}.".replace("-", "−")
    return f"{what}, put into words by {reading.pair}.{score}"


def _summary(rows: Sequence[Mapping[str, Any]], sidecar: Sidecar) -> str:
    median = _median(rows)
    if median is None:
        return f"{len(rows)} read, not scored: the pair's sidecar has no baseline."
    n = f" of {sidecar.baseline.n:,} vectors" if sidecar.baseline is not None else " vector"
    text = f"Median FVE {median:.2f} over {len(rows)}. 1: the words carry the whole vector; 0: no better "
    text += f"than always answering the mean{n}."
    if sidecar.score_threshold is not None:
        text += f" Below {sidecar.score_threshold:.2f}: low-score, take it as a guess."
    return text


def _median(rows: Sequence[Mapping[str, Any]]) -> float | None:
    scores = [row["fve"] for row in rows if row["fve"] is not None]
    return statistics.median(scores) if scores else None


# ---------------------------------------------------------------- terminal


def _table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    with_tokens = any(row["token"] is not None for row in rows)
    table = Table(title=Text(visible_text(title)), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("pos" if with_tokens else "row", justify="right", style="dim", no_wrap=True)
    if with_tokens:
        table.add_column("token", no_wrap=True, max_width=20, overflow="ellipsis")
    table.add_column("explanation", ratio=1, overflow="fold")
    table.add_column("FVE", justify="right", no_wrap=True)
    table.add_column("flags", style="dim", max_width=16)
    for row in rows:
        style = _STYLES.get(colour_class(row["fve"]), "")
        token = [Text(visible_text(row["token"] or ""), style=style)] if with_tokens else []
        table.add_row(
            str(_place(row)),
            *token,
            Text(_words(row)),
            Text("" if row["fve"] is None else f"{row['fve']:.2f}", style=style),
            Text("\n".join(row["flags"])),
        )
    return table


def _print_lines(rows: Sequence[Mapping[str, Any]]) -> None:
    """One reading a line, tab-separated, so that head, cut and grep work."""
    sys.stdout.write("position\ttoken\tfve\tflags\texplanation\n")
    for row in rows:
        fve = "" if row["fve"] is None else f"{row['fve']:.3f}"
        fields = (_place(row), visible_text(row["token"] or ""), fve, ",".join(row["flags"]), _words(row))
        sys.stdout.write("\t".join(map(str, fields)) + "\n")
    sys.stdout.flush()


def _place(row: Mapping[str, Any]) -> int:
    return int(row["row"] if row["position"] is None else row["position"])


def _words(row: Mapping[str, Any]) -> str:
    return visible_text(row["explanation"]) + (" …" if row["truncated"] else "")
