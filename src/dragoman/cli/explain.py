"""`dragoman explain`: what a model holds at each token of a text, or in vectors from anywhere, in words."""

from __future__ import annotations

from collections.abc import Sequence
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
    progress_bar,
    remark,
    write_json,
)
from dragoman.cli.explain_input import ExplainInput, choose_input, read_input
from dragoman.errors import ConfigError, TextError

if TYPE_CHECKING:
    from dragoman.nla import Decoding, Pair
    from dragoman.nla.reading import Reading

DEFAULT_PAIR = "zoo:smollm2-135m-L20"
SAMPLING_TEMPERATURE = 0.7
"""With --best-of and no --temperature: greedy candidates would all be the same."""
MANY_VECTORS = 2_000

_INPUT, _DECODING, _MODEL, _OUTPUT = "Input", "Decoding", "Model", "Output"


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("explain")(explain)


def explain(
    text: Annotated[
        str | None, typer.Argument(help="The text to read; - or nothing takes standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Read a UTF-8 text file.", rich_help_panel=_INPUT)
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(
            "--chat",
            help="Read a conversation: a JSON list of {role, content}, put into the model's chat template.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option(
            "--vectors",
            help="Read vectors from .parquet or .npy: activations, differences, probe directions.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    positions: Annotated[
        str,
        typer.Option(
            "--positions",
            help="all, last, every:N, sample:N, sample:N@MIN or a list such as 3,5,9; counted from 0.",
            rich_help_panel=_INPUT,
        ),
    ] = "all",
    pair: Annotated[
        str,
        typer.Option("--pair", help="zoo:NAME, a folder, or hf:ORG/NAME[@revision].", rich_help_panel=_MODEL),
    ] = DEFAULT_PAIR,
    av: Annotated[
        str | None,
        typer.Option("--av", help="The verbalizer alone; wins over --pair.", rich_help_panel=_MODEL),
    ] = None,
    ar: Annotated[
        str | None,
        typer.Option("--ar", help="The reconstructor alone; wins over --pair.", rich_help_panel=_MODEL),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer", help="The block you mean; refused if the pair reads another.", rich_help_panel=_MODEL
        ),
    ] = None,
    device: DeviceOption = Device.auto,
    best_of: Annotated[
        int,
        typer.Option(
            "--best-of",
            min=1,
            help="Sample so many explanations a vector and keep the one with the best score.",
            rich_help_panel=_DECODING,
        ),
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            min=0.0,
            help=f"0 is greedy, the default; with --best-of the default is {SAMPLING_TEMPERATURE}.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", help="Sample from the likeliest tokens of this mass.", rich_help_panel=_DECODING
        ),
    ] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            min=1,
            help="Longest explanation, in tokens; the pair's own by default.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Of sampled words and positions.", rich_help_panel=_DECODING)
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.parquet",
            help="With --vectors: write every row here, in bulk; continues after an interruption.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing --out.", rich_help_panel=_OUTPUT)
    ] = False,
    json_path: JsonOption = None,
    html: HtmlOption = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Say in words what a model holds at each token, with a score of how much of the vector the words carry.

    The score (FVE) comes from turning the words back into a vector: 1 is exact, 0 no better than always
    answering the mean vector. Standard output carries a table, or tab-separated lines in a pipe.

    Example: `dragoman explain "The tower was finished in 1889." --html report.html`

    Example: `dragoman explain --vectors directions.npy --best-of 4 --json -`

    Example: `dragoman explain --vectors activations.parquet --out words.parquet`
    """
    source = choose_input(text, file, chat, vectors)
    _check_outputs(source, out, json_path, html)
    # Read before the model is loaded: a wrong path or an empty pipe should not cost the wait.
    content = read_input(source)
    from dragoman.nla import Decoding, load_pair

    decoding = Decoding(
        temperature=_temperature(temperature, best_of),
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        best_of=best_of,
        seed=seed,
    )
    whole = av is not None and ar is not None
    with progress_bar("loading", quiet=quiet) as progress:
        loaded = load_pair(None if whole else pair, av=av, ar=ar, device=device.value, progress=progress)
    _check_layer(layer, loaded)
    if out is not None:
        assert vectors is not None
        halves = [spec for spec in (None if whole else pair, av, ar) if spec is not None]
        _explain_in_bulk(vectors, out, loaded, halves, decoding, force=force, quiet=quiet)
        return
    reading, special = _read(loaded, source, content, positions, decoding, quiet=quiet)
    _deliver(loaded, reading, special, decoding, json_path, html, quiet=quiet)


# ---------------------------------------------------------------- checks


def _check_outputs(source: ExplainInput, out: Path | None, json_path: str | None, html: Path | None) -> None:
    if out is not None and source.kind != "vectors":
        raise ConfigError(
            f"--out {out} without --vectors",
            expected="--out together with --vectors, for many vectors",
            consequence="nobody would know which columns the file has",
            remedy="use --json or --html for a text",
        )
    if out is not None and (json_path is not None or html is not None):
        raise ConfigError(
            "--out together with --json or --html",
            expected="one way out: bulk results can be larger than memory",
            consequence="the other file would be missing",
            remedy="run once with --out and read the Parquet file, or leave --out away",
        )
    check_writable_target(json_path, "--json")
    check_writable_target(html, "--html")
    check_writable_target(out, "--out")
    given = {f"--{source.kind}": source.path} if source.path.name else {}
    check_separate_paths({**given, "--json": json_path, "--html": html, "--out": out})


def _temperature(given: float | None, best_of: int) -> float:
    if given is not None:
        return given
    return SAMPLING_TEMPERATURE if best_of > 1 else 0.0


def _check_layer(layer: int | None, pair: Pair) -> None:
    if layer is not None and layer != pair.layer_index:
        raise ConfigError(
            f"--layer {layer}",
            expected=f"layer_index {pair.layer_index}, the block that {pair.name} was trained to read",
            consequence="words about one layer's space would be given for vectors of another",
            remedy=f"leave --layer away, or choose a pair for layer {layer}",
        )


# ---------------------------------------------------------------- reading


def _read(
    pair: Pair, source: ExplainInput, content: Any, positions: str, decoding: Decoding, *, quiet: bool
) -> tuple[Reading, list[bool]]:
    """The reading, and for each token of the text whether it is a special one."""
    from dragoman.nla.reading import read_text, read_vectors

    if source.kind == "vectors":
        from dragoman.activations import load_vectors

        loaded = load_vectors(source.path, d_model=pair.subject.d_model)
        if len(loaded) > MANY_VECTORS:
            remark(
                f"{len(loaded):,} vectors: with --out FILE.parquet an interruption would lose nothing",
                quiet=quiet,
            )
        with progress_bar("reading", quiet=quiet) as progress:
            return read_vectors(pair, loaded, decoding=decoding, progress=progress), []
    ids = _chat_ids(pair, content) if source.kind == "chat" else pair.subject.encode(content)
    with progress_bar("reading", quiet=quiet) as progress:
        reading = read_text(pair, ids, positions, decoding=decoding, seed=decoding.seed, progress=progress)
    return reading, [token in pair.subject.special_ids for token in ids]


def _chat_ids(pair: Pair, messages: Sequence[dict[str, str]]) -> list[int]:
    from jinja2 import TemplateError

    try:
        return pair.subject.encode_chat(messages)
    except TemplateError as error:
        # Templates refuse what their model was not trained on, in words of their own.
        raise TextError(
            f"the chat template of {pair.subject.name} refuses the conversation: {error}",
            expected="roles in the order that the template knows",
            consequence="the model would read a conversation in a form it was not trained on",
            remedy="correct the roles in the file",
        ) from error


def _deliver(
    pair: Pair,
    reading: Reading,
    special: list[bool],
    decoding: Decoding,
    json_path: str | None,
    html: Path | None,
    *,
    quiet: bool,
) -> None:
    from dataclasses import asdict

    from dragoman.cli.reading_view import page_of, print_reading, reading_rows, score_figures
    from dragoman.runs import atomic_write_text, provenance

    origin = provenance(pair=pair.name, subject=pair.subject.provenance(), decoding=asdict(decoding))
    if html is not None:
        from dragoman.cli.html import render_page

        atomic_write_text(html, render_page(page_of(reading, pair.sidecar, special, origin)))
    if json_path is not None:
        rows = reading_rows(reading)
        write_json(json_path, "explain", origin, rows, **score_figures(pair, rows))
    if json_path != "-":
        print_reading(reading, pair.sidecar)
    for path in (html, json_path):
        if path is not None and str(path) != "-":
            remark(f"wrote {path}", quiet=quiet)


def _explain_in_bulk(
    source: Path,
    target: Path,
    pair: Pair,
    halves: Sequence[str],
    decoding: Decoding,
    *,
    force: bool,
    quiet: bool,
) -> None:
    from dataclasses import asdict

    from dragoman.cli.bulk import explain_file, folder_identity
    from dragoman.nla.reading import read_vectors
    from dragoman.nla.sources import resolve_folder

    def read(vectors: Any) -> list[dict[str, Any]]:
        return [row.to_json() for row in read_vectors(pair, vectors, decoding=decoding)]

    compute = {key: value for key, value in pair.subject.compute.to_json().items() if key != "reason"}
    job = {
        "pair": {spec: folder_identity(resolve_folder(spec)) for spec in halves},
        "subject": pair.subject.fingerprint,
        "compute": compute,
        "decoding": asdict(decoding),
    }
    with progress_bar("reading", quiet=quiet) as progress:
        summary = explain_file(
            source, target, read, job=job, d_model=pair.subject.d_model, force=force, progress=progress
        )
    resumed = f", {summary.resumed_rows:,} of them from an earlier run" if summary.resumed_rows else ""
    remark(f"wrote {target}: {summary.rows:,} rows{resumed}", quiet=quiet)
