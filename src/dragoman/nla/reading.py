"""A reading: the vectors of a text, or vectors from anywhere, each in words, with scores and warnings."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dragoman.activations import PositionRule, capture, parse_position_rule
from dragoman.errors import ConfigError, TextError
from dragoman.nla.explanation import Decoding, Explanation
from dragoman.nla.vectors import as_vectors
from dragoman.shapes import Vectors
from dragoman.sidecar import Sidecar

if TYPE_CHECKING:
    from dragoman.nla.pair import Pair
    from dragoman.runs import Progress

EARLY_POSITION = 10
"""Below this position a token has seen too little for its vector to hold what the pair was trained on."""
_CJK_RANGES = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7AF), (0xF900, 0xFAFF))
COLUMNS = (
    "position",
    "token",
    "token_id",
    "norm",
    "explanation",
    "truncated",
    "cosine",
    "mse",
    "fve",
    "flags",
)


@dataclass(frozen=True)
class ReadingRow:
    """One vector read.

    Attributes:
        position: from 0 in the ids the model received; the row number for vectors without a text.
        token: the token at the position as readable text; None for vectors without a text.
        token_id: likewise.
        norm: L2 norm of the raw vector.
        explanation: the words.
        truncated: the answer was cut before its closing tag.
        cosine, mse, fve: how much of the vector the words carry; None where not scored (fve also without
            baseline).
        flags: reasons to distrust the row: `early-position`, `outlier-norm`, `cjk`, `low-score`.
    """

    position: int
    token: str | None
    token_id: int | None
    norm: float
    explanation: str
    truncated: bool
    cosine: float | None
    mse: float | None
    fve: float | None
    flags: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The row as plain values, in the order of `COLUMNS`."""
        return {name: list(self.flags) if name == "flags" else getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True)
