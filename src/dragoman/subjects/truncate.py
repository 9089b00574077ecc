"""The first blocks of a subject as a model of their own: the backbone of a reconstructor.

The text model computes masks, rotary tables and per-layer inputs itself, so a copy of it with fewer
blocks and without the final norm gives `hidden_states[layer_index + 1]` of the whole model exactly.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from dragoman.errors import SubjectError
from dragoman.shapes import AttentionMask, HiddenStates, TokenIds

if TYPE_CHECKING:
    from dragoman.subjects.families import Family
    from dragoman.subjects.subject import Subject


class TruncatedModel(nn.Module):
    """Blocks 0..layer_index of a subject with an identity final norm.

    Parameters and buffers are the subject's own tensors; modules are copies. Adapters and hooks that
    are put on this model therefore do not touch the subject, while an in-place change of a weight
    does: to train the weights themselves, `copy.deepcopy` this model first.

    Attributes:
        text_model: the shortened text model.
        layer_index: index of the last block, whose output is returned.
    """

    def __init__(self, text_model: nn.Module, layer_index: int) -> None:
        super().__init__()
        self.text_model = text_model
        self.layer_index = layer_index

    @property
    def config(self) -> Any:
        """Config of the shortened text model."""
        return self.text_model.config

    @property
    def embedding(self) -> nn.Module:
        """Input embedding; the same weight as the subject's."""
        return self.text_model.get_input_embeddings()  # pyright: ignore[reportCallIssue]  (transformers method)

    def forward(
        self,
        input_ids: TokenIds | None = None,
        attention_mask: AttentionMask | None = None,
        inputs_embeds: HiddenStates | None = None,
        **kwargs: Any,
    ) -> HiddenStates:
        """Output of block `layer_index` at every position, before any final norm."""
        output = self.text_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            **kwargs,
        )
        return output.last_hidden_state


def truncated_model(subject: Subject, layer_index: int) -> TruncatedModel:
    """Blocks 0..layer_index of a subject, sharing its weights.

    Args:
        subject: the model to cut; it is not changed.
        layer_index: the last block to keep, counted from 0.

    Returns:
        A model whose forward(input_ids | inputs_embeds, attention_mask) gives
        Float[Tensor, "batch seq d_model"], equal to the subject's block output.

    Raises:
        SubjectError: there is no such block.
    """
    check_layer_index(layer_index, subject.num_layers, subject.name)
    return TruncatedModel(_shortened(subject.family, layer_index), layer_index)


def check_layer_index(layer_index: int, num_layers: int, name: str) -> None:
    """Refuse a block that the subject does not have.

    Raises:
        SubjectError: outside 0..num_layers - 1; negative indices are refused too.
    """
    if not 0 <= layer_index < num_layers:
        raise SubjectError(
            f"layer_index {layer_index} was asked of {name}, which has {num_layers} blocks",
            expected=f"an index from 0 to {num_layers - 1}; block {num_layers - 1} is the last one",
            consequence="the vectors would come from another block than the sidecar says",
            remedy=f"choose a block, for example two thirds deep: {max(0, round(num_layers * 2 / 3))}",
        )


def _shortened(family: Family, layer_index: int) -> nn.Module:
    shell = _shallow_copy(family.text_model)
    kept = list(family.blocks)[: layer_index + 1]
    setattr(shell, family.blocks_name, nn.ModuleList(kept))
    setattr(shell, family.final_norm_name, nn.Identity())
    tensors = [*shell.parameters(), *shell.buffers()]
    # Copy every module and config but no tensor: deepcopy takes what stands in its memo as it is.
    short = copy.deepcopy(shell, {id(tensor): tensor for tensor in tensors})
    _shorten_config(short.config, layer_index + 1, family)
    return short.eval()


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A copy whose children can be exchanged without changing the original's."""
    shell = copy.copy(module)
    shell.__dict__["_modules"] = dict(module.__dict__["_modules"])
    # A placement hook would be bound to the original module and call its forward.
    shell.__dict__.pop("forward", None)
    return shell


def _shorten_config(config: Any, num_layers: int, family: Family) -> None:
    config.use_cache = False
    if family.has_per_layer_inputs:
        # The packed per-layer embedding is reshaped by the original number of layers; the loop over
        # blocks stops at the end of the shortened list anyway.
        return
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types)[:num_layers]


def shares_weights(truncated: TruncatedModel, subject: Subject) -> bool:
    """Whether every parameter of the truncated model is the subject's own tensor."""
    own = {id(p) for p in subject.model.parameters()}
    return all(id(p) in own for p in truncated.parameters())


__all__ = ["TruncatedModel", "check_layer_index", "shares_weights", "truncated_model"]
