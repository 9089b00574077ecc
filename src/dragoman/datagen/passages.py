"""Long documents cut into passages that fit one forward pass.

Cuts fall between sentences where there are any. A document is divided evenly: 270 tokens at 256 a passage
become two of 135, not one of 256 and a rest too short to use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dragoman.datagen.corpora import Document
from dragoman.errors import ConfigError

Encode = Callable[[str], list[int]]
"""Text to ids as the subject receives them, its default special tokens included."""


@dataclass(frozen=True)
class Passage:
    """A stretch of a document, tokenised by itself.

    Attributes:
        passage_id: `DOC_ID#K`, K counted from 0 within the document.
        doc_id: the document, which decides the split.
        text: the stretch, without white space around it.
        ids: what the subject receives for it, specials included.
    """

    passage_id: str
    doc_id: str
    text: str
    ids: tuple[int, ...]


@dataclass
class CorpusCounts:
    """What became of a corpus.

    Attributes:
        documents: read.
        short_documents: of those, skipped because no passage reaches the first position to sample.
        passages: cut from the others.
        tokens: in these passages, specials included.
    """

    documents: int = 0
    short_documents: int = 0
    passages: int = 0
    tokens: int = 0


def cut_passages(
    documents: Iterable[Document],
    encode: Encode,
    *,
    max_tokens: int,
    min_tokens: int,
    counts: CorpusCounts | None = None,
) -> Iterator[Passage]:
    """Passages of all documents, in order.

    Args:
        documents: texts.
        encode: the subject's tokenisation.
        max_tokens: upper bound of a passage, specials included.
        min_tokens: shorter passages are dropped; one more than the first position to sample.
        counts: is filled while iterating.

    Raises:
        ConfigError: max_tokens below min_tokens.
    """
    if not 0 < min_tokens <= max_tokens:
        raise ConfigError(
            f"Passages are to have from {min_tokens} up to {max_tokens} tokens",
            expected="a positive minimum (min_position + 1) that is not above the maximum (max_tokens)",
            consequence="every document would be skipped",
            remedy="raise max_tokens or lower min_position",
        )
    counts = counts if counts is not None else CorpusCounts()
    for document in documents:
        passages = cut_document(document, encode, max_tokens=max_tokens, min_tokens=min_tokens)
        counts.documents += 1
        counts.short_documents += not passages
        counts.passages += len(passages)
        counts.tokens += sum(len(passage.ids) for passage in passages)
        yield from passages


def cut_document(document: Document, encode: Encode, *, max_tokens: int, min_tokens: int) -> list[Passage]:
    """The passages of one document; none where it is shorter than min_tokens."""
    specials = len(encode(""))
    capacity = max(1, max_tokens - specials)
    pieces = [
        (piece, length)
        for sentence in _sentences(document.text)
        for piece, length in _fitting(sentence, lambda text: len(encode(text)) - specials, capacity)
    ]
    passages: list[Passage] = []
    for text in _packed(pieces, capacity):
        ids = encode(text)
        # Tokens merge across a seam at most, so that a joined text is rarely longer than the sum of its
        # pieces; where it is, it is halved.
        for part in [text] if len(ids) <= max_tokens else _halves(text):
            ids = encode(part)
            if min_tokens <= len(ids) <= max_tokens:
                name = f"{document.doc_id}#{len(passages)}"
                passages.append(Passage(name, document.doc_id, part, tuple(ids)))
    return passages


_SENTENCE_END = re.compile(r"[.!?。！？][\"'”’)\]]*(?=\s)|(?<=\S)(?=\n)")


def _sentences(text: str) -> Iterator[str]:
    """The text in pieces that begin with the white space before them; joined they are the text."""
    start = 0
    for match in _SENTENCE_END.finditer(text):
        if match.end() > start:
            yield text[start : match.end()]
            start = match.end()
    if start < len(text):
        yield text[start:]


def _fitting(piece: str, length_of: Callable[[str], int], capacity: int) -> Iterator[tuple[str, int]]:
    """The piece with its length in tokens, halved as often as it takes to fit."""
    length = length_of(piece)
    if length <= capacity or len(piece) < 2:
        yield piece, length
        return
    for half in _halves(piece):
        yield from _fitting(half, length_of, capacity)


def _halves(text: str) -> tuple[str, str]:
    """Cut at the white space nearest before the middle, or at the middle where there is none."""
    middle = len(text) // 2
    cut = max((match.start() for match in re.finditer(r"\s", text[:middle])), default=0) or middle
    return text[:cut], text[cut:]


def _packed(pieces: list[tuple[str, int]], capacity: int) -> Iterator[str]:
    """Consecutive pieces joined to texts of about the same length, none above the capacity."""
    total = sum(length for _, length in pieces)
    target = total / max(1, math.ceil(total / capacity))
    current, held = "", 0
    for piece, length in pieces:
        if current and (held + length > capacity or held + length / 2 > target):
            yield current.strip()
            current, held = "", 0
        current, held = current + piece, held + length
    if current.strip():
        yield current.strip()
