"""Finds the parts of a causal language model by structure, not by a list of model types.

A text model is the module that owns, as direct children, both the input embedding and the list of
blocks; everything else follows from it. This holds for bare text models (Llama, Qwen, OLMo, GPT-2,
GPT-NeoX, Phi-3, Granite ...) and for multimodal wrappers, which keep the text model one or two levels
deeper. The embedding gain is measured, because no attribute tells it reliably: Gemma multiplies by
sqrt(d_model) inside the embedding module, Granite multiplies after it, T5-like models not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dragoman.errors import SubjectError

GAIN_TOLERANCE = 0.02
"""Relative spread allowed when a gain is measured: bf16 rounds each product to 8 bits of mantissa."""


@dataclass(frozen=True)
class Family:
    """Where the parts of a model are, and how its embedding reaches block 0.

    Attributes:
        model_type: `model_type` of the text config, for messages and provenance.
        text_model: module that owns embedding, blocks and final norm; its forward takes token ids.
        blocks: the residual blocks; `blocks[layer_index]` is the hooked one.
        final_norm: norm applied after the last block.
        embedding: the input embedding module.
        final_norm_name: attribute of `text_model` that holds `final_norm`.
        blocks_name: attribute of `text_model` that holds `blocks`.
        has_per_layer_inputs: blocks receive a second, per-token input of their own (Gemma 4).
    """

    model_type: str
    text_model: nn.Module
    blocks: nn.ModuleList
    final_norm: nn.Module
    embedding: nn.Module
    final_norm_name: str
    blocks_name: str
    has_per_layer_inputs: bool


@dataclass(frozen=True)
class EmbeddingGain:
    """What happens to an embedding row before block 0 reads it.

    Attributes:
        inside: output of the embedding module / raw row of its weight (Gemma: sqrt(d_model)).
        after: input of block 0 / output of the embedding module, position vectors aside (Granite).
    """

    inside: float
    after: float

    @property
    def total(self) -> float:
        """Input of block 0 / raw row."""
        return self.inside * self.after


def text_config(model: nn.Module) -> Any:
    """The config of the text part, also inside a multimodal wrapper."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def find_family(model: nn.Module) -> Family:
    """Locate text model, blocks, final norm and embedding.

    Args:
        model: a transformers causal language model or a multimodal wrapper around one.

    Raises:
        SubjectError: a part is missing or ambiguous; the message names what was found.
    """
    config = text_config(model)
    embedding: nn.Module = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]  (transformers method)
    text_model = _owner_of(model, embedding)
    blocks_name, blocks = _find_blocks(text_model, int(config.num_hidden_layers))
    _refuse_parallel_streams(config)
    norm_name, norm = _find_final_norm(text_model, blocks_name, d_model=_width(embedding))
    return Family(
        model_type=str(config.model_type),
        text_model=text_model,
        blocks=blocks,
        final_norm=norm,
        embedding=embedding,
        final_norm_name=norm_name,
        blocks_name=blocks_name,
        has_per_layer_inputs=bool(getattr(config, "hidden_size_per_layer_input", 0)),
    )


def _width(embedding: nn.Module) -> int:
    return int(embedding.weight.shape[1])  # pyright: ignore[reportIndexIssue]  (an embedding has a weight matrix)


def _owner_of(model: nn.Module, embedding: nn.Module) -> nn.Module:
    owners = [m for m in model.modules() if any(child is embedding for child in m.children())]
    owners = [m for m in owners if any(isinstance(child, nn.ModuleList) for child in m.children())]
    if len(owners) == 1:
        return owners[0]
    raise SubjectError(
        f"{type(model).__name__} has {len(owners)} modules that own its input embedding and a list of blocks",
        expected="exactly one, as in every decoder-only language model",
        consequence="the wrong part of the model would be captured",
        remedy="use a decoder-only model; encoder-decoder models are not supported",
    )


