"""Where and how a model computes: device, dtype, attention; by a rule, or by a short measurement.

The rule:

    device     cuda where there is one, else mps, else cpu
    dtype      cuda: bfloat16 where the GPU has it, else float16
               mps:  bfloat16 where the system has it, else float32
                     (float16 overflows on the massive activations of the first token)
               cpu:  bfloat16 where the CPU multiplies it natively (AVX512-BF16 or AMX), else float32
    attention  what transformers picks for the model: SDPA where supported, else eager

Backward through SDPA in bfloat16 on a CPU can be three times slower than eager attention, or faster,
depending on the CPU: `measure_attention` decides that in a few seconds, and a run folder stores the
answer (`to_json`) so that a resumed run computes the same way.
"""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dragoman.errors import SubjectError

if TYPE_CHECKING:
    from dragoman.subjects.subject import Subject

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True)
class Compute:
    """A decision, with its reason.

    Attributes:
        dtype: dtype of weights and activations.
        attention: attention implementation of transformers, or "auto" until a model is loaded.
        device: where the model is.
        reason: rule or measurement behind it, for provenance.
    """

    dtype: torch.dtype
    attention: str
    device: torch.device
    reason: str

    def to_json(self) -> dict[str, str]:
        """A JSON-able record; `from_json` is its inverse."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": self.attention,
            "device": str(self.device),
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Compute:
        """Rebuild a stored decision.

        Raises:
            SubjectError: a missing key or an unknown value.
        """
        missing = {"dtype", "attention", "device"} - set(record)
        if missing:
            raise SubjectError(
                f"a stored compute decision lacks {', '.join(sorted(missing))}",
                expected="dtype, attention, device and reason",
                consequence="a resumed run would compute in another way than it began",
                remedy="start the run in a new folder",
            )
        return cls(
            dtype=parse_dtype(record["dtype"]),
            attention=_check_attention(record["attention"]),
            device=parse_device(record["device"]),
            reason=str(record.get("reason", "stored")),
        )


def choose_compute(
    device: str | torch.device = "auto", dtype: str | torch.dtype = "auto", attention: str = "auto"
) -> Compute:
    """Decide by the rule of this module's head; what is not "auto" is kept.

    Raises:
        SubjectError: unknown or absent device, unknown dtype or attention implementation.
    """
    place = best_device() if str(device) == "auto" else parse_device(device)
    if isinstance(dtype, str) and dtype == "auto":
        kind, reason = _best_dtype(place)
    else:
        kind, reason = parse_dtype(dtype), "asked for"
    return Compute(kind, _check_attention(attention), place, f"{place.type}: {reason}")


def best_device() -> torch.device:
    """The cuda or mps device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def parse_device(device: str | torch.device) -> torch.device:
    """A device that exists on this machine.

    Raises:
        SubjectError: unknown name, or no such device here.
    """
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise _device_error(f"{str(device)!r} names no device") from None
    if parsed.type not in ("cpu", "cuda", "mps"):
        raise _device_error(f"the device {parsed} is not supported")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise _device_error(
            f"{parsed} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices"
        )
    if parsed.type == "mps" and not torch.backends.mps.is_available():
        raise _device_error("mps was asked for, but torch sees none")
    return parsed


def _device_error(found: str) -> SubjectError:
    return SubjectError(
        found,
        expected="auto, cpu, cuda, cuda:N or mps",
        consequence="the model could not be placed",
        remedy="use --device auto, or install a torch build for your accelerator",
    )


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """One of float32, bfloat16, float16.

    Raises:
        SubjectError: anything else.
    """
    name = str(dtype).removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name]
    raise SubjectError(
        f"the dtype {name!r} was asked for",
        expected=f"auto or one of {', '.join(DTYPES)}",
        consequence="the model could not be loaded",
        remedy="choose one of them",
    )


def _check_attention(attention: str) -> str:
    if attention == "auto" or attention in ATTENTIONS:
        return attention
    raise SubjectError(
        f"the attention implementation {attention!r} was asked for",
        expected=f"auto or one of {', '.join(ATTENTIONS)}",
        consequence="transformers would try to download a kernel of that name",
        remedy="choose one of them",
    )


def _best_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU has bfloat16"
        return torch.float16, "the GPU has no bfloat16"
    if device.type == "mps":
        if _mps_has_bfloat16(device):
            return torch.bfloat16, "the system has bfloat16"
        return torch.float32, "no bfloat16, and float16 overflows on the first token"
    if cpu_has_bfloat16():
        return torch.bfloat16, "the CPU multiplies bfloat16 natively"
    return torch.float32, "the CPU would emulate bfloat16"


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 dot products (AVX512-BF16 or AMX)."""
    if hasattr(torch.cpu, "get_capabilities"):
        capability = torch.cpu.get_capabilities()
        return bool(capability.get("avx512_bf16") or capability.get("amx_bf16"))
    # torch before 2.11 says it through private functions only.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)


def _mps_has_bfloat16(device: torch.device) -> bool:
    try:
        one = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        return bool(torch.isfinite(one @ one).all())
    except (RuntimeError, TypeError):
        return False


def measure_attention(
    subject: Subject, training: bool, *, batch: int = 4, seq: int = 64, repeats: int = 2
) -> Compute:
    """Time eager against SDPA on this subject and machine; a few seconds.

    The subject's own implementation is restored afterwards; load the subject (or build the trainee)
    with the returned decision.

    Args:
        subject: the model to time.
        training: include the backward pass.
        batch: rows of the timed batch.
        seq: tokens a row.
        repeats: timed passes; the fastest counts, as other work only ever slows one down.

    Returns:
        The faster way, with both figures (tokens a second) as its reason.
    """
    ids = torch.arange(batch * seq, device=subject.compute.device).reshape(batch, seq) % subject.vocab_size
    before = str(subject.text_config._attn_implementation)
    speed: dict[str, float] = {}
    try:
        for attention in ("sdpa", "eager"):
            subject.model.set_attn_implementation(attention)
            speed[attention] = ids.numel() / _fastest_pass(subject, ids, training, repeats)
    finally:
        subject.model.set_attn_implementation(before)
    best = max(speed, key=lambda name: speed[name])
    work = "forward and backward" if training else "forward"
    figures = ", ".join(f"{name} {tokens:.0f}" for name, tokens in speed.items())
    reason = f"{subject.compute.device.type}: measured {work}, tokens/s: {figures} ({platform.machine()})"
    return replace(subject.compute, attention=best, reason=reason)


def _fastest_pass(subject: Subject, ids: torch.Tensor, training: bool, repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        with torch.set_grad_enabled(training):
            embeds = subject.embedding(ids).detach().requires_grad_(training)
            out = subject.text_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
            if training:
                out.float().square().mean().backward()
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    # The first pass pays for kernels and caches.
    return min(times[1:])
