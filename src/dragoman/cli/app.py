"""`dragoman`: the application, its verbs, and how an error becomes a paragraph and an exit code.

Exit codes: 0 fine, 1 a finding or a failed verification, 2 a user's error, 130 interrupted,
141 the reader of our output went away. An exception that is none of these is our own bug and keeps
its traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from importlib import import_module
from typing import Annotated, Any, TextIO

import typer
from rich.text import Text
from typer.core import TyperGroup

from dragoman.cli.common import DEBUG_KEY, err_console, visible_text
from dragoman.errors import DragomanError, DragomanWarning, ResourceError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

VERBS = ("explain", "evaluate", "init", "train", "subjects")


class DragomanGroup(TyperGroup):
    """Maps what a verb raises to an exit code, the same way in a shell and in a test runner."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; errors of the user become one paragraph on standard error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except (DragomanError, OSError, MemoryError, RuntimeError) as error:
            told = _as_user_error(error)
            if told is None:
                raise
            if ctx.meta.get(DEBUG_KEY):
                traceback.print_exc()
            show_error(told)
            raise typer.Exit(EXIT_USER_ERROR) from None


def _as_user_error(error: BaseException) -> DragomanError | None:
    """The user-facing form of an error, or None where it is our own bug."""
    if isinstance(error, DragomanError):
        return error
    # torch.OutOfMemoryError by name: importing torch to ask would cost seconds in verbs without it.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ResourceError(
            "the machine ran out of memory",
            expected="enough memory for the model and one batch",
            consequence="the work would stop half way",
            remedy="use a smaller batch or a smaller model, or --device cpu",
        )
    if isinstance(error, OSError) and error.errno is not None:
        place = f" ({error.filename})" if error.filename else ""
        return ResourceError(
            f"the system refused: {error.strerror}{place}",
            expected="a file or folder that can be read and written",
            consequence="the result would be missing or incomplete; nothing was left under its final name",
            remedy="check the path, its permissions and the free space",
        )
    return None


def show_error(error: DragomanError) -> None:
    """Print an error as one paragraph on standard error, its text made harmless."""
    console = err_console()
    paragraph = Text.assemble(("error: ", "bold red"), visible_text(str(error)))
    console.print(paragraph, soft_wrap=not console.is_terminal)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, DragomanWarning):
        text = Text.assemble(("warning: ", "bold yellow"), visible_text(str(message)))
        err_console().print(text, soft_wrap=True)


def _flush_standard_output() -> bool:
    """Flush; False where the reader has gone, after which nothing more is written to it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes at exit too and would complain about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dragoman {version('dragoman')}")
        raise typer.Exit


app = typer.Typer(
    name="dragoman",
    cls=DragomanGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Read a language model's hidden states in plain words, and prove the reading.",
)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and stop."),
    ] = False,
) -> None:
    """Read a language model's hidden states in plain words, and prove the reading."""


def _register_verbs() -> None:
    for verb in VERBS:
        import_module(f"dragoman.cli.{verb}").register(app)


_register_verbs()


def _quiet_libraries() -> None:
    """Keep model libraries from drawing their own bars and advice into our output."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The GGUF reader of transformers draws a bar of its own; ours already tells what is going on.
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.showwarning = _show_warning


def main() -> None:
    """Entry point of the `dragoman` command."""
    _quiet_libraries()
    try:
        app()
    except SystemExit as stop:
        sys.exit(stop.code if _flush_standard_output() else EXIT_BROKEN_PIPE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
