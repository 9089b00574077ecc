from __future__ import annotations

import bz2
import time

import pytest

from dragoman.datagen.wiki_dump import read_dump
from dragoman.datagen.wiki_text import is_redirect, plain_text
from dragoman.errors import CorpusError

SENTENCE = "The river rises in the northern hills and reaches the sea after a long and winding course."


PAGE = """{{Infobox river|name=X|image=[[File:a.jpg]]|text={{nested|{{deep}}}}}}
[[File:River.jpg|thumb|The [[river]] at {{convert|3|km|mi}} from its [[source (river)|source]]]]
{| class="wikitable"
|-
! a || b
|-
| 1 || {| inner
| 2
|}
|}
'''The river''' rises in the [[Northern Hills|northern hills]]<ref name="a/b">{{cite|x}}</ref> and<ref />
is {{convert|120|km|mi}} long, see [http://example.org/p its page]<!-- no -->, at a&nbsp;{{lang|fr|moulin}}.
"""


def test_links_templates_references_tables_and_files_leave_only_what_a_page_shows():
    assert plain_text(PAGE) == (
        "The river rises in the northern hills and is 120 km long, see its page, at a moulin."
    )


def test_headings_stay_as_lines_only_above_prose_and_sections_of_links_go_with_their_subsections():
    markup = (
        f"{SENTENCE}\n== Course ==\n=== Upper ===\n{SENTENCE[:-1]} again.\n== Empty ==\n"
        f"== References ==\n{SENTENCE}\n=== Books ===\n{SENTENCE}\n== Fauna ==\n{SENTENCE[:-1]} too."
    )
    assert plain_text(markup).split("\n\n") == [
        SENTENCE, "Course", "Upper", SENTENCE[:-1] + " again.", "Fauna", SENTENCE[:-1] + " too.",
    ]  # fmt: skip


def test_holes_of_removed_markup_are_closed():
    life = "({{IPAc-en|x}}; {{lang-fr|}}, 10 December 1815 – 1852)"
    markup = f"'''Ada Lovelace''' {life} was a writer {{{{a}}}}, they say ()."
    assert plain_text(markup) == "Ada Lovelace (10 December 1815 – 1852) was a writer, they say."


def test_short_list_items_table_rows_and_formula_lines_are_no_prose():
    formulas = "<math>a</math> equals <math>b</math> where things are as they are."
    markup = f"* [[One]]\n* two three\n| cell || cell\n\n{formulas}\n\n{SENTENCE}"
    assert plain_text(markup) == SENTENCE


@pytest.mark.parametrize(
    "page",
    [
        "<ref>",
        "{{",
        "[[",
        "<!--",
        "{|\n",
        "[//a",
        "a" * 50,
        "[//",
        "<math>",
        "= ",
        "<pre>",
        "(;,",
        "'''''",
        "( ;",
    ],
)
def test_a_page_of_unclosed_marks_takes_linear_time(page: str):
    start = time.perf_counter()
    plain_text(page * (400_000 // len(page)))
    assert time.perf_counter() - start < 10


def test_redirects_are_recognised():
    assert is_redirect(" #REDIRECT [[X]]") and is_redirect("#redirect [[x]]")
    assert not is_redirect("A redirect is")


def dump(pages: str, head: str = "") -> bytes:
    return f'<?xml version="1.0" encoding="utf-8"?>{head}<mediawiki>{pages}</mediawiki>'.encode()


def page(title: str, text: str, ns: int = 0) -> str:
    return f"<page><title>{title}</title><ns>{ns}</ns><revision><text>{text}</text></revision></page>"


def test_a_dump_gives_its_pages_in_order_whether_packed_or_not(tmp_path):
    data = dump(page("A", "x &amp; y &lt;ref&gt;") + page("B", "z", ns=4))
    plain, packed = tmp_path / "d.xml", tmp_path / "d.xml.bz2"
    plain.write_bytes(data)
    packed.write_bytes(bz2.compress(data))
    expected = [("A", "0", "x & y <ref>"), ("B", "4", "z")]
    for path in (plain, packed):
        assert [(p.title, p.namespace, p.markup) for p in read_dump(path)] == expected


def test_an_entity_bomb_is_refused_before_it_expands(tmp_path):
    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 12))
    path = tmp_path / "bomb.xml"
    path.write_bytes(dump(page("A", "&e11;"), f'<!DOCTYPE m [<!ENTITY e0 "aaaaaaaaaa">{entities}]>'))
    with pytest.raises(CorpusError, match="document type"):
        list(read_dump(path))


def test_a_bz2_bomb_stops_at_the_bound(tmp_path):
    path = tmp_path / "bomb.xml.bz2"
    path.write_bytes(bz2.compress(dump(page("A", " " * (16 << 20)))))
    assert path.stat().st_size < 10_000
    with pytest.raises(CorpusError, match="more than"):
        list(read_dump(path, max_bytes=4 << 20))
    with pytest.raises(CorpusError, match="page of more than"):
        list(read_dump(path))


@pytest.mark.parametrize("cut", [10, 60, -5])
def test_a_truncated_dump_is_refused_packed_or_not(tmp_path, cut: int):
    data = dump(page("A", "text"))
    plain, packed = tmp_path / "d.xml", tmp_path / "d.xml.bz2"
    plain.write_bytes(data[:cut])
    packed.write_bytes(bz2.compress(data)[:cut])
    for path in (plain, packed):
        with pytest.raises(CorpusError, match=path.name):
            list(read_dump(path))
