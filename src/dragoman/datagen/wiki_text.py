"""Wiki markup to plain prose.

What a reader of the page would not read as running text goes: templates (apart from a few that only
decorate words), tables, references, files, formulas, categories, sections of links. Headings stay as lines
of their own. Markup as described by MediaWiki's Help:Formatting.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

_MAX_NESTING = 50

# --- markup ---------------------------------------------------------------------------------------------

# None of these looks past the next opening mark: unclosed ones by the thousand still take linear time.
_COMMENT = re.compile(r"<!--(?:(?!<!--).)*?-->", re.DOTALL)
_REF_EMPTY = re.compile(r"<ref\b[^>]*?/>", re.IGNORECASE)
_REF = re.compile(r"<ref\b[^>]*>(?:(?!<ref\b).)*?</ref\s*>", re.IGNORECASE | re.DOTALL)
_OPAQUE = re.compile(
    r"<(gallery|timeline|source|syntaxhighlight|pre|code|score|imagemap|references|chem)\b[^>]*>(?:(?!<\1\b).)*?</\1\s*>",
    re.IGNORECASE | re.DOTALL,
)
_FORMULA = re.compile(r"<math\b[^>]*>(?:(?!<math\b).)*?</math\s*>", re.IGNORECASE | re.DOTALL)
_BREAK = re.compile(r"<(br|hr|p|/p|/?blockquote|/?poem)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,400}>")
_EXTERNAL_LINK = re.compile(r"\[(?:[a-z]{2,10}:)?//[^\s\[\]]+(?:\s([^\[\]]*))?\]", re.IGNORECASE)
_MAIL_LINK = re.compile(r"\[mailto:[^\s\[\]]+(?:\s([^\[\]]*))?\]", re.IGNORECASE)
_BARE_URL = re.compile(r"\bhttps?://\S+")
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
_TABLE = re.compile(r"^[ :]*\{\|(?:(?!^[ :]*\{\|).)*?^\s*\|\}", re.DOTALL | re.MULTILINE)
_QUOTES = re.compile(r"'{2,5}")
_MAGIC_WORD = re.compile(r"__[A-Z]{3,30}__")
_NAMESPACE = re.compile(
    r"^\s*(file|image|media|category|template|wikipedia|help|portal|special|[a-z]{2,3}(-[a-z]+)?)\s*:",
    re.IGNORECASE,
)
_FORMULA_MARK = "\x00"

_WORD_TEMPLATES = {
    # Last or first positional argument is what the page shows; everything else about them is decoration.
    "lang": -1, "nowrap": 0, "small": 0, "smaller": 0, "big": 0, "larger": 0, "sc": 0, "smallcaps": 0,
    "abbr": 0, "quote": 0, "cquote": 0, "quotation": 0, "blockquote": 0, "bquote": 0, "nobold": 0,
    "translit": -1, "transl": -1, "transliteration": -1, "em": 0, "visible anchor": 0, "vanchor": 0,
    "mvar": 0, "math": 0, "nihongo": 0, "sub": 0, "sup": 0, "ship": 1, "uss": 0, "hms": 0, "as of": 0,
    "formatnum": 0, "val": 0, "nobr": 0, "j": 0, "linktext": 0, "ill": 0, "interlanguage link": 0,
    "ill2": 1, "zh": -1, "angbr": 0, "keypress": 0, "circa": 0, "c.": 0,
}  # fmt: skip
_SIGN_TEMPLATES = {
    "ndash": "–", "mdash": "—", "spaced ndash": " – ", "snd": " – ", "spnd": " – ", "endash": "–",
    "emdash": "—", "spaced en dash": " – ", "nbsp": " ", "space": " ", "thinsp": " ", "'": "'", "'s": "'s",
    "!": "|", "=": "=", "·": "·", "•": "·", "dot": "·", "bullet": "·", "minus": "−", "times": "×",
    "frac": "", "pi": "π", "degree": "°", "number sign": "#", "ad": "AD", "bc": "BC",
}  # fmt: skip

_LINK_SECTION_TITLES = (
    "references|external links|see also|notes|further reading|bibliography|sources|footnotes|citations|"
    "works cited|notes and references|references and notes|references and sources|notes and citations|"
    "general references|inline citations|gallery|published works|selected bibliography|"
    "filmography|discography|publications|selected publications|works|external media|primary sources|"
    "secondary sources|historiography and memory|awards and nominations|selected works"
)
_LINK_SECTIONS = frozenset(_LINK_SECTION_TITLES.split("|"))


def plain_text(markup: str) -> str:
    """The prose of a wiki page: paragraphs and headings, each a block, blocks apart by one empty line.

    Args:
        markup: wikitext after XML entities were resolved.

    Returns:
        Text without markup; empty when the page holds no prose (a redirect, a table, a list of links).
    """
    text = _without_opaque_parts(markup)
    text = _resolve_links(text)
    text = _resolve_templates(text)
    text = _TABLE.sub("", _TABLE.sub("", text))
    text = _QUOTES.sub("", _MAGIC_WORD.sub("", text))
    text = _TAG.sub("", _BREAK.sub("\n", text))
    text = _BARE_URL.sub("", html.unescape(text).replace("\xa0", " "))
    return "\n\n".join(_blocks(text))


def is_redirect(markup: str) -> bool:
    """Whether the page only points to another one."""
    return markup.lstrip()[:9].lower() == "#redirect"


def _without_opaque_parts(text: str) -> str:
    text = text.replace(_FORMULA_MARK, "")
    text = _COMMENT.sub("", text)
    text = _REF.sub("", _REF_EMPTY.sub("", text))
    text = _FORMULA.sub(_FORMULA_MARK, text)
    return _OPAQUE.sub("", text)


def _resolve_links(text: str) -> str:
    """Links become what they show; files, categories and other languages go, innermost link first."""
    text = _EXTERNAL_LINK.sub(lambda match: (match[1] or "").strip(), text)
    text = _MAIL_LINK.sub(lambda match: (match[1] or "").strip(), text)
    for _ in range(_MAX_NESTING):
        text, changed = _LINK.subn(_shown_link, text)
        if not changed:
            break
    return text.replace("[[", "").replace("]]", "")


def _shown_link(match: re.Match[str]) -> str:
    target, _, label = match[1].partition("|")
    if _NAMESPACE.match(target):
        return ""
    shown = label.rsplit("|", 1)[-1] if label else target.lstrip(":").partition("#")[0]
    # A pipe would be read as the next argument of a template around the link.
    return shown.replace("|", " ").strip()


def _resolve_templates(text: str) -> str:
    for _ in range(_MAX_NESTING):
        text, changed = _TEMPLATE.subn(_shown_template, text)
        if not changed:
            break
    # Unbalanced braces of a broken page: drop the marks, the line filter judges what is left.
    return re.sub(r"\{\{|\}\}", "", text)


def _shown_template(match: re.Match[str]) -> str:
    name, *arguments = match[1].split("|")
    name = name.strip().lower().replace("_", " ")
    positional = [part.strip() for part in arguments if not re.match(r"\s*[\w -]{1,30}=", part)]
    named = [part.partition("=")[2].strip() for part in arguments if re.match(r"\s*(text|quote|1)\s*=", part)]
    if name in {"convert", "cvt"}:
        return _converted(positional)
    if name in _SIGN_TEMPLATES:
        return _SIGN_TEMPLATES[name] if not (name == "frac" and positional) else "/".join(positional)
    if name in {"circa", "c."}:
        return "c. " + (positional[0] if positional else "")
    place = -1 if name.startswith("lang-") else _WORD_TEMPLATES.get(name)
    shown = positional or named
    if place is None or not shown:
        return ""
    return shown[place] if place < len(shown) else shown[-1]


def _converted(positional: list[str]) -> str:
    """`{{convert|10|km|mi}}` shows its first quantity; `{{convert|1|to|3|km}}` a range."""
    if len(positional) >= 4 and positional[1] in {"-", "–", "to", "and", "by", "x", "or", "to(-)"}:
        return f"{positional[0]} {positional[1]} {positional[2]} {positional[3]}"
    return " ".join(positional[:2])


# --- lines ----------------------------------------------------------------------------------------------

_LIST_MARK = re.compile(r"^[*#:;]+\s*")
_MIN_LIST_WORDS = 12
_MIN_PARAGRAPH_WORDS = 8


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs with prose, and the headings that stand above at least one of them."""
    pending: list[tuple[int, str]] = []
    skipped_level = 0
    for line in _joined_lines(text):
        if heading := _heading(line):
            level, title = heading
            if skipped_level and level > skipped_level:
                continue
            skipped_level = level if title.lower() in _LINK_SECTIONS else 0
            pending = [(above, name) for above, name in pending if above < level]
            if not skipped_level and title:
                pending.append((level, title))
            continue
        if skipped_level or not (paragraph := _prose_line(line)):
            continue
        yield from (name for _, name in pending)
        pending = []
        yield paragraph


