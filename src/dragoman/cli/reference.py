"""The command reference `docs/cli.md`, written from the commands themselves.

`python -m dragoman.cli.reference docs/cli.md` (or `make docs`) writes the page; a test compares it
with what the commands say now, so the page cannot go stale.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dragoman.cli.app import app

# Wider than any line: what the page says must not depend on the terminal it was made in.
WIDTH = 10_000

HEADER = """\
# Command reference

Written by `make docs` from the commands' own help; edit the commands, not this page.
Exit codes: 0 fine, 1 a finding or a failed verification, 2 a user's error, 130 interrupted.
"""

# typer adds these to the top command; they are about the shell, not about dragoman.
_SHELL_OPTIONS = ("--install-completion", "--show-completion")


@dataclass(frozen=True)
class CommandHelp:
    """What one command says about itself.

    Attributes:
        path: the full command, for example `dragoman subjects fetch`.
        usage: one line, without the word "Usage".
        text: the help text with its examples, Markdown.
        arguments: (name, meaning) of each argument, in order.
        options: (spelling, meaning) of each visible option, in order.
        is_group: whether it only holds other commands.
    """

    path: str
    usage: str
    text: str
    arguments: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str], ...]
    is_group: bool


def command_helps() -> list[CommandHelp]:
    """Every visible command of the application, parents before children, siblings by name."""
    return list(_walk(typer.main.get_command(app), "dragoman", None))


def _walk(command: Any, name: str, parent: Any) -> Iterator[CommandHelp]:
    context = typer.Context(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
    )
    children: dict[str, Any] = getattr(command, "commands", {})
    yield _describe(command, context, is_group=bool(children))
    for child_name, child in sorted(children.items()):
        if not child.hidden:
            yield from _walk(child, child_name, context)


def _describe(command: Any, context: Any, *, is_group: bool) -> CommandHelp:
    arguments: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or any(spelling in _SHELL_OPTIONS for spelling in parameter.opts):
            continue
        entry = (record[0], record[1].strip())
        (arguments if parameter.param_type_name == "argument" else options).append(entry)
    parts = [part for part in (command.help, command.epilog) if part]
    return CommandHelp(
        path=context.command_path,
        usage=command.get_usage(context).removeprefix("Usage: ").strip(),
        text="\n\n".join(inspect.cleandoc(part) for part in parts),
        arguments=tuple(arguments),
        options=tuple(options),
        is_group=is_group,
    )


def reference_page() -> str:
    """The whole page as Markdown, ending in one newline."""
    return HEADER + "".join(_section(command) for command in command_helps())


def _section(command: CommandHelp) -> str:
    blocks = [f"## {command.path}", f"```text\n{command.usage}\n```", command.text]
    for title, entries in (("Arguments", command.arguments), ("Options", command.options)):
        if entries:
            blocks += [f"{title}:", "\n".join(_entry(name, meaning) for name, meaning in entries)]
    return "\n" + "\n\n".join(block for block in blocks if block) + "\n"


def _entry(name: str, meaning: str) -> str:
    return f"- `{name}`: {meaning}" if meaning else f"- `{name}`"


def main(arguments: list[str]) -> int:
    """Write the page to the one path given."""
    if len(arguments) != 1:
        typer.echo("usage: python -m dragoman.cli.reference docs/cli.md", err=True)
        return 2
    from dragoman.runs import atomic_write_text

    atomic_write_text(Path(arguments[0]), reference_page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
