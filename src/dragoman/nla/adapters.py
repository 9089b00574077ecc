"""Trainable copies of a frozen model: LoRA adapters, full copies, merging, saving and loading.

How memory is spent. A subject's tensors are shared by everything that reads it; nothing here ever writes
into them:

* `share_structure` copies the module tree and shares every tensor: a verbalizer with an unmerged adapter
  costs the adapter alone, and the subject neither sees the adapter nor the hooks of the copy.
* `merge_adapter` first gives each adapted linear layer a weight of its own: a merged model costs one copy of
  the linear layers and decodes faster than an unmerged one, so it is the default for
  inference.
* `own_weights` copies every tensor: full fine-tuning.

Adapters are stored in the format of the PEFT library (`adapter_config.json`, `adapter_model.safetensors`,
keys with the prefix `base_model.model.`), so `peft.PeftModel.from_pretrained` opens them as well.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dragoman.errors import ConfigError, PairError
from dragoman.runs import atomic_write_bytes, atomic_write_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
FULL_WEIGHTS = "model.safetensors"
FULL_INDEX = "model.safetensors.index.json"
_PEFT_PREFIX = "base_model.model."
_ADAPTER_NAME = "default"

_ADAPTER_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_IGNORED_KEYS = frozenset(
    {
        *("peft_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
        *("megatron_config", "megatron_core", "runtime_config"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config"),
    }
)
"""`auto_mapping` and `megatron_core` name code to import, the base model would be looked up on a hub, and how
the start values are drawn no longer matters."""
_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Start values that leave the base model as it is; `pissa`, `olora` and others move part of it away."""

M = TypeVar("M", bound=nn.Module)


def share_structure(module: M) -> M:
    """A copy of the module tree, with submodules and hooks of its own, that shares every tensor."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in module.parameters()}
    shared.update({id(tensor): tensor for tensor in module.buffers()})
    return copy.deepcopy(module, shared)


def own_weights(module: M, dtype: torch.dtype | None = None) -> M:
    """A copy of the module with tensors of its own (tied ones stay tied), all parameters trainable."""
    owned = copy.deepcopy(module)
    if dtype is not None:
        owned = owned.to(dtype)
    return owned.requires_grad_(True)


def linear_targets(model: nn.Module) -> list[str]:
    """Names of all linear layers inside the blocks, by their last component, sorted: PEFT's `all-linear`.

    PEFT's own shorthand works on `PreTrainedModel` only, and a truncated backbone is not one. The output head
    is left out as PEFT does: it lies outside the blocks.
    """
    names = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D | LoraLayer)
        and any(part.isdigit() for part in name.split("."))
    }
    return sorted(names)


def attach_lora(
    model: nn.Module,
    rank: int = 16,
    alpha: float = 32.0,
    *,
    targets: str | Iterable[str] = "all-linear",
    dropout: float = 0.0,
    dtype: torch.dtype | None = torch.float32,
    seed: int = 0,
) -> list[nn.Parameter]:
    """Put a fresh LoRA adapter on a model made by `share_structure`, in place; only the adapter is trainable.

    Args:
        model: the model; its other parameters are frozen.
        rank: width of the low-rank update.
        alpha: the update is scaled by alpha / rank.
        targets: "all-linear" or the last components of the module names to adapt.
        dropout: on the adapter's input.
        dtype: of the adapter's weights; None takes that of the layer they sit on (faster in bf16 on a CPU,
            then keep fp32 masters in the optimiser).
        seed: of the initialisation; equal seeds give equal adapters whatever ran before.

    Returns:
        The trainable parameters.

    Raises:
        ConfigError: the rank is not positive or no layer has one of the target names.
    """
    names = (
        linear_targets(model)
        if targets == "all-linear"
        else sorted({targets} if isinstance(targets, str) else targets)
    )
    present = set(linear_targets(model))
    if rank < 1 or not names or not set(names) <= present:
        raise ConfigError(
            f"a LoRA adapter of rank {rank} on {names or 'no layer'} was asked for",
            expected=f"a rank of at least 1 and targets out of {sorted(present)}",
            consequence="nothing or the wrong layers would be trained",
            remedy="use targets='all-linear' or names from the list",
        )
    # PEFT's annotations are narrower than what it takes: alpha may be a float.
    settings: dict[str, Any] = {"lora_alpha": alpha, "target_modules": names}
    config = LoraConfig(r=rank, lora_dropout=dropout, bias="none", **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, _ADAPTER_NAME)
    _finish_injection(model, dtype)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def has_adapter(model: nn.Module) -> bool:
    """Whether the model carries an unmerged adapter."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