def _joined_lines(text: str) -> Iterator[str]:
    """Stripped lines; those that only wrap a paragraph are joined, as the wiki shows them."""
    wrapped: list[str] = []
    for line in (*text.split("\n"), ""):
        stripped = line.strip()
        if stripped and stripped[0] not in "=*#:;|!{}":
            wrapped.append(stripped)
            continue
        if wrapped:
            yield " ".join(wrapped)
            wrapped = []
        if stripped:
            yield stripped


def _heading(line: str) -> tuple[int, str] | None:
    """(level, title) of `== title ==`."""
    inner = line.strip("=")
    level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6)
    return (level, _tidy(inner)) if level and inner else None


def _prose_line(line: str) -> str | None:
    """The line without its list mark, or None where it is a table row, a stub, a formula or a caption."""
    if line[0] in "|!{}":
        return None
    listed = bool(_LIST_MARK.match(line))
    # A sentence about formulas without its formulas is no sentence; a pipe is left by broken markup only.
    if line.count(_FORMULA_MARK) > 1 or "|" in line:
        return None
    stripped = _tidy(_LIST_MARK.sub("", line))
    words = stripped.split()
    if len(words) < (_MIN_LIST_WORDS if listed else _MIN_PARAGRAPH_WORDS):
        return None
    letters = sum(character.isalpha() for character in stripped)
    if letters < 0.7 * sum(not character.isspace() for character in stripped):
        return None
    return stripped if listed or re.search(r"[.!?:][\"'”’)]*$|[.!?] ", stripped) else None


def _tidy(line: str) -> str:
    """Close the holes that removed markup leaves: `( ; 12 May)`, `word , word`, `()`."""
    line = line.replace(_FORMULA_MARK, "")
    line = re.sub(r"[ \t]+", " ", line)
    line = re.sub(r"\(\s*(?:(?:or|and|:|pronounced|IPA)?\s*[;,:/]\s*)+", "(", line)
    line = re.sub(r"[;,:]\s*\)", ")", line)
    for _ in range(2):
        line = re.sub(r"\(\s*(?:pronounced|listen|help|info|[;,/–-])?\s*\)|\[\s*\]", "", line)
    line = re.sub(r"\s+([,.;:!?)])", r"\1", line)
    line = re.sub(r"\(\s+", "(", line)
    line = re.sub(r"([,;])(?:\s*[,;])+", r"\1", line)
    return re.sub(r" {2,}", " ", line).strip()
