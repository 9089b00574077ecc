"""What every verb shares: options, consoles, progress bars, JSON output, and safe display of foreign text.

Nothing here imports torch, so that `dragoman --help` answers at once.
"""

from __future__ import annotations

import errno
import sys
import time
import unicodedata
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from dragoman.errors import ConfigError, ResourceError, TextError

Progress = Callable[[int, int, str], None]
"""(done, total, unit); the same shape as dragoman.runs.Progress, named here to keep --help light."""

DEBUG_KEY = "dragoman.debug"
PLAIN_PROGRESS_SECONDS = 15.0


class Device(StrEnum):
    """Where the model runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


def _remember_debug(ctx: typer.Context, value: bool) -> bool:
    # The group that turns errors into a paragraph runs outside the verb and finds the wish here.
    ctx.meta[DEBUG_KEY] = value or ctx.meta.get(DEBUG_KEY, False)
    return value


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH|-",
        help="Write the result as JSON; - is standard output, which then carries nothing else.",
        rich_help_panel="Output",
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="PATH",
        help="Write one self-contained page that any browser opens, offline.",
        rich_help_panel="Output",
    ),
]
DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_remember_debug,
        help="Show the traceback of an error.",
        rich_help_panel="Output",
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="No progress bar, no remarks; results and errors only.",
        rich_help_panel="Output",
    ),
]
DeviceOption = Annotated[
    Device, typer.Option("--device", help="Where the model runs.", rich_help_panel="Model")
]


# ---------------------------------------------------------------- showing foreign text

_OVERRIDES = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
# Zero width and direction marks, line and paragraph separators, byte-order mark; the joiners that
# scripts and emoji need (U+200C, U+200D) stay.
_BIDI_AND_INVISIBLE = frozenset(
    (0x061C, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, 0x2060, 0xFEFF, *_OVERRIDES),
)


def _is_hazard(char: str) -> bool:
    code = ord(char)
    if code in _BIDI_AND_INVISIBLE or 0xE0000 <= code <= 0xE007F:
        return True
    # Cc: C0, DEL, C1 (8-bit CSI, OSC); Cs: lone surrogates, which no encoder accepts.
    return unicodedata.category(char) in ("Cc", "Cs")


def visible_text(text: str, *, keep_newlines: bool = False) -> str:
    """Replace what could steer a terminal or reorder a line by a visible stand-in.

    ESC becomes ␛, newline ⏎, a bidi override ⟨U+202E⟩: the reader sees that something is there and
    nothing acts on it. Rich markup is left alone; see `sanitize_terminal`.

    Args:
        text: text of a model, a corpus or a file.
        keep_newlines: leave newlines and tabs as they are (for prose shown as a block).
    """
    if text.isprintable() and text.isascii():
        return text
    return "".join(_stand_in(char, keep_newlines) if _is_hazard(char) else char for char in text)


def _stand_in(char: str, keep_newlines: bool) -> str:
    if char in "\n\t" and keep_newlines:
        return char
    if char == "\n":
        return "⏎"
    if char == "\t":
        return "⇥"
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"⟨U+{code:04X}⟩"


def sanitize_terminal(text: str, *, keep_newlines: bool = False) -> str:
    """`visible_text`, with rich markup escaped too: safe inside `console.print(markup=True)`."""
    return escape(visible_text(text, keep_newlines=keep_newlines))


class _PipeConsole(Console):
    """Leaves a broken pipe to the application, where rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "the reader of standard output went away")


def out_console() -> Console:
    """Standard output as it is now (tests and pipes swap it), without automatic highlighting."""
    return _PipeConsole(highlight=False, soft_wrap=False, emoji=False)


def err_console() -> Console:
    """Standard error: progress, remarks, errors."""
    return Console(stderr=True, highlight=False, emoji=False)


def remark(text: str, *, quiet: bool = False) -> None:
    """Say one line on standard error; silent with --quiet. The text is shown literally."""
    if not quiet:
        err_console().print(visible_text(text), style="dim", markup=False, soft_wrap=True)


# ---------------------------------------------------------------- progress


@contextmanager
def progress_bar(description: str, *, quiet: bool = False) -> Generator[Progress]:
    """A rich bar with the time left on standard error, as a Progress callback.

    Each unit that is reported ("tokens", then "vectors") gets a bar of its own. Where standard error
    is not a terminal, a plain line is written at most every 15 seconds instead.

    Args:
        description: what is being done, shown left of the bar.
        quiet: report nothing.
    """
    console = err_console()
    if quiet:
        yield lambda done, total, unit: None
    elif not console.is_terminal:
        yield _PlainProgress(description, console)
    else:
        with RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
        ) as bars:
            tasks: dict[str, TaskID] = {}

            def report(done: int, total: int, unit: str) -> None:
                if unit not in tasks:
                    tasks[unit] = bars.add_task(escape(description), total=total, unit=escape(unit))
                bars.update(tasks[unit], completed=done, total=total)

            yield report