@contextmanager
def adapter_disabled(model: nn.Module) -> Generator[None]:
    """Run the model as if it had no adapter (a KL reference that costs no memory)."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_adapter(model: nn.Module) -> None:
    """Add the adapter into linear weights that are then the model's own; the adapter layers go, in place."""
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, LoraLayer):
            continue
        adapted: Any = layer
        base: nn.Module = adapted.get_base_layer()
        # The weight may be the subject's: from here on this layer has its own.
        base.weight = nn.Parameter(adapted.weight.detach().clone(), requires_grad=False)
        adapted.merge(safe_merge=False)
        model.set_submodule(name, base)
    if hasattr(model, "peft_config"):
        del model.peft_config


def save_adapter(model: nn.Module, folder: Path, *, base_model: str | None = None) -> None:
    """Write the adapter of a model in PEFT's format; each file atomically.

    Args:
        model: carries an adapter from `attach_lora` or `load_weights(merge=False)`.
        folder: must exist.
        base_model: written to `base_model_name_or_path`.
    """
    # Set by PEFT beside the modules it put in.
    configs: dict[str, LoraConfig] = vars(model)["peft_config"]
    config = configs[_ADAPTER_NAME]
    state = _adapter_state(model)
    tensors = {_PEFT_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    described = {key: _jsonable(value) for key, value in config.to_dict().items()}
    described.update(base_model_name_or_path=base_model, inference_mode=True)
    atomic_write_bytes(folder / ADAPTER_WEIGHTS, save(tensors, metadata={"format": "pt"}))
    atomic_write_json(folder / ADAPTER_CONFIG, described)


def save_full(model: nn.Module, folder: Path) -> None:
    """Write all tensors of a model to `model.safetensors`, tied ones once, atomically."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().cpu().contiguous()
    atomic_write_bytes(folder / FULL_WEIGHTS, save(tensors, metadata={"format": "pt"}))


def save_weights(model: nn.Module, folder: Path, *, base_model: str | None = None) -> None:
    """Write an adapter where the model carries one, otherwise the full weights."""
    if has_adapter(model):
        save_adapter(model, folder, base_model=base_model)
    else:
        save_full(model, folder)


def load_weights(model: nn.Module, folder: Path, *, merge: bool, trainable: bool = False) -> None:
    """Bring a folder's adapter or full weights into a model made by `share_structure`, in place.

    Args:
        model: shares the subject's tensors; the tensors it changes become its own.
        folder: holds PEFT's two files, or `model.safetensors` (one file, or shards with an index).
        merge: add the adapter into the weights (faster; costs a copy of the linear layers).
        trainable: leave adapter (or all) weights trainable.

    Raises:
        PairError: no weights in the folder, a damaged file, or tensors that do not fit the model.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        _load_adapter(model, folder)
        if merge:
            merge_adapter(model)
    elif (folder / FULL_WEIGHTS).is_file() or (folder / FULL_INDEX).is_file():
        _load_full(model, folder)
        if trainable:
            model.requires_grad_(True)
    else:
        raise PairError(
            f"{folder} holds neither {ADAPTER_CONFIG} nor {FULL_WEIGHTS}",
            expected="a PEFT adapter or a full checkpoint in safetensors",
            consequence="the untrained base model would be taken for a trained half of a pair",
            remedy="point at the folder that training wrote, or convert other formats to safetensors",
        )
    if not trainable:
        model.requires_grad_(False)


def _load_adapter(model: nn.Module, folder: Path) -> None:
    config = _read_adapter_config(folder / ADAPTER_CONFIG)
    stored = _read_tensors(folder / ADAPTER_WEIGHTS)
    state = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in stored.items()}
    odd = next((name for name, tensor in state.items() if tensor.dtype not in _ADAPTER_DTYPES), None)
    if odd is not None:
        raise _misfit(folder, f"{odd} is of {state[odd].dtype}, not of float16, bfloat16, float32 or float64")
    largest = max((size for tensor in state.values() for size in tensor.shape), default=0)
    try:
        if max([config.r, *(config.rank_pattern or {}).values()]) > largest:
            raise _misfit(folder, f"a rank above {largest}, the largest size of any stored tensor")
        # The start values are overwritten; drawing them must not move the caller's generator.
        with torch.random.fork_rng(devices=[]):
            inject_adapter_in_model(config, model, _ADAPTER_NAME)
        # In the dtype it was trained in, whatever the base model runs in.
        _finish_injection(model, next(iter(state.values())).dtype if state else None)
        expected = _adapter_state(model)
        if state.keys() != expected.keys():
            odd = sorted(state.keys() ^ expected.keys())
            raise _misfit(folder, f"{len(odd)} adapter tensors without a counterpart, first {odd[0]}")
        for name, tensor in expected.items():
            if state[name].shape != tensor.shape:
                raise _misfit(folder, f"{name} of shape {tuple(state[name].shape)} for {tuple(tensor.shape)}")
        set_peft_model_state_dict(model, state, adapter_name=_ADAPTER_NAME)
    except (PairError, MemoryError):
        raise
    except Exception as error:
        # PEFT checks little of what a config says, and what is wrong there fails anywhere in it.
        raise _misfit(folder, f"PEFT cannot use {ADAPTER_CONFIG} ({_first_line(error)})") from error


