"""`dragoman subjects`: which models can be read, fetch one, show one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

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
    sanitize_terminal,
    write_json,
)

if TYPE_CHECKING:
    from dragoman.subjects import Subject

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="An embedded name, hf:ORG/NAME, a model folder, or a .gguf file."),
]
AcceptOption = Annotated[
    bool, typer.Option("--accept-terms", help="Accept the terms of a model that comes under some.")
]

subjects_app = typer.Typer(no_args_is_help=True, help="The frozen models that are read: list, fetch, show.")


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.add_typer(subjects_app, name="subjects")


@subjects_app.command("list")
def list_verb(json: JsonOption = None, debug: DebugOption = False) -> None:
    """List the embedded models; a package index alone can deliver them.

    Example: dragoman subjects list
    """
    from dragoman.runs import provenance
    from dragoman.subjects import list_subjects

    check_writable_target(json, "--json")
    listings = list_subjects()
    if json:
        write_json(json, "subjects", provenance(), [vars(listing) for listing in listings])
    if json == "-":
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "model", "blocks × d_model", "download", "licence", "state"):
        table.add_column(column, justify="right" if column in ("blocks × d_model", "download") else "left")
    for item in listings:
        state = "cached" if item.cached else "needs terms" if item.needs_terms else "not fetched"
        numbers = (f"{item.num_layers} × {item.d_model}", f"{item.download_mb} MB")
        table.add_row(item.name, item.description, *numbers, item.license, state)
    out_console().print(table)
    out_console().print("Also: hf:ORG/NAME, a model folder, a .gguf file.", markup=False)


@subjects_app.command("fetch")
def fetch_verb(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="An embedded name; see `dragoman subjects list`.")
    ],
    accept_terms: AcceptOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Download an embedded model, check its hash, and convert it once into the cache.

    Example: dragoman subjects fetch smollm2-135m
    """
    from dragoman.subjects import fetch_subject

    with progress_bar(f"fetching {name}", quiet=quiet) as progress:
        folder = fetch_subject(name, progress, accept_terms=accept_terms)
    out_console().print(str(folder), markup=False, soft_wrap=True)
    remark(f"{name} is ready: dragoman subjects show {name}", quiet=quiet)


@subjects_app.command("show")
def show_verb(
    name: NameArgument,
    device: DeviceOption = Device.auto,
    json: JsonOption = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Load a model and show what was found and measured: parts, sizes, embedding gain, compute.

    Example: dragoman subjects show smollm2-135m
    """
    from dragoman.runs import provenance
    from dragoman.subjects import load_subject

    check_writable_target(json, "--json")
    _refuse_silent_download(name)
    with progress_bar(f"loading {name}", quiet=quiet) as progress:
        subject = load_subject(name, device=device.value, progress=progress)
    facts = _facts(subject)
    if json:
        write_json(json, "subjects", {**provenance(), **subject.provenance()}, [facts])
    if json == "-":
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), sanitize_terminal(_readable(value)))
    out_console().print(table)


def _refuse_silent_download(name: str) -> None:
    """An embedded model is downloaded by `fetch` only, so that nobody is surprised by it."""
    from dragoman.errors import SubjectError
    from dragoman.subjects.load import cached_folder
    from dragoman.subjects.registry import EMBEDDED

    if name in EMBEDDED and not Path(name).exists() and cached_folder(name) is None:
        terms = " --accept-terms" if EMBEDDED[name].terms else ""
        raise SubjectError(
            f"{name} is not in the cache yet",
            expected="a model that was fetched before",
            consequence=f"{EMBEDDED[name].download_mb} MB would be downloaded without being asked for",
            remedy=f"run `dragoman subjects fetch {name}{terms}`",
        )


def _facts(subject: Subject) -> dict[str, Any]:
    family = subject.family
    return {
        "name": subject.name,
        "revision": subject.revision,
        "model_type": family.model_type,
        "num_layers": subject.num_layers,
        "d_model": subject.d_model,
        "vocab_size": subject.vocab_size,
        "max_positions": subject.max_positions,
        "blocks": f"{type(family.text_model).__name__}.{family.blocks_name}",
        "final_norm": f"{type(family.text_model).__name__}.{family.final_norm_name}",
        "embedding_gain": subject.embedding_gain,
        "gain_after_embedding": subject.gain_after,
        "special_tokens": len(subject.special_ids),
        "chat_template": subject.chat_template_origin,
        "fingerprint": subject.fingerprint,
        **subject.compute.to_json(),
    }


def _readable(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "none" if value is None else str(value)
