from __future__ import annotations

import hashlib

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dragoman.datagen import corpora
from dragoman.datagen.corpora import Document, corpus_fingerprint, load_corpus
from dragoman.errors import CorpusError


def texts(documents) -> list[str]:
    return [document.text for document in documents]


@pytest.fixture(scope="module")
def embedded() -> dict[str, list[Document]]:
    return {name: list(load_corpus(name)) for name in corpora.EMBEDDED_CORPORA}


def test_the_embedded_corpora_have_the_documents_they_announce(embedded):
    counts = {name: len(documents) for name, documents in embedded.items()}
    assert counts["wikipedia-sample"] == 106  # 206 pages, 100 of them redirects
    assert counts["news-sample"] == 293  # 300 articles, 7 of them there twice
    assert counts["python-docs"] > 300


def test_ids_of_documents_are_distinct_within_and_across_corpora(embedded):
    ids = [document.doc_id for documents in embedded.values() for document in documents]
    assert len(ids) == len(set(ids))


def test_wikipedia_prose_holds_no_markup(embedded):
    joined = "\n".join(texts(embedded["wikipedia-sample"]))
    assert len(joined) > 2_500_000
    for mark in ("{{", "}}", "[[", "]]", "'''", "<ref", "http", "|", "\x00", "==", "&nbsp;", "\n\n\n"):
        assert mark not in joined, mark


def test_no_paragraph_of_the_python_docs_stands_in_two_documents(embedded):
    paragraphs = [p for document in embedded["python-docs"] for p in document.text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
    assert not any(">>>" in p or "::=" in p for p in paragraphs)


def test_a_text_file_is_one_document_whose_id_follows_the_content_not_the_path(tmp_path):
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_bytes("\ufeffEine Zeile\r\nund noch eine".encode())
    (a,), (b,) = load_corpus(tmp_path / "a.txt"), load_corpus(tmp_path / "b.md")
    assert a == b
    assert a.text == "Eine Zeile\nund noch eine"
    assert a.doc_id == "file:" + hashlib.sha256(a.text.encode()).hexdigest()[:16]


def test_jsonl_and_parquet_rows_are_documents_without_blanks_and_repetitions(tmp_path):
    rows = ["one", "", "two", "one", "  ", "three"]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(orjson.dumps({"body": row}) for row in rows) + b"\n\n")
    pq.write_table(pa.table({"body": [*rows, None], "x": list(range(7))}), tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.parquet"):
        assert texts(load_corpus(tmp_path / name, text_column="body")) == ["one", "two", "three"]
        assert texts(load_corpus(tmp_path / name, text_column="body", limit=2)) == ["one", "two"]


def test_a_folder_is_read_recursively_in_the_order_of_names(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "z.txt").write_text("last")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "m.jsonl").write_text('{"text": "middle"}\n')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert texts(load_corpus(tmp_path)) == ["first", "middle", "last"]


def test_the_fingerprint_follows_the_content_only(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    before = corpus_fingerprint(tmp_path / "a.txt")
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert corpus_fingerprint(tmp_path / "b.txt") == before
    (tmp_path / "b.txt").write_text("second")
    assert corpus_fingerprint(tmp_path / "b.txt") != before


def refusal(path, **options) -> str:
    with pytest.raises(CorpusError) as caught:
        list(load_corpus(path, **options))
    return str(caught.value)


def test_an_unknown_corpus_is_refused_at_once_and_names_the_known_ones():
    with pytest.raises(CorpusError, match="wikipedia-sample, news-sample, python-docs"):
        load_corpus("wikipedia-simple")


def test_a_kind_of_file_that_is_no_corpus_is_refused(tmp_path):
    (tmp_path / "x.pdf").write_bytes(b"%PDF")
    assert "kind" in refusal(tmp_path / "x.pdf")


@pytest.mark.parametrize(
    ("name", "content"), [("e.txt", b" \n"), ("e.jsonl", b"\n"), ("e.jsonl", b'{"text": ""}')]
)
def test_an_empty_corpus_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert "no document" in refusal(tmp_path / name)


def test_an_empty_folder_is_refused(tmp_path):
    assert "no document" in refusal(tmp_path)


def test_invalid_utf8_names_byte_offset_and_line(tmp_path):
    (tmp_path / "l.txt").write_bytes("abcé".encode("latin-1"))
    assert "0xe9 at offset 3" in refusal(tmp_path / "l.txt")
    (tmp_path / "l.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    assert "0xff at offset 10 of line 2" in refusal(tmp_path / "l.jsonl")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "a list in line 1"),
        ("{", "no JSON in line 1"),
        ('{"a": 1, "b": 2}', "keys a, b"),
        ('{"text": 3}', "a int"),
    ],
)
def test_a_jsonl_line_without_text_is_refused_with_what_it_holds(tmp_path, line, said):
    (tmp_path / "d.jsonl").write_text(line)
    assert said in refusal(tmp_path / "d.jsonl")


def test_a_missing_or_wrong_parquet_column_is_refused_with_the_columns_there_are(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "d.parquet")
    assert "columns body, n" in refusal(tmp_path / "d.parquet")
    assert "int64" in refusal(tmp_path / "d.parquet", text_column="n")


@pytest.mark.parametrize("kept", [0, 4, 100, -10])
def test_a_truncated_parquet_file_is_refused(tmp_path, kept):
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": ["some words"] * 100}), path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "no readable Parquet" in refusal(path)


def test_oversized_documents_are_refused_before_they_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "d.txt").write_text("x" * 1001)
    assert "1001 bytes" in refusal(tmp_path / "d.txt")
    (tmp_path / "d.jsonl").write_text('{"text": "' + "x" * 1000 + '"}')
    assert "line 1" in refusal(tmp_path / "d.jsonl")
    pq.write_table(pa.table({"text": ["x" * 5000]}), tmp_path / "d.parquet", compression="zstd")
    assert "unpacks" in refusal(tmp_path / "d.parquet")
