"""`dragoman evaluate`: does a pair read, or guess? Measured on held-out documents, against controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.common import (
    DebugOption,
    Device,
    DeviceOption,
    HtmlOption,
    JsonOption,
    QuietOption,
    check_separate_paths,
    check_writable_target,
    out_console,
    progress_bar,
    remark,
    sanitize_terminal,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from dragoman.evaluation import FveReport, HeldOut
    from dragoman.evaluation.report import Requirement
    from dragoman.nla import Pair
    from dragoman.runs import RunFolder
    from dragoman.subjects import Subject

VERB = "evaluate"
TRAIN_CONFIG = "train.yaml"
EXIT_REQUIREMENT_FAILED = 1


class Suite(StrEnum):
    """What is measured."""

    fve = "fve"


@dataclass(frozen=True)
class _Request:
    """One call of the verb, as given."""

    name: str | None
    av: str | None
    ar: str | None
    test: Path | None
    n: int
    seed: int
    device: Device
    quiet: bool


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command(VERB)(evaluate)


def evaluate(
    pair: Annotated[
        str | None,
        typer.Argument(metavar="PAIR", help="zoo:NAME, a folder, or hf:ORG/NAME.", show_default=False),
    ] = None,
    suite: Annotated[Suite, typer.Option("--suite", help="What is measured.")] = Suite.fve,
    n: Annotated[int, typer.Option("--n", min=2, help="Held-out vectors to use.")] = 512,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            max=2**63 - 1,
            help="Decides the sample, the shuffled control and the resampling.",
        ),
    ] = 0,
    test: Annotated[
        Path | None,
        typer.Option(
            "--test",
            metavar="FILE.parquet",
            help="Held-out vectors with doc_id, n_raw_tokens and explanation. Without it, the pair's own "
            "test split is made again from its train.yaml.",
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="NAME>=VALUE",
            help="Exit with code 1 unless the figure meets the bound (>=, <=, >, <); repeatable.",
        ),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option("--card", metavar="FILE.md", help="Write the pair's model card, in Markdown."),
    ] = None,
    av: Annotated[str | None, typer.Option("--av", help="The verbalizer alone.")] = None,
    ar: Annotated[str | None, typer.Option("--ar", help="The reconstructor alone.")] = None,
    device: DeviceOption = Device.auto,
    json_path: JsonOption = None,
    html: HtmlOption = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure a pair on held-out documents, each figure beside its control, n and interval.

    The `fve` suite: how much of a vector the reconstructor finds in reference explanations and in the
    verbalizer's own greedy words (both denominators, cosine, retrieval among 256), how much the verbalizer's
    loss rises when it is given another document's vector, and what the words are worth when paired with
    another document's vector or said about nothing. A killed run goes on where it stopped.

    Example: `dragoman evaluate zoo:smollm2-135m-L20 --suite fve --json report.json`

    Example: `dragoman evaluate my-pair --n 1024 --require 'round_trip_fve>=0.2' --require 'av_gap>=0.25'`
    """
    from dragoman.evaluation import failed_requirements, parse_requirement
    from dragoman.evaluation.figures import FIGURE_NAMES

    requirements = [parse_requirement(text, FIGURE_NAMES) for text in require or ()]
    check_writable_target(json_path, "--json")
    check_writable_target(html, "--html")
    check_separate_paths({"--test": test, "--json": json_path, "--html": html})
    check_writable_target(card, "--card")
    request = _Request(pair, av, ar, test, n, seed, device, quiet)
    assert suite is Suite.fve, "typer offers the suites that exist"
    report, about, meta = _measure(request)

    failed = failed_requirements(requirements, report.figures)
    if json_path is not None:
        write_json(json_path, VERB, about, report.rows, suite=suite.value, **report.to_json())
    if html is not None:
        _write_html(html, report, about)
    if card is not None:
        _write_card(card, report, about, meta)
    if str(json_path) != "-":
        _print_report(report, requirements, [broken for broken, _ in failed])
    if failed:
        raise typer.Exit(EXIT_REQUIREMENT_FAILED)


