from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dragoman.cli.html import (
    COLOURS,
    EDGES,
    FLAG_MEANINGS,
    Page,
    PageToken,
    ScoreFacts,
    colour_class,
    render_page,
)

HOSTILE = [
    "<script>window.hit=1</script>",
    "</style><img src=x onerror=window.hit=1>",
    "</script><script>window.hit=1</script>",
    '" onmouseover="window.hit=1" x="',
    "' autofocus onfocus='window.hit=1",
    "<!-- <script>",
    "]]>",
    "{{7*7}}",
    "javascript:window.hit=1",
    "\u2028window.hit=1\u2029",
    "\u202egnp.exe\u202c",
    "\x1b[31mred\x00",
    "&lt;b&gt;",
]


def _row(position: int, text: str, **changes) -> dict:
    row = {
        "position": position, "token": text, "token_id": position, "norm": 231.4, "truncated": False,
        "explanation": f"about {text}", "cosine": 0.61, "mse": 0.78, "fve": 0.21, "flags": [],
    }  # fmt: skip
    return row | changes


def _page(texts: list[str], **changes) -> Page:
    rows = [_row(index, text) for index, text in enumerate(texts)]
    tokens = [PageToken(text, index) for index, text in enumerate(texts)]
    fields = {
        "title": "T", "lede": "L", "rows": rows, "tokens": tokens, "provenance": {},
        "score": ScoreFacts(512, 0.05, -0.4),
    }  # fmt: skip
    return Page(**(fields | changes))


class _Tree(HTMLParser):
    """Tags, attributes and text of a page as a browser's tokenizer would see them."""

    VOID = frozenset({"meta", "link", "input", "rect", "line", "img"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]].append(data)
        else:
            self.text.append(data)


def test_hostile_text_adds_no_tag_and_no_attribute_anywhere_on_the_page():
    plain = ["word"] * len(HOSTILE)
    places = {"title": "title", "lede": "lede", "provenance": {"a": "b", "nested": {"c": "d"}}}
    hostile_places = {
        "title": "".join(HOSTILE), "lede": "".join(HOSTILE),
        "provenance": {HOSTILE[0]: HOSTILE[1], "nested": {HOSTILE[2]: HOSTILE[3]}},
    }  # fmt: skip
    hostile_rows = [_row(i, text, flags=[text]) for i, text in enumerate(HOSTILE)]
    plain_rows = [_row(i, text, flags=["flag"]) for i, text in enumerate(plain)]
    expected = _Tree(render_page(_page(plain, rows=plain_rows, **places)))
    found = _Tree(render_page(_page(HOSTILE, rows=hostile_rows, **hostile_places)))
    assert [(tag, sorted(attributes)) for tag, attributes in found.tags] == [
        (tag, sorted(attributes)) for tag, attributes in expected.tags
    ]
    assert found.raw == expected.raw
    assert found.open == []


def test_text_arrives_readable_with_hazards_replaced_by_visible_stand_ins():
    html = render_page(_page(HOSTILE))
    shown = "".join(_Tree(html).text)
    assert "<script>window.hit=1</script>" in shown and "&lt;b&gt;" in shown
    assert "⟨U+202E⟩gnp.exe⟨U+202C⟩" in shown and "␛[31mred␀" in shown
    assert not {"\u2028", "\u2029", "\u202e", "\x1b", "\x00"} & set(html)


