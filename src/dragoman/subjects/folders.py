"""Checks of a local model folder before anything in it is parsed as a model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from dragoman.errors import SubjectError

MAX_JSON_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 100 * 2**20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.msgpack", "*.h5")


def check_model_folder(folder: Path, *, trust_remote_code: bool) -> None:
    """Refuse a folder that is no model, would run code, or holds damaged weights.

    Args:
        folder: a local model folder.
        trust_remote_code: whether the caller allows code that the model brings along.

    Raises:
        SubjectError: no config.json, an adapter, pickle weights only, damaged weights, foreign code.
    """
    config = read_config(folder)
    if config.get("auto_map") and not trust_remote_code:
        raise SubjectError(
            f"{folder} brings its own Python code ({', '.join(sorted(config['auto_map']))})",
            expected="a model whose architecture is part of transformers",
            consequence="code from the model's folder would run on this machine",
            remedy="read that code first; then load it from Python with trust_remote_code=True",
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        _refuse_without_safetensors(folder)
    for path in weights:
        check_safetensors(path)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder.

    Raises:
        SubjectError: missing, too large, or not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        adapter = (folder / "adapter_config.json").is_file()
        raise SubjectError(
            f"{folder} has no config.json" + (", only an adapter" if adapter else ""),
            expected="a model folder with config.json, safetensors and a tokenizer",
            consequence="the architecture would have to be guessed",
            remedy="name the base model as subject and the adapter as part of a pair"
            if adapter
            else "point to the folder that save_pretrained wrote, or use hf:ORG/NAME",
        )
    if path.stat().st_size > MAX_JSON_BYTES:
        raise _bad_config(path, f"has {path.stat().st_size} bytes")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise _bad_config(path, f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise _bad_config(path, "is not a JSON object")
    return config


def _bad_config(path: Path, found: str) -> SubjectError:
    return SubjectError(
        f"{path} {found}",
        expected=f"a JSON object of at most {MAX_JSON_BYTES // 2**20} MiB",
        consequence="the model would be built wrongly or not at all",
        remedy="copy the file again from the source of the model",
    )


def _refuse_without_safetensors(folder: Path) -> None:
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    found = f"only {', '.join(pickles[:3])}" if pickles else "no weights"
    raise SubjectError(
        f"{folder} holds {found}",
        expected="weights as .safetensors",
        consequence="a pickle can run any code when it is opened"
        if pickles
        else "there would be nothing to load",
        remedy="convert the weights to safetensors where you trust them, or download the safetensors variant"
        if pickles
        else "download the model again with its weights",
    )


def check_safetensors(path: Path) -> None:
    """Refuse a safetensors file whose header is too large or points past its end.

    Format: 8 bytes little-endian header length, JSON header, tensor bytes.

    Raises:
        SubjectError: truncated, oversized or malformed.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise _damaged(path, f"has {size} bytes and claims a header of {length}")
        try:
            header = json.loads(stream.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, f"has a header that is not valid: {error}") from error
    needed = 8 + length + max(ends, default=0)
    if needed != size:
        raise _damaged(path, f"has {size} bytes, but its header describes {needed}")


def _damaged(path: Path, found: str) -> SubjectError:
    return SubjectError(
        f"{path} {found}",
        expected="a complete safetensors file",
        consequence="the model would be loaded with wrong or missing weights",
        remedy="copy or download the file again",
    )