# ---------------------------------------------------------------- measuring


def _measure(request: _Request) -> tuple[FveReport, dict[str, Any], dict[str, Any]]:
    """The report, where it comes from, and what a model card says beyond it."""
    from dragoman.cli.card import pair_meta
    from dragoman.evaluation import evaluate_fve
    from dragoman.nla import load_pair
    from dragoman.runs import content_hash, provenance

    folders = _pair_folders(request)
    pair = load_pair(request.name, av=request.av, ar=request.ar, device=request.device.value)
    held_out = _held_out(request, folders, pair.subject)
    about = provenance(
        pair=pair.name,
        pair_files=content_hash([_files(folder) for folder in folders]),
        subject=pair.subject.provenance(),
        layer_index=pair.layer_index,
    )
    with (
        _work_folder(request, pair, held_out, about) as work,
        progress_bar("evaluating", quiet=request.quiet) as progress,
    ):
        report = evaluate_fve(pair, held_out, n=request.n, seed=request.seed, work=work, progress=progress)
    return report, about, pair_meta(folders[0], pair, request.n)


def _pair_folders(request: _Request) -> list[Path]:
    """The folder of the pair, or those of its halves where they are named alone."""
    from dragoman.errors import PairError
    from dragoman.nla.sources import resolve_folder

    given = [name for name in (request.name, request.av, request.ar) if name is not None]
    if request.name is None and len(given) < 2:
        raise PairError(
            "no pair was named",
            expected="zoo:NAME, a folder or hf:ORG/NAME, or both --av and --ar",
            consequence="there would be nothing to measure",
            remedy="name one, for example: dragoman evaluate zoo:smollm2-135m-L20",
        )
    return [resolve_folder(name) for name in given]


def _files(folder: Path) -> dict[str, str]:
    """sha256 of every file that decides what a pair says."""
    import hashlib

    names = sorted(
        p for p in folder.rglob("*") if p.is_file() and p.suffix in (".safetensors", ".yaml", ".json")
    )
    found: dict[str, str] = {}
    for path in names:
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


@contextmanager
def _work_folder(
    request: _Request, pair: Pair, held_out: HeldOut, about: Mapping[str, Any]
) -> Generator[RunFolder]:
    """A run folder that keeps explanations until the evaluation is complete, and is then removed.

    Were it kept, a second evaluation would repeat the first one's explanations instead of making them.
    """
    import shutil

    from dragoman.runs import RunFolder, content_hash, home

    config = {
        "pair_files": about["pair_files"],
        "subject": pair.subject.fingerprint,
        "held_out": held_out.fingerprint(),
        "n": request.n,
        "seed": request.seed,
        "versions": {key: about[key] for key in ("dragoman", "git_revision", "torch", "transformers")},
    }
    folder = home() / "runs" / f"evaluate-{content_hash(config)}"
    with RunFolder.open(folder, config, kind=VERB) as work:
        if work.resumed:
            remark(f"going on with an evaluation that was stopped ({folder})", quiet=request.quiet)
        yield work
    shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- the held-out set


def _held_out(request: _Request, folders: Sequence[Path], subject: Subject) -> HeldOut:
    from dragoman.evaluation import read_held_out

    if request.test is not None:
        return read_held_out(request.test)
    held_out = read_held_out(make_test_set(folders, subject, quiet=request.quiet))
    # Only here is it known that the documents are those that training held out.
    return replace(held_out, source={**held_out.source, "made_from": TRAIN_CONFIG})


