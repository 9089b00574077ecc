"""Reads and writes `nla_meta.yaml` in every spelling that occurs in the wild.

Two families of names exist, av/ar and actor/critic; the layer index stands in four places (the hub release
has it at the top level, datasets under `extraction`, the AR under `critic`, schema v1 there as
`num_hidden_layers`, which despite its name is the block's index). This module alone knows them. Two spellings
of one thing that disagree are refused. Written is schema version 2: models with both families, datasets with
actor/critic, which the public release asserts and unpacks into dataclasses; for that reason keys of our own
stand at the top level only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from dragoman.errors import SidecarError
from dragoman.files import atomic_write_text, canonical_json
from dragoman.sidecar.bounded_yaml import dump_yaml, load_yaml, shortened, unreadable
from dragoman.sidecar.schema import Sidecar

SIDECAR_NAME = "nla_meta.yaml"
_ROLES = {"actor": "av", "critic": "ar"}
_OWN_KEYS = ("baseline", "score_threshold", "norm_quantiles", "system_prompt", "max_new_tokens", "provenance")
_ABSENT: Any = object()


def sidecar_path(path: str | os.PathLike[str]) -> Path:
    """Where the sidecar of `path` is: in a folder, the YAML file itself, or beside a data file."""
    given = Path(path)
    if given.is_dir() or (not given.exists() and not given.suffix):
        return given / SIDECAR_NAME
    if given.suffix in (".yaml", ".yml"):
        return given
    return given.with_name(f"{given.name}.{SIDECAR_NAME}")


def read_sidecar(path: str | os.PathLike[str]) -> Sidecar:
    """Reads the sidecar of a folder, of a data file, or the YAML file itself.

    Args:
        path: a folder (its nla_meta.yaml), a .yaml file, or a data file (FILE.nla_meta.yaml beside it).

    Raises:
        SidecarError: missing, larger than 1 MiB, not YAML, nested or aliased without bound, a value of the
            wrong kind, or two spellings of one thing that disagree.
    """
    file = sidecar_path(path)
    document = load_yaml(file)
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise unreadable(file, "is not a mapping of names to values")
    try:
        return Sidecar.model_validate(_canonical(document, file))
    except ValidationError as error:
        raise _invalid(file, error) from error


def write_sidecar(path: str | os.PathLike[str], sidecar: Sidecar) -> Path:
    """Writes the sidecar of `path` (see `read_sidecar`), complete or not at all; returns the file written.

    Raises:
        ResourceError: the disk is full or the folder cannot be written to.
    """
    file = sidecar_path(path)
    layout = _model_layout(sidecar) if sidecar.kind == "nla_model" else _dataset_layout(sidecar)
    atomic_write_text(file, dump_yaml(layout))
    return file


# Reading: every spelling becomes the one of `schema`.


def _canonical(document: dict[str, Any], file: Path) -> dict[str, Any]:
    """Moves every known key to its one place; what remains at each level are keys to be kept."""
    top = dict(document)
    extraction = _section(top, "extraction", file)
    tokens = _section(top, "tokens", file)
    templates = _section(top, "prompt_templates", file)
    critic = _section(top, "critic", file)

    _put(top, "d_model", _pick(file, (top, "d_model"), (extraction, "extraction.d_model")))
    _put(top, "role", _role(top.pop("role", _ABSENT)))
    # Both present: v2 wins, and num_hidden_layers may be what it says, a count.
    if "extraction_layer_index" not in critic and "num_hidden_layers" in critic:
        critic["extraction_layer_index"] = critic.pop("num_hidden_layers")
    _put(top, "ar_layer_index", _pick(file, (critic, "critic.extraction_layer_index")))
    layer_index = _pick(file, (extraction, "extraction.layer_index"), (top, "extraction_layer_index"))
    _put(
        extraction,
        "layer_index",
        top.get("ar_layer_index") if layer_index in (None, _ABSENT) else layer_index,
    )
    if top.get("kind") == "nla_dataset":
        for scale in ("injection_scale", "mse_scale"):
            _put(extraction, scale, _pick(file, (extraction, f"extraction.{scale}"), (top, scale)))
    if not extraction.get("base_model"):
        extraction["base_model"] = top.get("base_checkpoint") or ""
    for ours, theirs in (("av", "actor"), ("ar", "critic")):
        text = _pick(file, (templates, f"prompt_templates.{ours}"), (templates, f"prompt_templates.{theirs}"))
        _put(templates, ours, text)
    suffix = _pick(file, (tokens, "tokens.critic_suffix_ids"), (tokens, "tokens.ar_suffix_ids"))
    if tokens:
        tokens["ar_suffix_ids"] = () if suffix in (None, _ABSENT) else suffix

    top.update(extraction=extraction, tokens=tokens or None, prompt_templates=templates)
    if critic:
        top["critic"] = critic
    return top


def _section(top: dict[str, Any], name: str, file: Path) -> dict[str, Any]:
    value = top.pop(name, None)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise unreadable(file, f"has {name} = {shortened(value)}, which is not a mapping of names to values")
    return dict(value)


def _pick(file: Path, *places: tuple[dict[str, Any], str]) -> Any:
    """Takes one thing out of all places where it may stand, each given with its dotted name.

    Null says nothing beside a value. Nothing anywhere is `_ABSENT`.
    """
    stated: dict[str, Any] = {}
    for section, dotted in places:
        value = section.pop(dotted.rpartition(".")[2], _ABSENT)
        if value is not _ABSENT:
            stated[dotted] = value
    values = {dotted: value for dotted, value in stated.items() if value is not None}
    if not values:
        return None if stated else _ABSENT
    (first, chosen), *others = values.items()
    for dotted, value in others:
        if value != chosen:
            raise SidecarError(
                f"{file} has {first} = {shortened(chosen)} and {dotted} = {shortened(value)}",
                expected="the same value in both, as they are two spellings of one thing",
                consequence="two readers of this file would use different values without noticing",
                remedy="delete the wrong one",
            )
    return chosen


def _put(section: dict[str, Any], key: str, value: Any) -> None:
    if value is not _ABSENT:
        section[key] = value


def _role(value: Any) -> Any:
    return _ROLES.get(value, value) if isinstance(value, str) else value


# Writing: one spelling to both families.


def _model_layout(sidecar: Sidecar) -> dict[str, Any]:
    extraction = sidecar.extraction
    templates = sidecar.prompt_templates
    extra = dict(sidecar.model_extra or {})
    layout: dict[str, Any] = {
        **_head(sidecar, role=sidecar.role),
        "d_model": sidecar.d_model,
        "extraction_layer_index": extraction.layer_index,
        "extraction": {
            "base_model": extraction.base_model,
            "layer_index": extraction.layer_index,
            **_stated_scales(sidecar),
            "norm": extraction.norm,
            **(extraction.model_extra or {}),
        },
        **_tokens_layout(sidecar),
        "prompt_templates": {
            **{name: templates.av for name in ("av", "actor") if templates.av is not None},
            **{name: templates.ar for name in ("ar", "critic") if templates.ar is not None},
            **(templates.model_extra or {}),
        },
        **_critic_layout(sidecar, extra),
        **_own_keys(sidecar),
    }
    return {**layout, **extra}


def _dataset_layout(sidecar: Sidecar) -> dict[str, Any]:
    extraction = sidecar.extraction
    templates = sidecar.prompt_templates
    extra = dict(sidecar.model_extra or {})
    role = {ours: theirs for theirs, ours in _ROLES.items()}.get(sidecar.role or "")
    layout: dict[str, Any] = {
        **_head(sidecar, role=role),
        "extraction": {
            "base_model": extraction.base_model,
            "d_model": sidecar.d_model,
            "layer_index": extraction.layer_index,
            "norm": extraction.norm,
            **(extraction.model_extra or {}),
        },
        # The release unpacks `extraction` of a dataset into a dataclass that knows no scales.
        **_stated_scales(sidecar),
        **_tokens_layout(sidecar),
        "prompt_templates": {
            **({"actor": templates.av} if templates.av is not None else {}),
            **({"critic": templates.ar} if templates.ar is not None else {}),
            **(templates.model_extra or {}),
        },
        **_critic_layout(sidecar, extra),
        **_own_keys(sidecar),
    }
    return {**layout, **extra}


def _head(sidecar: Sidecar, *, role: str | None) -> dict[str, Any]:
    head: dict[str, Any] = {"kind": sidecar.kind, "schema_version": 2}
    return {**head, "role": role} if role is not None else head


def _stated_scales(sidecar: Sidecar) -> dict[str, Any]:
    """Only what was stated: an absent injection scale must not come back as an explicit null (= raw)."""
    extraction = sidecar.extraction
    names = ("injection_scale", "mse_scale")
    return {name: getattr(extraction, name) for name in names if name in extraction.model_fields_set}


def _tokens_layout(sidecar: Sidecar) -> dict[str, Any]:
    tokens = sidecar.tokens
    if tokens is None:
        return {}
    return {
        "tokens": {
            "injection_char": tokens.injection_char,
            "injection_token_id": tokens.injection_token_id,
            "injection_left_neighbor_id": tokens.injection_left_neighbor_id,
            "injection_right_neighbor_id": tokens.injection_right_neighbor_id,
            "critic_suffix_ids": list(tokens.ar_suffix_ids) or None,
            **(tokens.model_extra or {}),
        }
    }


def _critic_layout(sidecar: Sidecar, extra: dict[str, Any]) -> dict[str, Any]:
    kept = extra.pop("critic", {})
    if sidecar.ar_layer_index is None:
        return {"critic": kept} if kept else {}
    return {"critic": {"extraction_layer_index": sidecar.ar_layer_index, **kept}}


def _own_keys(sidecar: Sidecar) -> dict[str, Any]:
    stated = {key: getattr(sidecar, key) for key in _OWN_KEYS}
    plain: dict[str, Any] = orjson.loads(
        canonical_json({key: value for key, value in stated.items() if value not in (None, {})})
    )
    return plain


def _invalid(file: Path, error: ValidationError) -> SidecarError:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if place == "extraction.layer_index" and first["type"] in ("missing", "int_type"):
        found, expected = (
            "states no layer",
            "extraction_layer_index (or extraction.layer_index), counted from 0",
        )
    elif first["type"] == "missing":
        found, expected = f"has no {place}", f"{place} to be stated"
    else:
        found, expected = f"has {place} = {shortened(first['input'])}", _lower_first(first["msg"])
    return SidecarError(
        f"{file} {found}",
        expected=expected,
        consequence="vectors of another layer, norm or width would be read as if they fitted",
        remedy="correct the key, or use the sidecar that came with the model or the data",
    )


def _lower_first(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