def test_the_policy_admits_exactly_the_pages_own_script_and_style_by_hash_and_no_request():
    html = render_page(_page(["a"]))
    tree = _Tree(html)
    policy = next(a["content"] for t, a in tree.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    script = re.search(r"<script>(.*?)</script>", html, re.S)
    style = re.search(r"<style>(.*?)</style>", html, re.S)
    assert script and style
    assert policy.split("; ") == [
        "default-src 'none'", f"style-src {hashed(style[1])}", f"script-src {hashed(script[1])}",
        "img-src data:", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip
    assert not re.search(r"(?:https?:)?//[a-z]|@import|url\(", re.sub(r"//.*", "", style[1]))
    for tag, attributes in tree.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)


@pytest.mark.parametrize(
    ("fve", "colour"),
    [
        (-9.0, "n2"),
        (-0.25, "n1"),
        (-1e-9, "n1"),
        (0.0, "p0"),
        (0.1, "p1"),
        (0.5, "p4"),
        (0.6, "p5"),
        (1.0, "p5"),
    ],
)
def test_colour_classes_are_half_open_and_fixed(fve, colour):
    assert colour_class(fve) == colour


def test_a_missing_or_nan_score_has_no_colour_and_an_empty_cell():
    html = render_page(_page(["a", "b"], rows=[_row(0, "a", fve=None), _row(1, "b", fve=float("nan"))]))
    assert colour_class(None) == colour_class(float("nan")) == ""
    assert html.count('data-key="fve" data-label="FVE" data-value=""></td>') == 2
    assert "nan" not in _Tree(html).text


def test_the_legend_says_what_the_score_is_compared_with_and_counts_every_reading():
    scores = [-0.4, -0.1, 0.05, 0.05, 0.5, 0.9]
    rows = [_row(i, "x", fve=f) for i, f in enumerate(scores)]
    html = render_page(_page(["x"] * 6, rows=rows))
    words = "".join(_Tree(html).text)
    assert "mean of 512 vectors" in words
    assert "words of another vector score −0.40" in words and "below 0.05 (dotted line)" in words
    counts = [int(n) for n in re.findall(r'class="count"[^>]*>(\d+)<', html)]
    assert counts == [1, 1, 2, 1, 1]
    assert len(COLOURS) == len(EDGES) + 1


def test_unknown_baseline_figures_are_left_out_rather_than_invented():
    words = "".join(_Tree(render_page(_page(["x"], score=ScoreFacts()))).text)
    assert "the mean vector" in words
    assert "another vector score" not in words and "flagged low-score" not in words


def test_every_token_links_to_its_row_and_unread_tokens_do_not():
    tokens = [PageToken("<|im_start|>", None, special=True), PageToken("Hi", 0), PageToken(" unread", None)]
    tree = _Tree(render_page(_page([], rows=[_row(1, "Hi")], tokens=tokens)))
    assert [a["href"] for t, a in tree.tags if t == "a"] == ["#r0"]
    assert [a["id"] for t, a in tree.tags if t == "tr" and "id" in a] == ["r0"]
    assert "<|im_start|>" in tree.text and " unread" in tree.text


def test_newlines_of_the_text_still_break_lines_and_are_marked():
    html = render_page(_page(["end.\n\n"]))
    assert 'end.<i class="nl">⏎</i>\n<i class="nl">⏎</i>\n</a>' in html


def test_vectors_without_a_text_show_rows_only():
    rows = [_row(0, "x") | {"position": None, "token": None, "row": 7}]
    html = render_page(_page([], rows=rows, tokens=()))
    tree = _Tree(html)
    assert "main" not in [t for t, _ in tree.tags]
    assert ">row</button>" in html and ">7</td>" in html and ">token</button>" not in html


def test_truncated_readings_carry_the_flag_and_every_flag_has_a_meaning():
    html = render_page(_page(["x"], rows=[_row(0, "x", truncated=True, flags=["cjk", "low-score"])]))
    assert "<span>cjk</span>, <span>low-score</span>, <span>truncated</span>" in html
    meanings = json.loads(re.search(r'id="meanings">(.*?)</script>', html).group(1))
    assert meanings == dict(FLAG_MEANINGS)
    assert set(meanings) >= {"early-position", "outlier-norm", "cjk", "low-score", "truncated"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium: apt-get install chromium")
def test_in_a_browser_tokens_open_rows_sort_filter_works_and_nothing_hostile_runs(tmp_path: Path):
    rows = [_row(i, text, fve=0.1 * (i % 7) - 0.2, norm=100.0 + i) for i, text in enumerate(HOSTILE)]
    page = render_page(_page(HOSTILE, rows=rows))
    probe = """
    const out = {hit: typeof window.hit};
    const tokens = [...document.querySelectorAll('a.t')];
    tokens[0].focus();
    tokens[0].dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
    out.words = document.querySelector('.words').textContent;
    out.tabStops = tokens.filter(t => t.tabIndex === 0).length;
    const sort = [...document.querySelectorAll('th button')].find(b => b.textContent === 'FVE');
    sort.click(); sort.click();
    out.values = [...document.querySelectorAll('td[data-key=fve]')].map(c => Number(c.dataset.value));
    out.aria = sort.parentElement.getAttribute('aria-sort');
    const box = document.querySelector('.filter input');
    box.value = 'gnp'; box.dispatchEvent(new Event('input'));
    out.visible = [...document.querySelectorAll('tbody tr')].filter(r => !r.hidden).length;
    document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));
    out.closed = document.querySelector('.reader').classList.contains('empty');
    document.body.replaceChildren(JSON.stringify(out));
    """
    # The probe is admitted the way the page admits its own script: by hash.
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src 'sha256-{digest}' ")
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", f"<script>{probe}</script></body>"), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [*command, profile, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120
    )
    body = re.search(r"<body[^>]*>(.*)</body>", done.stdout, re.S)
    assert body, done.stderr[-2000:]
    out = json.loads("".join(_Tree(body[1]).text))
    assert out["hit"] == "undefined"
    assert out["words"].startswith("about </style><img")
    assert out["tabStops"] == 1
    assert out["values"] == sorted(out["values"], reverse=True) and out["aria"] == "descending"
    assert out["visible"] == 1
    assert out["closed"] is True