def make_test_set(folders: Sequence[Path], subject: Subject, *, quiet: bool) -> Path:
    """The pair's own test split, captured again as its train.yaml says, or found in the cache.

    Only the test split is captured; its rows are those that training held out, since split and positions
    are keyed on seed and document alone.

    Args:
        folders: where a train.yaml may lie.
        subject: the pair's subject.
        quiet: say nothing.

    Raises:
        PairError: no train.yaml.
    """
    from dragoman.datagen.sets import HELD_OUT, prepare_sets
    from dragoman.errors import PairError
    from dragoman.runs import content_hash, home
    from dragoman.training.config import read_config

    file = next((f / TRAIN_CONFIG for f in folders if (f / TRAIN_CONFIG).is_file()), None)
    if file is None:
        raise PairError(
            f"the pair has no {TRAIN_CONFIG}, so its held-out documents are not known",
            expected=f"{TRAIN_CONFIG} in the pair's folder, or --test FILE.parquet",
            consequence="a pair could be measured on the documents it was trained on",
            remedy="pass --test with vectors of documents that training did not see",
        )
    data = read_config(file).data
    out = home() / "sets" / f"test-{content_hash([subject.fingerprint, data.model_dump(mode='json')])}"
    names = ", ".join(spec.name for spec in data.corpora)
    remark(f"held-out set: the test split of {names}, as {TRAIN_CONFIG} says, kept in {out}", quiet=quiet)
    with progress_bar("capturing held-out vectors", quiet=quiet) as progress:
        return prepare_sets(subject, data, out, progress, splits=(HELD_OUT,))[HELD_OUT]


# ---------------------------------------------------------------- showing


def _print_report(
    report: FveReport, requirements: Sequence[Requirement], broken: Sequence[Requirement]
) -> None:
    from rich.table import Table

    test, level = report.test_set, f"{report.settings['level']:.0%}"
    console = out_console()
    console.print(
        f"{test['rows_used']} held-out vectors of {test['documents_used']} documents; intervals: {level}, "
        "bootstrap over documents; fve is against raw variance"
    )
    table = Table(pad_edge=False, box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("figure", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column(f"{level} interval", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("compared with", overflow="fold")
    for figure in report.figures.values():
        found = figure.estimate
        interval = "one document" if found.low is None else f"{found.low:.3f} … {found.high:.3f}"
        table.add_row(
            f"{figure.name}\n[dim]{sanitize_terminal(figure.meaning)}[/dim]",
            f"{found.value:.3f}",
            interval,
            str(found.n),
            sanitize_terminal(figure.compared_with + (f" ({figure.unit})" if figure.unit else "")),
        )
    console.print(table)
    threshold = report.calibration
    console.print(
        f"low-score threshold: fve {threshold.threshold:.3f} keeps {threshold.kept_real:.0%} of readings of "
        f"their own vectors and lets {threshold.passed_shuffled:.0%} pass of readings of another document's "
        f"(Youden's J {threshold.youden_j:.2f}, n {threshold.n_real} each)"
    )
    for requirement in requirements:
        value = f"found {report.value(requirement.name):.4f}"
        mark = "[bold red]failed[/bold red]" if requirement in broken else "[green]holds[/green]"
        console.print(f"{mark} {sanitize_terminal(str(requirement))}: {value}")


def _write_card(path: Path, report: FveReport, about: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    from dragoman.evaluation import render_model_card
    from dragoman.runs import atomic_write_text

    atomic_write_text(path, render_model_card({**report.to_json(), "provenance": about}, pair_meta=meta))


def _write_html(path: Path, report: FveReport, about: Mapping[str, Any]) -> None:
    from dragoman.cli.html import Page, ScoreFacts, render_page
    from dragoman.runs import atomic_write_text

    threshold = report.calibration.threshold
    round_trip = report.figures["round_trip_fve"]
    rows = [{**row, "flags": ["low-score"] if row["score"] < threshold else []} for row in report.rows]
    page = Page(
        title=f"Evaluation of {about['pair']}",
        lede=f"{round_trip.estimate.n} held-out vectors of {round_trip.estimate.documents} documents, read "
        f"in words and turned back. FVE {round_trip.value:.3f}; compared with: {round_trip.compared_with}.",
        rows=rows,
        score=ScoreFacts(
            baseline_n=round_trip.estimate.n,
            threshold=threshold,
            shuffled=report.value("round_trip_shuffled_fve"),
        ),
        provenance=about,
    )
    atomic_write_text(path, render_page(page))
