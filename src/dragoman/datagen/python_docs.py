"""The `python-docs` corpus: prose of the interpreter's pydoc topics and of its standard library's docstrings.

Sources are parsed, never imported, so reading them runs nothing. The text depends on the Python version the
process runs on (3.11 and 3.12 word some topics differently) and on nothing else: not on the platform's
paths, not on what is installed.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests, tutorials' toys and vendored copies: no documentation in them.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
    | {"ensurepip", "config", "lib-dynload", "pydoc_data", "_vendor"}
)
_MAX_SOURCE_BYTES = 2 << 20
_MIN_WORDS = 8


def read_python_docs() -> Iterator[tuple[str, str]]:
    """Pairs of (`topic/NAME` or `module/NAME`, prose), topics first, each group in the order of names.

    A paragraph that an earlier document holds already is left out: pydoc topics include one another, and a
    repeated paragraph would cross the split between documents.
    """
    seen: set[str] = set()
    for name, text in (*_topics(), *_modules()):
        fresh = [paragraph for paragraph in _prose_paragraphs(text) if not _is_known(paragraph, seen)]
        if fresh:
            yield name, "\n\n".join(fresh)


def _is_known(paragraph: str, seen: set[str]) -> bool:
    if paragraph in seen:
        return True
    seen.add(paragraph)
    return False


def _topics() -> Iterator[tuple[str, str]]:
    # Debian and others split this off; a Python without it still has its docstrings.
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(topics):
        yield f"topic/{name}", topics[name]


def _modules() -> Iterator[tuple[str, str]]:
    """One document a module: its docstring and those of its public classes and functions, in source order."""
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).parts):
        parts = source.relative_to(library).with_suffix("").parts
        skipped = any(part in _SKIPPED_FOLDERS or part.startswith("config-") for part in parts)
        if skipped or source.stat().st_size > _MAX_SOURCE_BYTES:
            continue
        docstrings = list(_docstrings(source))
        if docstrings:
            yield f"module/{'.'.join(parts)}", "\n\n".join(docstrings)


def _docstrings(source: Path) -> Iterator[str]:
    if (tree := _parsed(source)) is not None:
        if text := ast.get_docstring(tree):
            yield text
        yield from _public_docstrings(tree.body)


def _public_docstrings(statements: list[ast.stmt]) -> Iterator[str]:
    """Docstrings of public functions and classes, of a class before those of its methods."""
    for node in statements:
        if isinstance(node, ast.If | ast.Try):
            # Definitions for one platform or with a fallback; expressions need no visit.
            yield from _public_docstrings([*node.body, *node.orelse])
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_"):
                continue
            if text := ast.get_docstring(node):
                yield text
            if isinstance(node, ast.ClassDef):
                yield from _public_docstrings(node.body)


def _parsed(source: Path) -> ast.Module | None:
    """None for the few files that are no UTF-8 or that this version cannot parse (test data, templates)."""
    try:
        return ast.parse(source.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return None


# --- prose ----------------------------------------------------------------------------------------------

_UNDERLINE = re.compile(r"^\s*([=*\-~^#\"'+.])\1{2,}\s*$")
_CODE_MARK = re.compile(
    r">>>|::=|^\s*\.\.\s+\w+::|\w\(.*\) ->|^\s*[|+][-|=]|^\s*(?:def|class|import|from) \w"
)
_LIST_MARK = re.compile(r"^\s*(?:[*\-+•]|\d{1,2}[.)])\s+")


def _prose_paragraphs(text: str) -> Iterator[str]:
    """Paragraphs that read as sentences, each on one line; code, grammar, tables and headings go."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        for piece in _split_list(block.split("\n")):
            if any(_UNDERLINE.match(line) or _CODE_MARK.search(line) for line in piece):
                continue
            paragraph = re.sub(r"\s+", " ", _LIST_MARK.sub("", " ".join(piece))).strip()
            if _reads_as_prose(paragraph):
                yield paragraph


def _split_list(lines: list[str]) -> Iterator[list[str]]:
    """List items apart from one another, everything else as it stands."""
    piece: list[str] = []
    for line in lines:
        if piece and _LIST_MARK.match(line):
            yield piece
            piece = []
        piece.append(line)
    yield piece


def _reads_as_prose(paragraph: str) -> bool:
    if len(paragraph.split()) < _MIN_WORDS or not re.search(r"[.!?:;)\"”]$", paragraph):
        return False
    letters = sum(character.isalpha() for character in paragraph)
    visible = sum(not character.isspace() for character in paragraph)
    # Code has more signs than sentences have, and starts assignments and calls.
    return letters >= 0.8 * visible and not re.match(r"^[\w.]+\s*(?:=|\()", paragraph)
