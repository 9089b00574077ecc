"""The pages say what the code does: reference, pages, links, commands, keys, and no place left to fill."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from dragoman.cli.app import app
from dragoman.cli.budget import FRACTIONS
from dragoman.cli.reference import CommandHelp, command_helps, reference_page
from dragoman.datagen.config import CorpusSpec, DataConfig
from dragoman.evaluation.figures import FIGURE_NAMES
from dragoman.nla.reading import COLUMNS
from dragoman.training.config import PairConfig, PromptConfig, RefitConfig, StageConfig
from dragoman.training.stages import REQUIRED_SPLITS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "LOG.md"]
PAGES += sorted(DOCS.glob("*.md"))
PAGES += sorted((ROOT / "src" / "dragoman" / "zoo").glob("*/*.md"))

HELPS = command_helps()
COMMANDS = [command for command in HELPS if not command.is_group]


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def command_name(command: CommandHelp) -> str:
    return command.path


# ---------------------------------------------------------------- reading Markdown

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    for match in _FENCE.finditer(text):
        yield match.group(1), match.group(2)


def prose(text: str) -> str:
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def shell_lines(text: str) -> Iterator[list[str]]:
    """Commands in `sh` blocks, comments dropped, and in the examples of help texts."""
    for language, block in code_blocks(text):
        if language in ("sh", "bash", "console"):
            for line in block.splitlines():
                if words := shlex.split(line.removeprefix("$ "), comments=True):
                    yield words


# ---------------------------------------------------------------- nothing left to fill, nothing broken


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_no_page_has_a_place_left_to_fill(path: Path) -> None:
    assert "@@FILL" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_every_link_inside_the_repository_resolves(path: Path) -> None:
    broken = []
    for target in _LINK.findall(prose(path.read_text(encoding="utf-8"))):
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        linked = (path.parent / file).resolve() if file else path
        exists = linked.exists() and linked.is_relative_to(ROOT)
        if not exists or (anchor and anchor not in anchors(linked.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []


def test_anchors_are_made_as_github_makes_them() -> None:
    assert anchors("# What a score means\n## `data`\n## PyTorch, without CUDA!\n") == {
        "what-a-score-means",
        "data",
        "pytorch-without-cuda",
    }


# ---------------------------------------------------------------- commands


def test_the_command_reference_is_up_to_date() -> None:
    written = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert written == reference_page(), "run `make docs`"


def test_the_reference_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = reference_page()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERMINAL_WIDTH", "40")
    assert reference_page() == wide


@pytest.mark.parametrize("command", HELPS, ids=command_name)
def test_every_command_and_option_has_help(command: CommandHelp) -> None:
    assert len(command.text.split()) >= 3
    bare = [
        name
        for name, meaning in (*command.arguments, *command.options)
        if not re.sub(r"\[.*?\]", "", meaning)
    ]
    assert bare == []


@pytest.mark.parametrize("command", COMMANDS, ids=command_name)
def test_every_command_has_an_example_that_is_a_command(command: CommandHelp) -> None:
    # An example stands in backticks, or at the end of its line.
    examples = re.findall(
        rf"`({command.path}\b[^`]*)`|({command.path}\b[^`\n]*)$", command.text, re.MULTILINE
    )
    lines = [first or second for first, second in examples]
    assert lines, f"the help of `{command.path}` has no example that starts with `{command.path}`"
    for line in lines:
        assert unknown_parts(shlex.split(line)) == [], line


@pytest.mark.parametrize("verb", sorted({command.path.split()[1] for command in COMMANDS}))
def test_every_verb_has_a_page_with_an_example_and_a_link_from_the_index(verb: str) -> None:
    page = (DOCS / f"{verb}.md").read_text(encoding="utf-8")
    assert any(words[:2] == ["dragoman", verb] for words in shell_lines(page))
    assert f"({verb}.md)" in (DOCS / "index.md").read_text(encoding="utf-8")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def unknown_parts(words: list[str]) -> list[str]:
    """Commands and options of a `dragoman` line that do not exist."""
    command = typer.main.get_command(app)
    path, rest = ["dragoman"], words[1:]
    while (children := getattr(command, "commands", {})) and rest and not rest[0].startswith("-"):
        if rest[0] not in children:
            return [" ".join([*path, rest[0]])]
        command = children[rest[0]]
        path.append(rest.pop(0))
    known = {
        spelling for parameter in command.params for spelling in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {"--help", "-h"}
    given = [word.split("=", 1)[0] for word in rest if re.match(r"--?[a-z]", word)]
    return [f"{' '.join(path)} {word}" for word in given if word not in known]


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_every_command_on_a_page_exists(path: Path) -> None:
    wrong = []
    for words in shell_lines(path.read_text(encoding="utf-8")):
        if words[0] == "dragoman":
            wrong += unknown_parts(words)
        elif words[0] == "make":
            goals = [word for word in words[1:] if "=" not in word]
            wrong += [f"make {goal}" for goal in goals if goal not in make_targets()]
        elif words[0] not in (".", "cd", "git", "pip", "pytest", "export"):
            wrong.append(" ".join(words))
    assert wrong == []


@pytest.mark.parametrize(
    "line", ["dragoman explian x", "dragoman explain --vector x.npy", "dragoman train paar c.yaml"]
)
def test_a_command_that_does_not_exist_would_be_noticed(line: str) -> None:
    assert unknown_parts(shlex.split(line))


def test_the_readme_starts_with_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    language, block = next(code_blocks(readme))
    assert language == "sh"
    assert [shlex.split(line, comments=True) for line in block.splitlines()] == [
        ["make", "demo"],
        ["make", "test"],
    ]
    assert readme.startswith("# Dragoman\n\n```sh\n")


# ---------------------------------------------------------------- Python on the pages


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_python_on_a_page_compiles_and_imports_what_exists(path: Path) -> None:
    for language, block in code_blocks(path.read_text(encoding="utf-8")):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dragoman"):
                module = importlib.import_module(node.module or "")
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


# ---------------------------------------------------------------- keys and names


@pytest.mark.parametrize(
    "config", [PairConfig, PromptConfig, StageConfig, RefitConfig, DataConfig, CorpusSpec]
)
def test_every_key_of_the_config_is_explained(config: type[PairConfig]) -> None:
    page = (DOCS / "train.md").read_text(encoding="utf-8")
    assert [name for name in config.model_fields if f"`{name}`" not in page] == []


def test_every_figure_of_the_evaluation_is_explained() -> None:
    page = (DOCS / "evaluate.md").read_text(encoding="utf-8")
    assert [name for name in FIGURE_NAMES if f"`{name}`" not in page] == []


def test_every_key_of_an_explained_row_is_explained() -> None:
    page = (DOCS / "explain.md").read_text(encoding="utf-8")
    assert [name for name in COLUMNS if f"`{name}`" not in page] == []


def test_default_and_proposed_shares_give_every_stage_its_documents() -> None:
    default = DataConfig(layer_index=0).fractions
    page = (DOCS / "train.md").read_text(encoding="utf-8")
    for shares in (default, FRACTIONS):
        assert {name for name, share in shares.items() if share > 0} >= set(REQUIRED_SPLITS)
    assert ", ".join(f"`{name}` {share:g}" for name, share in default.items()) in page
