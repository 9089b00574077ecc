"""`dragoman train`: from a config to a verbalizer, a reconstructor, or a whole pair."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.common import (
    DebugOption,
    Device,
    DeviceOption,
    JsonOption,
    QuietOption,
    check_writable_target,
    out_console,
    progress_bar,
    remark,
    write_json,
)

if TYPE_CHECKING:
    from dragoman.runs import Progress
    from dragoman.training import PairTraining
    from dragoman.training.loop import StepReport

train_app = typer.Typer(
    no_args_is_help=True,
    help="Train a verbalizer, a reconstructor, or a whole pair from one config; repeat a command to resume.",
)

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML config; `dragoman init MODEL` writes one.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", metavar="DIR", help="Run folder, instead of the config's `output`."),
]


def register(app: typer.Typer) -> None:
    """Put the verb on the application."""
    app.add_typer(train_app, name="train")


@train_app.command("verbalizer")
def verbalizer(
    config: ConfigArgument,
    output: OutputOption = None,
    json: JsonOption = None,
    device: DeviceOption = Device.auto,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train the verbalizer (vector → text) on reference explanations.

    The figure to watch is the gap: the loss with other documents' vectors minus the loss with the real
    ones, in nat a token. At 0 the vector is not read at all.

    Example: `dragoman train verbalizer pair.yaml`
    """
    check_writable_target(json, "--json")
    training = _training(config, output, device, quiet)
    figures = training.train_verbalizer()
    _finish("verbalizer", training, {"verbalizer": figures}, json, f"dragoman train reconstructor {config}")


@train_app.command("reconstructor")
def reconstructor(
    config: ConfigArgument,
    output: OutputOption = None,
    json: JsonOption = None,
    device: DeviceOption = Device.auto,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train the reconstructor (text → vector) on reference explanations.

    The figure to watch is the held-out FVE beside its shuffled control, which must stay below 0.

    Example: `dragoman train reconstructor pair.yaml`
    """
    check_writable_target(json, "--json")
    training = _training(config, output, device, quiet)
    figures = training.train_reconstructor()
    _finish("reconstructor", training, {"reconstructor": figures}, json, f"dragoman train pair {config}")


@train_app.command("pair")
def pair(
    config: ConfigArgument,
    output: OutputOption = None,
    json: JsonOption = None,
    device: DeviceOption = Device.auto,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train both halves, refit the reconstructor on the verbalizer's own words, and write the pair.

    Stages that are finished are not repeated; a stage that was killed goes on from its checkpoint.

    Example: `dragoman train pair pair.yaml`
    """
    check_writable_target(json, "--json")
    training = _training(config, output, device, quiet)
    figures = {
        "verbalizer": training.train_verbalizer(),
        "reconstructor": training.train_reconstructor(),
        "refit": training.refit_reconstructor(),
    }
    folder = training.assemble()
    _finish("pair", training, figures, json, f"dragoman evaluate {folder} --suite fve --json fve.json")


# --- set-up and results ---------------------------------------------------------------------------------


def _training(config: Path, output: Path | None, device: Device, quiet: bool) -> PairTraining:
    from dragoman.training import PairTraining, Watch, read_config

    parsed = read_config(config)
    watch = Watch(bar=_bars(quiet), listener=None if quiet else _tell_held_out)
    return PairTraining(parsed, output=output, device=device.value, watch=watch)


def _bars(quiet: bool) -> Callable[[str], Any]:
    @contextmanager
    def bar(description: str) -> Generator[Progress]:
        with progress_bar(description, quiet=quiet) as report:
            yield report

    return bar


def _tell_held_out(report: StepReport) -> None:
    """One line whenever held-out figures are taken, and for every skipped step's count."""
    if not report.held_out:
        return
    figures = ", ".join(f"{name} {value:.3f}" for name, value in report.held_out.items() if name != "rows")
    skipped = f", {report.skipped} non-finite steps skipped" if report.skipped else ""
    remark(
        f"step {report.step}/{report.total}: training loss {report.loss:.3f}; held out "
        f"(n={report.held_out['rows']:.0f}): {figures}{skipped}"
    )


def _finish(
    stage: str,
    training: PairTraining,
    figures: dict[str, dict[str, float]],
    json: str | None,
    next_command: str,
) -> None:
    from dragoman.runs import provenance

    rows = [{"stage": name, **values} for name, values in figures.items()]
    if json is not None:
        config = training.config.model_dump(mode="json")
        write_json(json, "train", provenance(config=config), rows, stage=stage, output=str(training.output))
    if json == "-":
        return
    console = out_console()
    for row in rows:
        measured = {name: value for name, value in row.items() if name not in ("stage", "rows")}
        numbers = ", ".join(f"{name} {value:.3f}" for name, value in measured.items())
        line = f"{row['stage']}: {numbers} (held out, n={row['rows']:.0f})"
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"written to {training.output}\nnext: {next_command}", markup=False, soft_wrap=True)