def _adapter_state(model: nn.Module) -> dict[str, Tensor]:
    # PEFT's "auto" asks a model hub whether the vocabulary was resized; adapters here never hold embeddings.
    return get_peft_model_state_dict(model, adapter_name=_ADAPTER_NAME, save_embedding_layers=False)


def _load_full(model: nn.Module, folder: Path) -> None:
    stored: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        stored.update(_read_tensors(path))
    live = model.state_dict(keep_vars=True)
    renamed = _match_names(stored, live)
    names_of: dict[int, list[str]] = {}
    for name, tensor in live.items():
        names_of.setdefault(id(tensor), []).append(name)
    for names in names_of.values():
        source = next((name for name in names if name in renamed), None)
        if source is None:
            raise _misfit(folder, f"no tensor for {names[0]}")
        tensor = live[names[0]]
        if renamed[source].shape != tensor.shape:
            raise _misfit(
                folder, f"{source} of shape {tuple(renamed[source].shape)} for {tuple(tensor.shape)}"
            )
        fresh = nn.Parameter(renamed[source].to(tensor.device, tensor.dtype), requires_grad=False)
        for name in names:  # tied tensors stay tied
            _set_tensor(model, name, fresh if isinstance(tensor, nn.Parameter) else fresh.data)


def _match_names(stored: dict[str, Tensor], live: Iterable[str]) -> dict[str, Tensor]:
    """A checkpoint's tensors by the model's names: releases differ in the prefix before them."""
    wanted = set(live)
    prefixes = ["", "model.", "language_model.", "language_model.model.", "model.language_model."]
    candidates = [{name.removeprefix(p): t for name, t in stored.items()} for p in prefixes]
    candidates += [{p + name: t for name, t in stored.items()} for p in prefixes[1:]]
    return max(candidates, key=lambda renamed: len(wanted & renamed.keys()))


def _weight_files(folder: Path) -> list[Path]:
    if (folder / FULL_WEIGHTS).is_file():
        return [folder / FULL_WEIGHTS]
    index = _read_json(folder / FULL_INDEX)
    names = sorted({str(name) for name in index.get("weight_map", {}).values()})
    if not names or any(Path(name).name != name for name in names):
        raise _misfit(folder, f"{FULL_INDEX} names {names or 'no files'}, not plain file names")
    return [folder / name for name in names]


def _set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, tensor)


def _finish_injection(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Freeze everything but the adapter and give its weights their dtype."""
    model.requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for part in (layer.lora_A, layer.lora_B):
                if dtype is not None:
                    part.to(dtype)
                part.requires_grad_(True)


def _read_adapter_config(path: Path) -> LoraConfig:
    described = _read_json(path)
    if described.get("peft_type") != "LORA":
        raise _misfit(path.parent, f"a PEFT adapter of type {described.get('peft_type')!r}, not LORA")
    start = described.get("init_lora_weights", True)
    if start not in _STARTS:
        raise _misfit(path.parent, f"an adapter that began as {start!r}, on a base model changed for it")
    known = LoraConfig.__dataclass_fields__.keys()
    kept: dict[str, Any] = {k: v for k, v in described.items() if k in known and k not in _IGNORED_KEYS}
    try:
        return LoraConfig(**kept)
    except Exception as error:
        found = f"{path.name} does not describe a LoRA adapter ({_first_line(error)})"
        raise _misfit(path.parent, found) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _misfit(path.parent, f"{path.name} is not readable JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise _misfit(path.parent, f"{path.name} is not a JSON object")
    return parsed


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _misfit(path.parent, f"{path.name} is damaged or missing ({error})") from error
    odd = not_finite(tensors)
    if odd is not None:
        raise _misfit(path.parent, f"{path.name} holds NaN or infinity in {odd}")
    return tensors


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity, or None."""
    # float(): eight-bit floats know no isfinite.
    return next((name for name, tensor in tensors.items() if not bool(tensor.float().isfinite().all())), None)


def _misfit(folder: Path, found: str) -> PairError:
    return PairError(
        f"{folder}: {found}",
        expected="weights that fit the subject this pair was trained on, tensor by tensor",
        consequence="part of the model would stay untrained and read nonsense",
        remedy="check that the subject is the pair's base model, and download or train the folder again",
    )


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if value is None or isinstance(value, bool | int | float | str | list):
        return value
    return str(getattr(value, "value", value))
