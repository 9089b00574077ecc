"""`dragoman init MODEL`: look at a model and write the config of a pair for it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
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
    visible_text,
    write_json,
)
from dragoman.errors import ConfigError, CorpusError

if TYPE_CHECKING:
    from dragoman.cli.budget import Budget
    from dragoman.injection import Marker
    from dragoman.runs import Progress
    from dragoman.subjects import Subject

DEFAULT_CORPORA = ("wikipedia-sample", "news-sample", "python-docs")
MEASURED_CORPUS = "python-docs"
"""Read from the interpreter itself: measuring needs no download."""
MEASURED_PASSAGES = 12
TIMED_PASSAGES = 4


@dataclass(frozen=True)
class Proposal:
    """What `init` found and proposes.

    Attributes:
        layer_index: the block to read, two thirds deep by default.
        marker: the token whose embedding is replaced, with its neighbours in the prompt.
        prompt_tokens: length of the AV prompt.
        mean_norm, median_norm: of the layer's vectors at the measured positions.
        measured_vectors: how many these were.
        measured_on: where they came from.
        injection_scale: round number just above the mean norm.
        forward_rate: tokens a second of a forward through all blocks.
        budget: sizes for the time given.
    """

    layer_index: int
    marker: Marker
    prompt_tokens: int
    mean_norm: float
    median_norm: float
    measured_vectors: int
    measured_on: str
    injection_scale: float
    forward_rate: float
    budget: Budget


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("init")(init)


def init(
    model: Annotated[str, typer.Argument(help="smollm2-135m, hf:ORG/NAME, a model folder, or a .gguf file.")],
    minutes: Annotated[
        float,
        typer.Option(
            "--minutes", min=0.5, max=525_600, help="Time for the whole pair: capture, training, refit."
        ),
    ] = 60.0,
    layer: Annotated[
        int | None,
        typer.Option("--layer", min=0, help="Block to read, from 0; two thirds deep by default."),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus", help="Text to train on: an embedded corpus, a file or a folder; repeatable."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PATH", help="The config; MODEL-LAYER.yaml here by default."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing config.")] = False,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the terms of an embedded model that has some.")
    ] = False,
    device: DeviceOption = Device.auto,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Propose layer, marker, prompt, scale and sizes for a pair, and write them as a commented config.

    The injection scale is the round number just above the layer's measured mean norm; the sizes fill the
    time given, from the measured speed of this machine. Nothing is trained yet.

    Example: `dragoman init smollm2-135m --minutes 45`
    """
    check_writable_target(json_path, "--json")
    if out is not None:
        _refuse_overwriting(out, force)
    from dragoman.cli.init_config import render_config, size_note, slug
    from dragoman.runs import atomic_write_text
    from dragoman.subjects import load_subject

    with progress_bar(f"reading {model}", quiet=quiet) as progress:
        subject = load_subject(model, device=device.value, accept_terms=accept_terms, progress=progress)
        layer_index = _check_layer(subject, layer)
        target = out or Path(f"{slug(subject.name)}-L{layer_index}.yaml")
        _refuse_overwriting(target, force)
        proposal = propose(subject, layer_index, corpus or [], 60 * minutes, progress)
    text = render_config(subject, proposal, corpus or DEFAULT_CORPORA, minutes, _batch_size(subject))
    atomic_write_text(target, text)
    _report(subject, proposal, target, json_path)
    if note := size_note(proposal.budget):
        remark(note, quiet=quiet)


# ---------------------------------------------------------------- proposing


def two_thirds(num_layers: int) -> int:
    """The layer_index two thirds deep: 20 of 30, 32 of 48, 53 of 80."""
    return min(round(2 * num_layers / 3), num_layers - 1)


def propose(
    subject: Subject, layer_index: int, corpora: list[str], seconds: float, progress: Progress | None = None
) -> Proposal:
    """Choose the marker, measure norm and speed, and size the stages.

    Raises:
        InjectionError: no token of the vocabulary can serve as marker.
        CorpusError: the corpus has no passage long enough.
    """
    from dragoman.cli.budget import plan_budget
    from dragoman.cli.init_config import MAX_TOKENS
    from dragoman.injection import choose_marker, prompt_renderer
    from dragoman.scaling import suggest_injection_scale
    from dragoman.training.config import PromptConfig

    prompt = PromptConfig()
    render = prompt_renderer(subject.tokenizer, prompt.av_template, system_prompt=prompt.system_prompt)
    marker = choose_marker(subject.tokenizer, render)
    measured_on = corpora[0] if corpora else MEASURED_CORPUS
    norms, rate = _measure(subject, layer_index, measured_on, progress)
    depth = (layer_index + 1) / subject.num_layers
    return Proposal(
        layer_index=layer_index,
        marker=marker,
        prompt_tokens=len(render(marker.char)),
        mean_norm=float(norms.mean()),
        median_norm=float(norms.median()),
        measured_vectors=len(norms),
        measured_on=measured_on,
        injection_scale=suggest_injection_scale(float(norms.mean())),
        forward_rate=rate,
        budget=plan_budget(
            seconds,
            forward_rate=rate,
            depth=depth,
            device=subject.compute.device.type,
            batch_size=_batch_size(subject),
            max_tokens=MAX_TOKENS,
        ),
    )