class _PlainProgress:
    """Progress for logs: few lines, each complete in itself."""

    def __init__(self, description: str, console: Console) -> None:
        self.description = description
        self.console = console
        self.last = self.heard = time.monotonic()
        self.started: dict[str, float] = {}

    def __call__(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        # A unit's first report comes after its first piece of work: the time since the report before counts.
        started = self.started.setdefault(unit, self.heard)
        self.heard = now
        if now - self.last < PLAIN_PROGRESS_SECONDS:
            return
        self.last = now
        left = (now - started) / max(done, 1) * max(total - done, 0)
        line = f"{self.description}: {done:,} of {total:,} {unit}, about {left:,.0f} s left"
        self.console.print(line, markup=False, soft_wrap=True)


# ---------------------------------------------------------------- machine-readable output


def write_json(
    path: str | Path,
    verb: str,
    provenance: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]] | Iterable[Mapping[str, Any]],
    **figures: Any,
) -> None:
    """Write `{"schema": "dragoman/<verb>/1", "provenance": …, <figures>, "rows": […]}`.

    NaN and infinities become null, as JSON has neither. A file appears under its name only when it is
    complete.

    Args:
        path: a file, or "-" for standard output.
        verb: the verb that speaks; part of the schema name.
        provenance: what made the rows (see dragoman.runs.provenance).
        rows: one mapping a row; numpy scalars and arrays are fine.
        figures: single numbers that sit beside the rows by name.
    """
    import orjson

    document = {"schema": f"dragoman/{verb}/1", "provenance": dict(provenance), **figures, "rows": list(rows)}
    data = orjson.dumps(
        document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    )
    if str(path) == "-":
        sys.stdout.write(data.decode())
        sys.stdout.flush()
        return
    from dragoman.runs import atomic_write_bytes

    atomic_write_bytes(Path(path), data)


def check_writable_target(path: str | Path | None, option: str) -> None:
    """Refuse, before any long work, an output path that could not be written at its end.

    Raises:
        ConfigError: the path is a folder, or its folder does not exist.
    """
    if path is None or str(path) == "-":
        return
    target = Path(path)
    if target.is_dir():
        raise ConfigError(
            f"{option} names the folder {target}",
            expected="the name of a file to write",
            consequence="the result would be lost after all the work was done",
            remedy=f"give a file name, for example {option} {target / 'result'}",
        )
    if not target.parent.is_dir():
        raise ConfigError(
            f"{option} {target} lies in a folder that does not exist",
            expected=f"an existing folder {target.parent}",
            consequence="the result would be lost after all the work was done",
            remedy=f"create the folder first: mkdir -p {target.parent}",
        )


def check_separate_paths(paths: Mapping[str, str | Path | None]) -> None:
    """Refuse an output that would replace an input or another output.

    Args:
        paths: paths by the option that names them, inputs first; None and "-" name no file.

    Raises:
        ConfigError: two options name the same file.
    """
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None or str(path) == "-" or Path(path).is_char_device():
            continue
        file = Path(path).resolve()
        if file in seen:
            raise ConfigError(
                f"{seen[file]} and {option} both name {path}",
                expected="a file of its own for each",
                consequence="one would be overwritten by the other",
                remedy=f"give {option} another name",
            )
        seen[file] = option


# ---------------------------------------------------------------- reading input

MAX_TEXT_BYTES = 64 * 2**20


def read_text_file(path: Path, option: str = "--file") -> str:
    """Read a UTF-8 text file of at most 64 MiB.

    Raises:
        TextError: no such file, a folder, too large, or not UTF-8.
    """
    if not path.is_file():
        raise TextError(
            f"{option} {path} is {'a folder' if path.is_dir() else 'not there'}",
            expected="a UTF-8 text file",
            consequence="there would be nothing to read",
            remedy="check the path",
        )
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise ResourceError(
            f"{option} {path} has {path.stat().st_size / 2**20:.0f} MiB",
            expected=f"at most {MAX_TEXT_BYTES // 2**20} MiB of text",
            consequence="memory would fill before the first token is read",
            remedy="cut the file into parts",
        )
    return decode_text(path.read_bytes(), f"{option} {path}")


def decode_text(data: bytes, source: str) -> str:
    """Decode UTF-8, dropping a byte-order mark.

    Raises:
        TextError: the bytes are not UTF-8; names the first bad offset.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            expected="UTF-8 text",
            consequence="the model would read replacement characters instead of the text",
            remedy="convert it, for example: iconv -f latin1 -t utf-8 IN > OUT",
        ) from None
