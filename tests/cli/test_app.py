from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from dragoman.cli import app as app_module
from dragoman.cli import common
from dragoman.errors import ConfigError, DragomanWarning, TextError

SOURCE = Path(app_module.__file__).parents[2]


def _app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=app_module.DragomanGroup, pretty_exceptions_enable=False)

    @app.callback()
    def root() -> None:
        pass

    @app.command()
    def fail(debug: common.DebugOption = False) -> None:
        raise error

    return app


BAD_VALUE = ConfigError(
    "the width is 7",
    expected="a width of 576",
    consequence="words about no vector",
    remedy="use the right file",
)


def _run(code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], text=True, capture_output=True, env=environment, **options
    )


def test_a_user_error_is_one_paragraph_on_standard_error_with_exit_code_2():
    result = CliRunner().invoke(_app_that_raises(BAD_VALUE), ["fail"])
    assert result.exit_code == 2
    assert result.stdout == ""
    said = " ".join(result.stderr.split())
    assert said.startswith("error: The width is 7. Expected: a width of 576.")
    assert "Otherwise: words about no vector. To fix it: use the right file." in said
    assert "Traceback" not in result.stderr


def test_debug_adds_the_traceback_and_keeps_the_exit_code():
    result = CliRunner().invoke(_app_that_raises(BAD_VALUE), ["fail", "--debug"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and "ConfigError" in result.stderr


def test_an_error_text_cannot_steer_the_terminal_or_speak_rich_markup():
    nasty = TextError(
        "token \x1b[2J\x9b31m [red]x[/red] [/] \u202egnp.exe",
        expected="e",
        consequence="c",
        remedy="r",
    )
    result = CliRunner().invoke(_app_that_raises(nasty), ["fail"])
    assert result.exit_code == 2
    assert not {"\x1b", "\x9b", "\u202e"} & set(result.stderr)
    assert "[red]x[/red] [/]" in result.stderr and "␛[2J" in result.stderr


@pytest.mark.parametrize("error", [AssertionError("ours"), ZeroDivisionError(), RuntimeError("bug")])
def test_our_own_bugs_keep_their_traceback(error):
    result = CliRunner().invoke(_app_that_raises(error), ["fail"])
    assert result.exception is error


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(errno.EPIPE, "pipe"), 141)]
)
def test_interrupt_and_broken_pipe_are_quiet(error, code):
    result = CliRunner().invoke(_app_that_raises(error), ["fail"])
    assert (result.exit_code, result.output) == (code, "")


def test_a_full_disk_is_a_user_error_that_names_the_cause():
    result = CliRunner().invoke(
        _app_that_raises(OSError(errno.ENOSPC, "No space left on device", "out.parquet")), ["fail"]
    )
    assert result.exit_code == 2
    assert "No space left on device (out.parquet)" in " ".join(result.stderr.split())


def test_an_unknown_option_is_a_usage_error_with_exit_code_2():
    result = CliRunner().invoke(app_module.app, ["explain", "--no-such-option"])
    assert result.exit_code == 2
    assert "--no-such-option" in result.stderr


def test_help_needs_neither_torch_nor_transformers_and_answers_within_half_a_second():
    code = (
        "import sys, time; t = time.process_time(); from dragoman.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy), 'SECONDS', time.process_time() - t)"
    )
    # Processor time: other work on the machine must not fail the test.
    seconds = []
    for _ in range(3):
        result = _run(code)
        assert "HEAVY []" in result.stdout, result.stdout + result.stderr
        seconds.append(float(result.stdout.split("SECONDS")[1]))
    assert min(seconds) < 0.5


def test_every_verb_has_help_with_an_example():
    group = typer.main.get_command(app_module.app)
    assert "explain" in group.commands and "init" in group.commands
    for name in ("explain", "init"):
        result = CliRunner().invoke(app_module.app, [name, "--help"])
        assert result.exit_code == 0
        assert f"dragoman {name}" in result.output