def _find_blocks(text_model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    lists = {name: m for name, m in text_model.named_children() if isinstance(m, nn.ModuleList)}
    fitting = {name: m for name, m in lists.items() if len(m) == num_layers}
    if "layers" in fitting:
        return "layers", fitting["layers"]
    if len(fitting) == 1:
        return next(iter(fitting.items()))
    sizes = {name: len(m) for name, m in lists.items()}
    raise SubjectError(
        f"{type(text_model).__name__} has the module lists {sizes}",
        expected=f"exactly one list of {num_layers} blocks, as its config says",
        consequence="a layer_index would name the wrong block",
        remedy="check that the weights and the config belong together",
    )


def _refuse_parallel_streams(config: Any) -> None:
    if getattr(config, "altup_num_inputs", 1) > 1:
        raise SubjectError(
            f"the blocks of {config.model_type} carry {config.altup_num_inputs} parallel streams (AltUp)",
            expected="one residual stream of width d_model",
            consequence="a captured vector would mix or drop streams",
            remedy="use Gemma 3 or Gemma 4 instead of Gemma 3n",
        )


def _find_final_norm(text_model: nn.Module, blocks_name: str, *, d_model: int) -> tuple[str, nn.Module]:
    children = list(text_model.named_children())
    after_blocks = children[[name for name, _ in children].index(blocks_name) + 1 :]
    norms = [(name, m) for name, m in after_blocks if _is_norm(m, d_model)]
    if len(norms) == 1:
        return norms[0]
    raise SubjectError(
        f"{type(text_model).__name__} has {len(norms)} norms of width {d_model} after its blocks",
        expected="exactly one final norm",
        consequence="a reconstructor could not be cut before the final norm",
        remedy="use a pre-norm decoder model (Llama, Qwen, Gemma, GPT-2, GPT-NeoX, OLMo-2 ...)",
    )


def _is_norm(module: nn.Module, d_model: int) -> bool:
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and (weight is None or tuple(weight.shape) == (d_model,))


class _StopForwardError(Exception):
    """Raised by our own hook to end a forward pass at block 0."""


@torch.no_grad()
def block0_input(
    family: Family, ids: list[int], replacement: Float[Tensor, "seq d_model"] | None = None
) -> Float[Tensor, "seq d_model"]:
    """What block 0 receives for these ids, optionally with the embedding module's output replaced."""
    seen: list[Tensor] = []

    def replace(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return None if replacement is None else replacement.to(output)[None]

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        raise _StopForwardError

    hooks = [
        family.embedding.register_forward_hook(replace),
        family.blocks[0].register_forward_pre_hook(stop, with_kwargs=True),
    ]
    device = next(family.embedding.parameters()).device
    try:
        family.text_model(input_ids=torch.tensor([ids], device=device), use_cache=False)
    except _StopForwardError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0][0]


@torch.no_grad()
def measure_gain(family: Family, sample_ids: list[int] | None = None) -> EmbeddingGain:
    """Measure the embedding gain with two probes of the embedding's output.

    Position vectors (GPT-2) are added after the embedding, so the gain after the module is the slope
    of block 0's input against the module's output, not a plain ratio.

    Args:
        family: parts of the model.
        sample_ids: ids to probe; default is a spread over the vocabulary.

    Raises:
        SubjectError: the path from embedding to block 0 is not a plain factor.
    """
    weight = family.embedding.weight
    assert isinstance(weight, Tensor)
    ids = sample_ids or [int(i) for i in torch.linspace(1, weight.shape[0] - 1, 16)]
    raw = weight[torch.tensor(ids, device=weight.device)].float()
    output = family.embedding(torch.tensor([ids], device=weight.device))[0].float()
    inside = _slope(raw, output, "inside the embedding module")

    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(len(ids), _width(family.embedding), generator=generator).to(weight.device)
    high, low = (block0_input(family, ids, sign * probe).float() for sign in (1.0, -1.0))
    # The slope is taken against the probe as the model's dtype holds it.
    held = probe.to(weight.dtype).float() if weight.is_floating_point() else probe
    after = _slope(2 * held, high - low, "between the embedding module and block 0")
    return EmbeddingGain(inside=inside, after=after)


def _slope(x: Float[Tensor, "n d_model"], y: Float[Tensor, "n d_model"], where: str) -> float:
    x, y = x.double(), y.double()
    slope = float((x * y).sum() / (x * x).sum().clamp_min(1e-30))
    residual = float((y - slope * x).norm() / y.norm().clamp_min(1e-30))
    if not residual <= GAIN_TOLERANCE or slope <= 0:
        raise SubjectError(
            f"{where} the embedding changes by more than a factor ({slope:.4g}, residual {residual:.3f})",
            expected=f"a plain positive factor, residual below {GAIN_TOLERANCE}",
            consequence="an injected vector would not reach block 0 as it was given",
            remedy="use a model without a norm or projection between embedding and block 0",
        )
    # Rounding of the dtype must not turn a gain of one into 0.9997.
    return 1.0 if abs(slope - 1.0) < 1e-3 else slope