class Reading:
    """Vectors in words; shows itself in a notebook.

    Attributes:
        rows: one a vector read, by position.
        tokens: all tokens of the text as readable strings, also those not read; empty without a text.
        pair: name of the pair.
        subject: name of the subject.
        layer_index: the block whose output was read, from 0.
    """

    rows: tuple[ReadingRow, ...]
    tokens: tuple[str, ...]
    pair: str
    subject: str
    layer_index: int

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ReadingRow]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> ReadingRow:
        return self.rows[index]

    def to_dataframe(self) -> Any:
        """The rows as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError(
                "pandas is not installed",
                expected="pandas, which turns a reading into a DataFrame",
                consequence="there would be no table",
                remedy="run `pip install pandas`, or use [row.to_json() for row in reading]",
            ) from error
        return pd.DataFrame([row.to_json() for row in self.rows], columns=list(COLUMNS))

    def _repr_html_(self) -> str:
        """A table; everything that a model or a text said is escaped."""
        title = html.escape(f"{self.pair}: {self.subject}, output of block {self.layer_index}")
        names = ("position", "token", "explanation", "cosine", "fve", "flags")
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join(_html_row(row) for row in self.rows)
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def read_text(
    pair: Pair,
    text: str | Sequence[int],
    positions: str | PositionRule = "all",
    *,
    decoding: Decoding | None = None,
    score: bool = True,
    batch_size: int = 32,
    seed: int = 0,
    doc_id: str = "text",
    progress: Progress | None = None,
) -> Reading:
    """Read what the subject holds at the tokens of a text.

    Args:
        pair: the pair to read with.
        text: plain text, or ids exactly as the subject shall receive them (for example a rendered chat).
        positions: a rule, see `activations.parse_position_rule`.
        decoding: how answers are decoded; default greedy.
        score: run the reconstructor.
        batch_size: answers decoded side by side.
        seed: of a sampling rule.
        doc_id: likewise.
        progress: called with (done, n, "vectors").

    Raises:
        TextError: an empty text, one longer than the subject's positions, or a position beyond it.
    """
    subject = pair.subject
    ids = subject.encode(text) if isinstance(text, str) else list(text)
    _check_ids(text, ids, subject.max_positions, subject.name)
    rule = parse_position_rule(positions) if isinstance(positions, str) else positions
    chosen = rule.select(ids, subject.special_ids, seed=seed, doc_id=doc_id)
    if not chosen:
        raise TextError(
            f"no position of a text of {len(ids)} tokens fits the rule {positions}",
            expected="at least one position; special tokens are never chosen unless asked for",
            consequence="there would be nothing to read",
            remedy="pass a longer text or another rule, for example 'all' or 'last'",
        )
    captured = capture(subject, [ids], [pair.layer_index], [chosen])[0]
    vectors = captured.vectors[pair.layer_index]
    explanations = pair.explain(vectors, decoding, score=score, batch_size=batch_size, progress=progress)
    tokens = subject.token_strings(ids)
    rows = [
        replace(row, position=position, token=tokens[position], token_id=ids[position])
        for row, position in zip(_rows(pair.sidecar, vectors, explanations), chosen, strict=True)
    ]
    return _reading(pair, [_flag_early(row) for row in rows], tokens)


def read_vectors(
    pair: Pair,
    vectors: Any,
    *,
    decoding: Decoding | None = None,
    score: bool = True,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> Reading:
    """Read vectors from anywhere: stored activations, differences, probe or steering directions.

    Args:
        pair: the pair to read with.
        vectors: raw, [n, d_model].
        decoding: how answers are decoded; default greedy.
        score: run the reconstructor.
        batch_size: answers decoded side by side.
        progress: called with (done, n, "vectors").

    Raises:
        VectorError: no vectors, another width or not finite.
    """
    checked = as_vectors(vectors, pair.subject.d_model)
    explanations = pair.explain(checked, decoding, score=score, batch_size=batch_size, progress=progress)
    return _reading(pair, _rows(pair.sidecar, checked, explanations), [])


def flags_of(sidecar: Sidecar, norm: float, explanation: Explanation) -> tuple[str, ...]:
    """Reasons to distrust an explanation that do not depend on its position.

    `outlier-norm` outside the middle 99.8 % of the layer's norms, `cjk` where the answer holds Chinese,
    Japanese or Korean letters (a frequent sign of a derailed answer of small models), `low-score` where the
    FVE is below the calibrated threshold. A flag whose figures the sidecar lacks is never set.
    """
    flags: list[str] = []
    quantiles = sidecar.norm_quantiles or {}
    if norm < quantiles.get("p001", 0.0) or norm > quantiles.get("p999", float("inf")):
        flags.append("outlier-norm")
    if any(low <= ord(char) <= high for char in explanation.text for low, high in _CJK_RANGES):
        flags.append("cjk")
    threshold = sidecar.score_threshold
    if threshold is not None and explanation.fve is not None and explanation.fve < threshold:
        flags.append("low-score")
    return tuple(flags)


def _rows(sidecar: Sidecar, vectors: Vectors, explanations: Sequence[Explanation]) -> list[ReadingRow]:
    norms = torch.linalg.vector_norm(vectors.float(), dim=1).tolist()
    return [
        ReadingRow(
            position=number,
            token=None,
            token_id=None,
            norm=norm,
            explanation=explanation.text,
            truncated=explanation.truncated,
            cosine=explanation.cosine,
            mse=explanation.mse,
            fve=explanation.fve,
            flags=flags_of(sidecar, norm, explanation),
        )
        for number, (norm, explanation) in enumerate(zip(norms, explanations, strict=True))
    ]


def _flag_early(row: ReadingRow) -> ReadingRow:
    return replace(row, flags=("early-position", *row.flags)) if row.position < EARLY_POSITION else row


def _reading(pair: Pair, rows: Sequence[ReadingRow], tokens: Sequence[str]) -> Reading:
    return Reading(tuple(rows), tuple(tokens), pair.name, pair.subject.name, pair.layer_index)


def _check_ids(text: str | Sequence[int], ids: Sequence[int], max_positions: int, name: str) -> None:
    if not ids or (isinstance(text, str) and not text.strip()):
        raise TextError(
            "the text is empty",
            expected="at least one word",
            consequence="there would be no token to read",
            remedy="pass a text",
        )
    if len(ids) > max_positions:
        raise TextError(
            f"the text has {len(ids)} tokens",
            expected=f"at most {max_positions}, the positions of {name}",
            consequence="the model would run beyond the positions it was trained for",
            remedy="cut the text into passages",
        )


def _html_row(row: ReadingRow) -> str:
    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    mark = " …" if row.truncated else ""
    cells = (
        str(row.position),
        f"<code>{html.escape(row.token or '')}</code>",
        html.escape(row.explanation) + mark,
        figure(row.cosine),
        figure(row.fve),
        html.escape(", ".join(row.flags)),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