def test_a_reader_that_goes_away_ends_the_command_quietly():
    code = (
        "from dragoman.cli import app as a\n"
        "import typer\n"
        "@a.app.command('flood')\n"
        "def flood():\n"
        "    for i in range(200000): typer.echo('line ' * 20)\n"
        "import sys; sys.argv = ['dragoman', 'flood']; a.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith(b"line")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(20) == 141


def test_a_short_output_into_a_closed_pipe_is_quiet_too():
    # Little text waits in the buffer until the interpreter ends: the last flush must not complain.
    code = (
        "from dragoman.cli import app as a\n"
        "import sys, time, typer\n"
        "@a.app.command('word')\n"
        "def word():\n"
        "    sys.stdin.read(); sys.stdout.write('one line')\n"
        "sys.argv = ['dragoman', 'word']; a.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)
    assert process.stdout is not None and process.stderr is not None and process.stdin is not None
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(20) == 141


def test_a_dragoman_warning_is_one_line_and_foreign_warnings_stay_silent(capsys):
    app_module._show_warning(DragomanWarning("scale [b]3[/b] is\x1b small"), DragomanWarning, "f", 1)
    app_module._show_warning(UserWarning("noise"), UserWarning, "f", 1)
    assert capsys.readouterr().err == "warning: scale [b]3[/b] is␛ small\n"


def test_main_routes_warnings_through_the_quiet_door():
    code = (
        "from dragoman.cli import app as a\n"
        "import sys, warnings\n"
        "@a.app.command('warn')\n"
        "def warn(): warnings.warn('library noise'); warnings.warn('mind the scale', a.DragomanWarning)\n"
        "sys.argv = ['dragoman', 'warn']; a.main()"
    )
    result = _run(code)
    assert (result.returncode, result.stderr) == (0, "warning: mind the scale\n")


# ---------------------------------------------------------------- common

HAZARDS = [
    chr(c) for c in [*range(0x20), 0x7F, *range(0x80, 0xA0), 0x200E, 0x2028, 0x202E, 0x2066, 0xFEFF, 0xE0041]
]


def test_no_control_or_direction_character_survives_sanitizing():
    text = "a".join(HAZARDS) + "\ud800"
    shown = common.sanitize_terminal(text)
    assert not set(HAZARDS) & set(shown) and "\ud800" not in shown
    assert shown.encode()  # encodable: no lone surrogate is left
    assert common.sanitize_terminal("a\nb\tc", keep_newlines=True) == "a\nb\tc"


def test_ordinary_text_of_any_script_is_left_alone():
    text = "naïve 日本語 שלום 👩‍🚀 क्षि"
    assert common.visible_text(text) == text


@pytest.mark.parametrize(
    "text", ["[bold]x[/bold]", "[/]", "a\\", "[link=http://x]y[/link]", "\\[a]", "x\\\\[b]"]
)
def test_sanitized_text_prints_literally_where_markup_is_on(text, capsys):
    marked_up = f"[dim]{common.sanitize_terminal(text)}[/dim]"
    Console(width=200, highlight=False).print(marked_up, markup=True)
    assert capsys.readouterr().out.rstrip("\n") == text


def test_json_has_schema_provenance_figures_and_rows_and_no_nan(tmp_path):
    import numpy as np

    target = tmp_path / "out.json"
    rows = [{"fve": float("nan"), "norm": np.float32(2.5), "text": "\u2028</script>"}]
    common.write_json(target, "explain", {"dragoman": "0"}, rows, fve_median=0.25)
    document = json.loads(target.read_text())
    assert document["schema"] == "dragoman/explain/1"
    assert document["fve_median"] == 0.25
    assert document["rows"] == [{"fve": None, "norm": 2.5, "text": "\u2028</script>"}]
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_json_dash_is_standard_output(capsys):
    common.write_json("-", "explain", {}, [{"a": 1}])
    assert json.loads(capsys.readouterr().out)["rows"] == [{"a": 1}]


def test_an_output_path_that_cannot_work_is_refused_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match="names the folder"):
        common.check_writable_target(tmp_path, "--json")
    with pytest.raises(ConfigError, match="does not exist"):
        common.check_writable_target(tmp_path / "no" / "out.json", "--json")
    common.check_writable_target(tmp_path / "out.json", "--json")
    common.check_writable_target("-", "--json")


def test_an_output_that_would_replace_an_input_or_another_output_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.npy").symlink_to(tmp_path / "a.npy")
    for same in (tmp_path / "a.npy", "a.npy", "./x/../a.npy", "link.npy"):
        with pytest.raises(ConfigError, match="--vectors and --json both name"):
            common.check_separate_paths({"--vectors": tmp_path / "a.npy", "--html": "b", "--json": same})
    common.check_separate_paths({"--file": None, "--json": "-", "--html": "-", "--out": "a"})
    common.check_separate_paths({"--json": "/dev/null", "--html": "/dev/null"})


def test_a_text_file_must_be_utf8_and_its_byte_order_mark_is_dropped(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_bytes(b"\xef\xbb\xbfna\xc3\xafve")
    bad.write_bytes(b"caf\xe9 noir")
    assert common.read_text_file(good) == "naïve"
    with pytest.raises(TextError, match="0xe9 at offset 3"):
        common.read_text_file(bad)
    with pytest.raises(TextError, match="a folder"):
        common.read_text_file(tmp_path)


def test_progress_without_a_terminal_writes_few_lines_and_quiet_none(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 20.0, 21.0, 40.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with common.progress_bar("reading") as report:
        for done in (1, 5, 6, 10):
            report(done, 10, "vectors")
    assert capsys.readouterr().err == (
        "reading: 5 of 10 vectors, about 20 s left\nreading: 10 of 10 vectors, about 0 s left\n"
    )
    monkeypatch.undo()
    with common.progress_bar("reading", quiet=True) as report:
        report(1, 1, "vectors")
    assert capsys.readouterr().err == ""


def test_the_time_left_of_a_second_unit_counts_its_first_piece_of_work(monkeypatch, capsys):
    clock = iter([0.0, 5.0, 25.0, 45.0])
    monkeypatch.setattr(common.time, "monotonic", lambda: next(clock))
    with common.progress_bar("capturing") as report:
        report(3, 3, "corpora")
        report(10, 40, "vectors")
        report(20, 40, "vectors")
    assert capsys.readouterr().err == (
        "capturing: 10 of 40 vectors, about 60 s left\ncapturing: 20 of 40 vectors, about 40 s left\n"
    )


def test_progress_on_a_terminal_shows_counts_and_unit(monkeypatch):
    import io

    screen = io.StringIO()
    monkeypatch.setattr(common, "err_console", lambda: Console(file=screen, force_terminal=True, width=120))
    with common.progress_bar("reading [x]") as report:
        report(3, 7, "vectors")
    assert (
        "reading [x]" in screen.getvalue() and "3/7" in screen.getvalue() and "vectors" in screen.getvalue()
    )
