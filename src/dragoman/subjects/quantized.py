"""Quantised loading behind one lazy door."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

from dragoman.errors import SubjectError
from dragoman.subjects.compute import Compute


def quantization_config(kind: Literal["int8", "int4"], compute: Compute) -> Any:
    """The transformers config for loading in 8 or 4 bits.

    bitsandbytes is preferred where it is installed, torchao is the second choice. Weights only: hidden
    states stay in the compute dtype.

    Args:
        kind: "int8" or "int4".
        compute: where and in which dtype the model computes.

    Raises:
        SubjectError: neither library is installed, or the kind is unknown.
    """
    if kind not in ("int8", "int4"):
        raise SubjectError(
            f"the quantisation {kind!r} was asked for",
            expected="int8 or int4",
            consequence="the model could not be loaded",
            remedy="choose one of them, or none",
        )
    if find_spec("bitsandbytes") is not None:
        return _bitsandbytes(kind, compute)
    if find_spec("torchao") is not None:
        return _torchao(kind)
    raise SubjectError(
        f"{kind} was asked for, but neither bitsandbytes nor torchao is installed",
        expected="one of them",
        consequence="the model could not be quantised",
        remedy="install one: pip install 'dragoman[quantized]' (or: pip install torchao)",
    )


def _bitsandbytes(kind: str, compute: Compute) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute.dtype
    )


def _torchao(kind: str) -> Any:
    from torchao.quantization import (  # pyright: ignore[reportMissingImports]  (optional dependency)
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
    )
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig())
