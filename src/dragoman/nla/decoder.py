"""A causal language model taken apart: hidden states behind a shared prefix, logits where they are needed.

Two savings, both exact. Logits are the most expensive matrix product of a small model, so the output head is
applied to gathered positions only. And every prompt starts with the same tokens, so these run once with batch
1 and their keys and values are expanded to the batch; gradients flow back through the expansion.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from dragoman.errors import SubjectError
from dragoman.shapes import HiddenStates, TokenIds

if TYPE_CHECKING:
    from dragoman.subjects import Subject

LOGIT_TOLERANCE = 0.05
"""Largest difference between this head and the model's own forward, in spreads of the logits (bf16)."""


class TextModel:
    """A bare text model with a cache, whatever the installed transformers calls its cache argument.

    Args:
        module: a transformers text model: embedding, blocks, final norm.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # transformers 5.24 renamed `past_key_values` to `cache`.
        names = inspect.signature(module.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.module.parameters()).device

    def hidden(self, ids: TokenIds, cache: Any | None = None, **kwargs: Any) -> HiddenStates:
        """States after the final norm; appends to the cache where one is given.

        Padding may stand on the right without a mask: with causal attention no real token sees it.
        """
        if cache is not None:
            kwargs[self._cache_name] = cache
        return self.module(input_ids=ids, use_cache=cache is not None, **kwargs).last_hidden_state

    def new_cache(self) -> DynamicCache:
        """An empty cache with the layer kinds that the model's config asks for."""
        config: Any = self.module.config
        return DynamicCache(config=config)

    def run_prefix(self, ids: Sequence[int]) -> DynamicCache | None:
        """Cache of a constant prefix, batch 1, to be expanded; None where nothing can be shared."""
        cache = self.new_cache()
        # A recurrent state is updated in place, through which no gradient can flow back to the prefix.
        recurrent = any(hasattr(layer, "update_recurrent_state") for layer in cache.layers)
        if not ids or (recurrent and torch.is_grad_enabled()):
            return None
        self.hidden(torch.tensor([list(ids)], device=self.device), cache)
        return cache


def expand_rows(cache: DynamicCache, batch: int) -> None:
    """Repeat a cache of batch 1 to `batch` rows, in place; gradients of the rows add up in the prefix."""
    keep_rows(cache, torch.zeros(batch, dtype=torch.long))


def keep_rows(cache: DynamicCache, rows: Int[Tensor, " kept"]) -> None:
    """Make these rows, in this order, the rows of a cache of any layer kinds, in place."""
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.reorder_cache(rows)


class Decoder:
    """The parts of a causal language model that a verbalizer needs.

    Args:
        subject: the frozen model, which says where its parts are.
        model: a copy of `subject.model` made by `adapters.share_structure` or `adapters.own_weights`.

    Raises:
        SubjectError: the output head does something to the logits that is not known here.
    """

    def __init__(self, subject: Subject, model: nn.Module) -> None:
        names = {id(module): name for name, module in subject.model.named_modules()}
        self.text = TextModel(model.get_submodule(names[id(subject.text_model)]))
        self.embedding = model.get_submodule(names[id(subject.embedding)])
        self._model = model
        self._head: nn.Module = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]  # transformers method
        config: Any = self.text.module.config
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._factor = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._check_head(subject.name)

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        """Next-token logits in the model's dtype, with its soft cap (Gemma) or factor (Granite, Cohere)."""
        logits = self._head(hidden)
        if self._factor != 1.0:
            logits = logits * self._factor
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @torch.no_grad()
    def _check_head(self, name: str) -> None:
        """Compare with the model's own forward once: measured, not listed by model type."""
        ids = torch.arange(4, 8, device=self.text.device)[None]
        expected = self._model(input_ids=ids).logits.float()
        found = self.logits(self.text.hidden(ids)).float()
        gap = float((found - expected).abs().max() / expected.std().clamp_min(1e-6))
        if not gap <= LOGIT_TOLERANCE:
            raise SubjectError(
                f"the logits of {name} differ by {gap:.3g} standard deviations from those of its output head",
                expected=f"at most {LOGIT_TOLERANCE}: a linear head with a soft cap or a factor",
                consequence="a verbalizer would be trained and read with wrong probabilities",
                remedy="report the model type; it needs an entry in dragoman.nla.decoder",
            )
