"""GGUF files: checked before they are parsed, dequantised once, saved as safetensors with a right tokenizer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 2 and 3, little endian).
transformers reads the tensors; this module repairs what it leaves wrong: the pre-tokenizer (it ignores
`tokenizer.ggml.pre`), the control tokens, and hyperparameters that went through float32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from dragoman.errors import DragomanError, SubjectError
from dragoman.runs import check_disk_space
from dragoman.subjects.pretokenizers import repaired_tokenizer
from dragoman.subjects.quiet import quiet_transformers

CONVERTER_VERSION = 1
"""Part of the cache key: raise it when the conversion gives other files."""

MAX_METADATA_ENTRIES = 4096
MAX_TENSORS = 65_536
MAX_STRING_BYTES = 2**24
MAX_ARRAY_ITEMS = 2**24
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself.

    Attributes:
        metadata: key → scalar, string or list.
        num_parameters: elements over all tensors.
        tensor_bytes: bytes that the tensors take in the file.
    """

    metadata: dict[str, Any]
    num_parameters: int
    tensor_bytes: int

    @property
    def architecture(self) -> str:
        """`general.architecture`, for example "llama"."""
        return str(self.metadata.get("general.architecture", ""))


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check a GGUF header; every count and length is bounded by the file before it is believed.

    Raises:
        SubjectError: not GGUF, big endian, version 1, absurd counts, or shorter than its tensors need.
    """
    if not path.is_file():
        raise SubjectError(
            f"there is no file {path}",
            expected="a GGUF file",
            consequence="there would be no model to read",
            remedy="check the path",
        )
    with path.open("rb") as stream:
        reader = _BoundedReader(stream, path, path.stat().st_size)
        return _parse_header(reader)


class _BoundedReader:
    """Reads little-endian values and refuses to pass the end of the file."""

    def __init__(self, stream: BinaryIO, path: Path, size: int) -> None:
        self.stream = stream
        self.path = path
        self.size = size

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.stream.tell():
            raise damaged_gguf(
                self.path, f"ends at byte {self.size} inside {what}, which needs {count} bytes more"
            )
        return self.stream.read(count)

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def count(self, what: str, limit: int) -> int:
        value = int(self.number("Q", what))
        if value > limit:
            raise damaged_gguf(self.path, f"claims {value} as {what}, more than the limit of {limit}")
        return value

    def string(self, what: str) -> str:
        length = self.count(f"the length of {what}", MAX_STRING_BYTES)
        return self.take(length, what).decode("utf-8", errors="replace")

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        raise damaged_gguf(self.path, f"has the unknown value type {kind} in {what}")

    def _array(self, what: str) -> list[Any]:
        kind = self.number("I", what)
        length = self.count(f"the number of items of {what}", MAX_ARRAY_ITEMS)
        if kind in _SCALARS:
            code = f"<{length}{_SCALARS[kind]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code), what)))
        if kind == _ARRAY:
            raise damaged_gguf(self.path, f"has nested arrays in {what}")
        return [self.value(kind, what) for _ in range(length)]


def damaged_gguf(path: Path, found: str) -> SubjectError:
    """The error for a GGUF file that cannot be trusted; `found` continues the sentence "FILE ..."."""
    return SubjectError(
        f"{path} {found}",
        expected="a complete GGUF file of version 2 or 3",
        consequence="the model would be loaded with wrong or missing weights",
        remedy="download or copy the file again and compare its size and hash with the source",
    )


def _parse_header(reader: _BoundedReader) -> GgufHeader:
    magic = reader.take(4, "the magic bytes")
    if magic != b"GGUF":
        raise damaged_gguf(reader.path, f"begins with {magic!r} instead of b'GGUF'")
    version = reader.number("I", "the version")
    if version not in (2, 3):
        raise damaged_gguf(reader.path, f"has the GGUF version {version}")
    num_tensors = reader.count("the number of tensors", MAX_TENSORS)
    num_entries = reader.count("the number of metadata entries", MAX_METADATA_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.string("a metadata key")
        metadata[key] = reader.value(reader.number("I", key), key)
    return _check_tensors(reader, num_tensors, metadata)


def _check_tensors(reader: _BoundedReader, num_tensors: int, metadata: dict[str, Any]) -> GgufHeader:
    parameters = 0
    ends: list[tuple[int, int]] = []
    for _ in range(num_tensors):
        name = reader.string("a tensor name")
        num_dims = int(reader.number("I", name))
        if num_dims > 8:
            raise damaged_gguf(reader.path, f"gives the tensor {name!r} {num_dims} dimensions")
        dims = [int(reader.number("Q", name)) for _ in range(num_dims)]
        kind, offset = int(reader.number("I", name)), int(reader.number("Q", name))
        elements = math.prod(dims)
        ends.append((offset, _tensor_bytes(reader.path, name, elements, kind)))
        parameters += elements
    alignment = int(metadata.get("general.alignment", 32)) or 32
    start = -(-reader.stream.tell() // alignment) * alignment
    needed = start + max((offset + size for offset, size in ends), default=0)
    if needed > reader.size:
        raise damaged_gguf(reader.path, f"has {reader.size} bytes, but its tensors need {needed}")
    return GgufHeader(metadata, parameters, sum(size for _, size in ends))


def _tensor_bytes(path: Path, name: str, elements: int, kind: int) -> int:
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise damaged_gguf(path, f"stores the tensor {name!r} in the unknown type {kind}") from None
    return -(-elements // block) * block_bytes


def convert_gguf(path: Path, folder: Path, progress: Callable[[int, int, str], None] | None = None) -> None:
    """Dequantise a GGUF file into a model folder: config, float32 safetensors, tokenizer.

    Args:
        path: the GGUF file.
        folder: an existing, empty folder.
        progress: reports the three parts, unit "steps".

    Raises:
        SubjectError: damaged file, or an architecture that transformers does not read.
        ResourceError: too little disk.
    """
    report = progress or (lambda done, total, unit: None)
    header = read_gguf_header(path)
    check_disk_space(folder, 4 * header.num_parameters + 2**26)
    report(0, 3, "steps")
    model = _load_model(path, header)
    report(1, 3, "steps")
    _save_model(model, folder)
    report(2, 3, "steps")
    tokenizer = repaired_tokenizer(_load_tokenizer(path, header), header.metadata)
    tokenizer.save_pretrained(folder)
    report(3, 3, "steps")


def _load_model(path: Path, header: GgufHeader) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        raise _unreadable(path, header, error) from error


def _load_tokenizer(path: Path, header: GgufHeader) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        raise _unreadable(path, header, error) from error


def _unreadable(path: Path, header: GgufHeader, error: Exception) -> DragomanError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return SubjectError(
        f"{path.name} of architecture {header.architecture!r} cannot be converted: {reason}",
        expected="a GGUF model that transformers can read (llama, mistral, qwen2, qwen3, gemma3, gpt2 ...)",
        consequence="the model would be loaded with wrong or missing weights",
        remedy="use the model's safetensors instead (a folder or hf:ORG/NAME)",
    )


def _save_model(model: Any, folder: Path) -> None:
    from safetensors.torch import save_file

    config = model.config
    # The weights are plain float32 now; save_pretrained would refuse while the config says otherwise.
    for stale in ("quantization_config", "_pre_quantization_dtype", "_model_name_or_path"):
        if hasattr(config, stale):
            delattr(config, stale)
    config.architectures = [type(model).__name__]
    config._name_or_path = ""
    config.dtype = torch.float32
    _undo_float32_noise(config)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _undo_float32_noise(config: Any) -> None:
    """Give back 1e-05 for 9.999999747378752e-06: a decimal that a float32 in the file stood for."""
    for key, value in vars(config).items():
        if isinstance(value, float) and math.isfinite(value) and value != 0.0:
            short = float(f"{value:.7g}")
            if np.float32(short) == np.float32(value):
                setattr(config, key, short)
