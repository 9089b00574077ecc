"""A bounded streaming reader of MediaWiki dumps (export schema 0.10, `.xml` or `.xml.bz2`).

Nothing is unpacked or parsed whole: bz2 is read in bounded chunks, expat is fed chunk by chunk, and a
document type declaration, which an entity bomb needs and MediaWiki never writes, ends the reading.
"""

from __future__ import annotations

import bz2
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, cast
from xml.parsers import expat

from dragoman.errors import CorpusError

MAX_DUMP_BYTES = 8 << 30
"""Decompressed bytes read from one dump before it is taken for a bomb."""

MAX_PAGE_CHARACTERS = 8 << 20
"""Characters of one page; MediaWiki itself stops at 2 MiB."""

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class WikiPage:
    """One page of a dump: its title, namespace number and raw wikitext."""

    title: str
    namespace: str
    markup: str


def read_dump(path: Path, *, max_bytes: int = MAX_DUMP_BYTES) -> Iterator[WikiPage]:
    """Pages of a MediaWiki export (`.xml`, `.xml.bz2`), streamed in file order.

    Args:
        path: the dump.
        max_bytes: decompressed bytes after which reading stops with an error.

    Raises:
        CorpusError: malformed XML or bz2, a document type declaration (entity bombs need one), a page or a
            dump over its bound.
    """
    reader = _PageReader(path)
    opener = bz2.open if path.suffix == ".bz2" else Path.open
    total = 0
    with cast("BinaryIO", opener(path, "rb")) as stream:
        while True:
            try:
                # A bounded read keeps a bz2 bomb at one chunk of memory.
                chunk = stream.read(_CHUNK_BYTES)
            except (OSError, EOFError) as error:
                _refuse(path, f"is not readable bz2 ({error})", error)
            total += len(chunk)
            if total > max_bytes:
                _refuse(path, f"unpacks to more than {max_bytes} bytes")
            reader.feed(chunk, final=not chunk)
            yield from reader.take()
            if not chunk:
                return


class _PageReader:
    """Expat handlers that collect the title, namespace and text of each page."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._field: str | None = None
        self._parts: dict[str, list[str]] = {}
        self._size = 0
        self._pages: list[WikiPage] = []
        self._parser = expat.ParserCreate(encoding="utf-8")
        self._parser.buffer_text = True
        self._parser.StartDoctypeDeclHandler = self._on_doctype
        self._parser.StartElementHandler = self._on_start
        self._parser.EndElementHandler = self._on_end
        self._parser.CharacterDataHandler = self._on_text

    def feed(self, chunk: bytes, *, final: bool) -> None:
        try:
            self._parser.Parse(chunk, final)
        except expat.ExpatError as error:
            _refuse(self._path, f"is not well-formed XML ({error})", error)

    def take(self) -> list[WikiPage]:
        pages, self._pages = self._pages, []
        return pages

    def _on_doctype(self, name: str, system_id: str | None, public_id: str | None, internal: bool) -> None:
        _refuse(self._path, f"declares a document type ({name}), which MediaWiki dumps never do")

    def _on_start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "page":
            self._parts, self._size = {}, 0
        self._field = name if name in {"title", "ns", "text"} else None
        if self._field:
            # Of several revisions the last one counts.
            self._parts[self._field] = []

    def _on_end(self, name: str) -> None:
        self._field = None
        if name == "page":
            fields = {key: "".join(parts) for key, parts in self._parts.items()}
            self._pages.append(
                WikiPage(fields.get("title", ""), fields.get("ns", "0"), fields.get("text", ""))
            )

    def _on_text(self, data: str) -> None:
        if self._field is None:
            return
        self._size += len(data)
        if self._size > MAX_PAGE_CHARACTERS:
            _refuse(self._path, f"holds a page of more than {MAX_PAGE_CHARACTERS} characters")
        self._parts[self._field].append(data)


def _refuse(path: Path, what: str, cause: BaseException | None = None) -> NoReturn:
    raise CorpusError(
        f"The wiki dump {path.name} {what}",
        expected="a MediaWiki export, .xml or .xml.bz2, without a document type declaration",
        consequence="a damaged or hostile file would fill the memory or end up as half a corpus",
        remedy="download the dump again and check its hash, or convert the pages to .jsonl",
    ) from cause
