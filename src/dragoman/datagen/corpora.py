"""Documents from embedded corpora and local files, one door: `load_corpus`.

A document's id follows from what it is (a page title, a topic, the hash of its text), never from a path or
a position in a file, so that the split and the sample survive moving, renaming and reordering.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from dragoman.datagen.python_docs import read_python_docs
from dragoman.datagen.wiki_dump import read_dump
from dragoman.datagen.wiki_text import is_redirect, plain_text
from dragoman.errors import CorpusError
from dragoman.runs import Progress, home
from dragoman.subjects.wheels import WheelTag, fetch_wheel_members, file_sha256

EMBEDDED_CORPORA = ("wikipedia-sample", "news-sample", "python-docs")
"""Corpora that need a package index at most."""

MAX_DOCUMENT_BYTES = 64 << 20
"""Bytes of one text file or one line of .jsonl."""

_FILE_KINDS = (".txt", ".md", ".jsonl", ".parquet", ".xml", ".bz2")

# gensim has a wheel a platform and none for the newest Python: one fixed wheel serves every machine, since
# only data is taken out of it, and the data itself is pinned.
_GENSIM_VERSION = "4.4.0"
_GENSIM_TAG = WheelTag("3.11", "cp311", "manylinux_2_28_x86_64")
_WIKIPEDIA_MEMBER = (
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
)
_NEWS_MEMBER = "gensim/test/test_data/lee_background.cor"
_GENSIM_MEMBERS = {
    _WIKIPEDIA_MEMBER: "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    _NEWS_MEMBER: "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
}
# The embedded dump unpacks to 6.1 MB.
_MAX_WIKIPEDIA_BYTES = 64 << 20


@dataclass(frozen=True)
class Document:
    """One text that stays on one side of every split.

    Attributes:
        doc_id: stable name, `CORPUS:TITLE` or `file:HASH`.
        text: plain prose.
    """

    doc_id: str
    text: str


def load_corpus(
    name_or_path: str | Path,
    *,
    limit: int | None = None,
    text_column: str = "text",
    progress: Progress | None = None,
) -> Iterator[Document]:
    """Documents of a corpus in its own order, without empty ones and without exact repetitions.

    Args:
        name_or_path: one of `EMBEDDED_CORPORA`; a .txt or .md file (one document), a .jsonl or .parquet file
            (one document a row), a MediaWiki dump (.xml, .xml.bz2; one document an article), or a folder,
            read recursively in the order of names.
        limit: at most this many documents.
        text_column: key or column that holds the text in .jsonl and .parquet.
        progress: hears of the download of an embedded corpus, in steps.

    Raises:
        CorpusError: unknown name, no readable document, invalid UTF-8, missing column, damaged or oversized
            file. An unknown name raises at once, the others while iterating.
        FetchError: an embedded corpus cannot be downloaded.
    """
    name = str(name_or_path)
    if name in EMBEDDED_CORPORA:
        documents = _embedded(name, progress)
    else:
        documents = _local(_existing(name_or_path), text_column)
    return _distinct(documents, name, limit)


def corpus_name(name_or_path: str | Path) -> str:
    """What a row's `corpus` column says: the embedded name, or the file's name without its folders."""
    name = str(name_or_path)
    return name if name in EMBEDDED_CORPORA else Path(name).name


def corpus_fingerprint(name_or_path: str | Path) -> str:
    """What tells whether a corpus is still the same: pinned hashes, the Python version, or the files' hash.

    Raises:
        CorpusError: unknown name.
    """
    name = str(name_or_path)
    if name == "python-docs":
        return f"python {sys.version_info.major}.{sys.version_info.minor}"
    if name in EMBEDDED_CORPORA:
        return _GENSIM_MEMBERS[_WIKIPEDIA_MEMBER if name == "wikipedia-sample" else _NEWS_MEMBER]
    hashes = [file_sha256(file) for file in _files(_existing(name_or_path))]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _distinct(documents: Iterator[Document], name: str, limit: int | None) -> Iterator[Document]:
    seen: set[str] = set()
    for document in documents:
        if limit is not None and len(seen) >= limit:
            break
        if document.doc_id in seen or not document.text.strip():
            continue
        seen.add(document.doc_id)
        yield document
    if not seen and limit != 0:
        raise CorpusError(
            f"The corpus {name} holds no document with text",
            expected="at least one document",
            consequence="sets would be written empty and training would start on nothing",
            remedy="check the file and, for .jsonl and .parquet, the name of the text column",
        )


def _existing(name_or_path: str | Path) -> Path:
    path = Path(name_or_path).expanduser()
    if path.exists() and (path.is_dir() or path.suffix.lower() in _FILE_KINDS):
        return path
    raise CorpusError(
        f"There is no corpus named {str(name_or_path)!r}"
        if not path.exists()
        else f"{path.name} is of a kind that cannot be read as a corpus",
        expected=f"one of {', '.join(EMBEDDED_CORPORA)}, or a folder or file of {', '.join(_FILE_KINDS)}",
        consequence="there would be nothing to read",
        remedy="check the spelling and the path",
    )


# --- embedded -------------------------------------------------------------------------------------------


def _embedded(name: str, progress: Progress | None) -> Iterator[Document]:
    if name == "python-docs":
        for part, text in read_python_docs():
            yield Document(f"python-docs:{part}", text)
    elif name == "wikipedia-sample":
        dump = _gensim_member(_WIKIPEDIA_MEMBER, progress)
        yield from _wiki_documents(dump, "wikipedia-sample", max_bytes=_MAX_WIKIPEDIA_BYTES)
    else:
        # One article a line; a few are there twice.
        for line in _read_utf8(_gensim_member(_NEWS_MEMBER, progress)).splitlines():
            yield Document(f"news-sample:{_hash(line)}", line.strip())


def _gensim_member(member: str, progress: Progress | None) -> Path:
    """The pinned file in the cache; downloaded where it is missing or no longer what it was."""
    folder = home() / "corpora"
    cached = folder / PurePosixPath(member).name
    if not (cached.is_file() and file_sha256(cached) == _GENSIM_MEMBERS[member]):
        fetch_wheel_members(
            "gensim", _GENSIM_VERSION, None, _GENSIM_MEMBERS, folder, tag=_GENSIM_TAG, progress=progress
        )
    return cached


# --- local ----------------------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = (file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in _FILE_KINDS)
    return sorted(files, key=lambda file: file.relative_to(path).parts)


def _local(path: Path, text_column: str) -> Iterator[Document]:
    for file in _files(path):
        match file.suffix.lower():
            case ".jsonl":
                yield from map(_hashed, _jsonl_texts(file, text_column))
            case ".parquet":
                yield from map(_hashed, _parquet_texts(file, text_column))
            case ".xml" | ".bz2":
                yield from _wiki_documents(file, "wiki")
            case _:
                yield _hashed(_read_utf8(file))


def _hashed(text: str) -> Document:
    return Document(f"file:{_hash(text)}", text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def _wiki_documents(path: Path, prefix: str, **bounds: int) -> Iterator[Document]:
    for page in read_dump(path, **bounds):
        if page.namespace == "0" and not is_redirect(page.markup):
            yield Document(f"{prefix}:{page.title}", plain_text(page.markup))


def _read_utf8(path: Path) -> str:
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        _refuse(
            path,
            f"is one document of {path.stat().st_size} bytes",
            f"at most {MAX_DOCUMENT_BYTES} bytes",
            "split it into several files, or into the rows of a .jsonl file",
        )
    return _decoded(path, path.read_bytes(), "")


def _decoded(path: Path, data: bytes, where: str) -> str:
    try:
        # A byte order mark is no part of the text.
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        _refuse(
            path,
            f"is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}{where}",
            "text in UTF-8",
            "convert it (for example: iconv -f LATIN1 -t UTF-8)",
            error,
        )


def _jsonl_texts(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as stream:
        number = 0
        while line := cast("BinaryIO", stream).readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                _refuse(
                    path, f"has over {MAX_DOCUMENT_BYTES} bytes in line {number}", "shorter lines", "split it"
                )
            if line.strip():
                yield _text_field(path, _decoded(path, line, f" of line {number}"), number, column)


def _text_field(path: Path, line: str, number: int, column: str) -> str:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        _refuse(path, f"has no JSON in line {number} ({error})", "one JSON object a line", "repair it", error)
    if not isinstance(row, dict):
        _refuse(path, f"has a {type(row).__name__} in line {number}", "one JSON object a line", "repair it")
    fields = cast("dict[str, object]", row)
    text = fields.get(column)
    if not isinstance(text, str):
        _refuse(
            path,
            f"has in line {number} the keys {', '.join(sorted(fields)) or '(none)'}"
            if column not in fields
            else f"has in line {number} under {column!r} a {type(text).__name__}",
            f"a text under {column!r}",
            "name the key that holds the text (text_column)",
        )
    return text


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        if column not in schema.names:
            _refuse(
                path,
                f"has the columns {', '.join(schema.names) or '(none)'}",
                f"a column of texts {column!r}",
                "name the column that holds the text (text_column)",
            )
        kind = schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            _refuse(
                path, f"has {kind} in the column {column!r}", "strings", "name another column (text_column)"
            )
        _check_text_size(path, file, column)
        # Small batches bound the memory whatever the row groups hold.
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            yield from (text for text in batch.column(0).to_pylist() if text)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        _refuse(path, f"is no readable Parquet file ({error})", "an undamaged file", "copy it again", error)


def _check_text_size(path: Path, file: pq.ParquetFile, column: str) -> None:
    """Refuse, from the footer alone, a row group whose texts unpack to more than documents may hold."""
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        chunks = [group.column(index) for index in range(group.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
        if size > MAX_DOCUMENT_BYTES * max(1, group.num_rows):
            _refuse(path, f"unpacks to {size} bytes in {group.num_rows} rows", "shorter texts", "split them")


def _refuse(
    path: Path, found: str, expected: str, remedy: str, cause: BaseException | None = None
) -> NoReturn:
    raise CorpusError(
        f"{path.name} {found}",
        expected=expected,
        consequence="the corpus would be read only in part, or as garbage",
        remedy=remedy,
    ) from cause