def _measure(subject: Subject, layer_index: int, corpus: str, progress: Progress | None) -> tuple[Any, float]:
    """Norms of the layer's vectors on a few passages, and tokens a second through all blocks."""
    from itertools import islice

    import torch

    from dragoman.activations import capture
    from dragoman.cli.init_config import MAX_TOKENS, MIN_POSITION
    from dragoman.datagen.corpora import load_corpus
    from dragoman.datagen.passages import cut_passages

    limit = min(MAX_TOKENS, subject.max_positions)
    least = min(MIN_POSITION, limit - 1)
    passages = cut_passages(load_corpus(corpus), subject.encode, max_tokens=limit, min_tokens=least + 1)
    sequences = [list(passage.ids) for passage in islice(passages, MEASURED_PASSAGES)]
    if not sequences:
        raise CorpusError(
            f"{corpus} has no passage of more than {least} tokens",
            expected="running text of some length",
            consequence="norm and speed could not be measured, nor a pair trained",
            remedy="give longer text with --corpus, or leave --corpus out",
        )
    positions = [
        [at for at in range(least, len(ids)) if ids[at] not in subject.special_ids] for ids in sequences
    ]
    # The first forward of a process pays for kernels and memory once.
    capture(subject, sequences[:1], [layer_index], positions[:1])
    norms: list[torch.Tensor] = []
    rates: list[float] = []
    for start in range(0, len(sequences), TIMED_PASSAGES):
        group = slice(start, start + TIMED_PASSAGES)
        started = time.perf_counter()
        captured = capture(subject, sequences[group], [layer_index], positions[group])
        rates.append(sum(map(len, sequences[group])) / (time.perf_counter() - started))
        norms += [item.vectors[layer_index].float().norm(dim=-1) for item in captured]
        if progress:
            progress(min(start + TIMED_PASSAGES, len(sequences)), len(sequences), "passages")
    # The fastest group counts: other work on the machine only ever slows one down.
    return torch.cat(norms), max(rates) * (layer_index + 1) / subject.num_layers


def _batch_size(subject: Subject) -> int:
    return 16 if subject.compute.device.type == "cpu" else 64


def _check_layer(subject: Subject, layer: int | None) -> int:
    if layer is None:
        return two_thirds(subject.num_layers)
    if layer >= subject.num_layers:
        raise ConfigError(
            f"--layer {layer}",
            expected=f"a block of {subject.name}, 0 to {subject.num_layers - 1}",
            consequence="there would be nothing to read",
            remedy=f"choose a block, for example {two_thirds(subject.num_layers)}",
        )
    return layer


# ---------------------------------------------------------------- writing


def _refuse_overwriting(target: Path, force: bool) -> None:
    if target.is_dir() or (target.exists() and not force):
        raise ConfigError(
            f"{target} exists",
            expected="a new file",
            consequence="the settings in it would be lost",
            remedy="choose another name with --out, or add --force to replace the file",
        )


def _report(subject: Subject, proposal: Proposal, target: Path, json_path: str | None) -> None:
    next_command = f"dragoman train pair {target}"
    if json_path is not None:
        from dragoman.runs import provenance

        figures = asdict(proposal) | {"config": str(target), "next": next_command}
        write_json(json_path, "init", provenance(**subject.provenance()), [], **figures)
        if json_path == "-":
            return
    marker = f"{proposal.marker.char!r} (token {proposal.marker.token_id})"
    lines = [
        f"{subject.name}: {subject.num_layers} blocks of width {subject.d_model}",
        f"  layer   {proposal.layer_index}",
        f"  marker  {marker}, prompt of {proposal.prompt_tokens} tokens",
        f"  scale   {proposal.injection_scale:g} (mean norm {proposal.mean_norm:.4g} over "
        f"{proposal.measured_vectors:,} positions)",
        f"  sizes   {proposal.budget.vectors:,} vectors, {proposal.budget.verbalizer_examples:,} examples, "
        f"about {proposal.budget.seconds / 60:.0f} min",
        f"Wrote {target}. Next:",
        f"  {next_command}",
    ]
    for line in lines:
        out_console().print(visible_text(line), markup=False, soft_wrap=True)
