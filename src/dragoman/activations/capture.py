"""Raw residual-stream vectors at the outputs of chosen blocks.

`layer_index` K means the output of block K as the next block receives it. `output_hidden_states` is not
used: its last entry is taken after the final norm, so that for the last block it is another vector; it also
runs every block and keeps every state.

One forward of the text model (no language-model head, no key-value cache) runs per batch and is left by a
private exception raised in the hook of the deepest block, so that no later block runs whatever the family.
Sequences are batched by length and padded on the right: causal attention keeps pads out of every earlier
position and the default position ids of all supported families are right, so no explicit ones are passed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from dragoman.errors import ConfigError, ResourceError, SubjectError, TextError
from dragoman.runs import Progress
from dragoman.shapes import AttentionMask, HiddenStates, TokenIds
from dragoman.subjects import Subject

_PAD_ID = 0
"""Any valid id does: pads are masked and stand after everything that is read."""


@dataclass(frozen=True)
class Captured:
    """What one sequence gave.

    Attributes:
        vectors: for each layer_index the raw vectors, [positions, d_model] float32 on the CPU, in the
            order of `positions`. Rows of one batch share their memory.
        positions: the positions read, counted from 0.
    """

    vectors: dict[int, Float32[Tensor, "positions d_model"]]
    positions: list[int]


class _DeepestBlockReachedError(Exception):
    """Leaves the forward; never escapes this module."""


def capture(
    subject: Subject,
    sequences: Sequence[Sequence[int]],
    layers: Sequence[int],
    positions: Sequence[Sequence[int]],
    *,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
) -> list[Captured]:
    """Read the outputs of blocks at chosen positions, in one truncated forward per batch.

    Values are those a plain forward hook on the untouched model's block sees, bit for bit in float32 given
    the same batch. Batch mates change them by rounding only. Nothing is normalised.

    Args:
        subject: the model, in eval mode.
        sequences: token ids of each text, as the model receives them.
        layers: layer_index of each block to read; order and repetition do not matter.
        positions: for each sequence the positions to read; sequences with none are not run.
        batch_tokens: most tokens of one forward, pads included. A longer sequence runs alone.
        progress: called after each batch with tokens done and in total, pads not counted.

    Returns:
        One `Captured` per sequence, in the order given.

    Raises:
        ConfigError: a layer_index the subject does not have, no layer, or `batch_tokens` below 1.
        TextError: a position outside its text, a text longer than the model takes, an id outside the
            vocabulary.
        SubjectError: the model is in training mode or a block's output is not a hidden state.
        ResourceError: the accelerator's memory does not hold one batch.
    """
    wanted = _check_layers(subject, layers, batch_tokens)
    _check_sequences(subject, sequences, positions)
    captured = [_nothing(wanted, subject.d_model) for _ in sequences]
    lengths = {i: len(sequences[i]) for i, chosen in enumerate(positions) if len(chosen)}
    total, done = sum(lengths.values()), 0
    for rows in plan_batches(lengths, batch_tokens, mixing_limit=_mixing_limit(subject.text_model)):
        input_ids, mask = _pad([sequences[i] for i in rows])
        sites = _flat_sites([positions[i] for i in rows])
        gathered = _read_batch(subject, input_ids, mask, wanted, sites)
        for i, vectors in zip(rows, _split(gathered, [len(positions[i]) for i in rows]), strict=True):
            captured[i] = Captured(vectors, [int(p) for p in positions[i]])
        done += sum(lengths[i] for i in rows)
        if progress is not None:
            progress(done, total, "tokens")
    return captured


def plan_batches(
    lengths: Mapping[int, int], batch_tokens: int, *, mixing_limit: float = math.inf
) -> list[list[int]]:
    """Group sequences of similar length, longest first, so that too little memory shows at once.

    Args:
        lengths: tokens of each sequence, by the sequence's index.
        batch_tokens: most tokens of one batch, pads included; a longer sequence stands alone.
        mixing_limit: sequences longer than this share a batch only with their equals.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(lengths, key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        fits = bool(batches) and (len(batches[-1]) + 1) * longest <= batch_tokens
        if fits and (length == longest or longest <= mixing_limit):
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = length
    return batches


def _check_layers(subject: Subject, layers: Sequence[int], batch_tokens: int) -> list[int]:
    wanted = sorted(set(layers))
    outside = [k for k in wanted if not 0 <= k < subject.num_layers]
    if outside or not wanted:
        raise ConfigError(
            f"layer_index {outside[0]} was asked for" if outside else "no layer was asked for",
            expected=f"blocks 0 to {subject.num_layers - 1} of {subject.name} (counted from 0)",
            consequence="another state than the one meant would be read",
            remedy="choose a layer_index in this range; block K is hidden_states[K + 1] elsewhere",
        )
    if batch_tokens < 1:
        raise ConfigError(
            f"batch_tokens is {batch_tokens}",
            expected="at least 1",
            consequence="no sequence would fit into a batch",
            remedy="leave the default of 4096 or give a positive number of tokens",
        )
    if subject.text_model.training:
        raise SubjectError(
            f"{subject.name} is in training mode",
            expected="eval mode",
            consequence="dropout would add noise to every vector",
            remedy="call subject.model.eval() before capturing",
        )
    return wanted


def _check_sequences(
    subject: Subject, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
) -> None:
    if len(sequences) != len(positions):
        raise TextError(
            f"{len(sequences)} sequences came with {len(positions)} lists of positions",
            expected="one list of positions a sequence",
            consequence="vectors would be filed under other texts",
            remedy="give an empty list for a sequence that is not to be read",
        )
    for index, (ids, chosen) in enumerate(zip(sequences, positions, strict=True)):
        if not len(chosen):
            continue
        if min(chosen) < 0 or max(chosen) >= len(ids):
            raise TextError(
                f"positions {min(chosen)} to {max(chosen)} were asked for in sequence {index} "
                f"of {len(ids)} tokens",
                expected=f"positions from 0 to {len(ids) - 1}" if len(ids) else "a text that is not empty",
                consequence="another token than the one meant would be read",
                remedy="choose positions inside the text",
            )
        if len(ids) > subject.max_positions:
            raise TextError(
                f"sequence {index} has {len(ids)} tokens",
                expected=f"at most {subject.max_positions}, what {subject.name} was built for",
                consequence="positions beyond that are meaningless to the model",
                remedy="cut the text into passages",
            )


def _nothing(layers: list[int], d_model: int) -> Captured:
    return Captured({k: torch.empty(0, d_model) for k in layers}, [])


def _mixing_limit(text_model: nn.Module) -> float:
    """Length above which rotary frequencies depend on the longest sequence of the batch, or infinity.

    `longrope` (Phi-3) and `dynamic` scaling switch all rows at once, so that a long batch mate would change
    a short row by far more than rounding.
    """
    config: Any = getattr(text_model, "config", None)
    rope: Any = getattr(config, "rope_parameters", None) or {}
    per_kind = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    limits = [
        kind.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or getattr(config, "max_position_embeddings", None)
        for kind in per_kind
        if kind.get("rope_type") in ("longrope", "dynamic")
    ]
    return min((float(limit) for limit in limits if limit), default=math.inf)


def _pad(batch: list[Sequence[int]]) -> tuple[TokenIds, AttentionMask]:
    longest = max(len(ids) for ids in batch)
    input_ids = torch.full((len(batch), longest), _PAD_ID, dtype=torch.long)
    mask = torch.zeros((len(batch), longest), dtype=torch.long)
    for row, ids in enumerate(batch):
        input_ids[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.long)
        mask[row, : len(ids)] = 1
    return input_ids, mask


def _flat_sites(positions: list[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Row and column of every vector to read, rows in order, each [sites]."""
    counts = torch.tensor([len(chosen) for chosen in positions])
    rows = torch.repeat_interleave(torch.arange(len(positions)), counts)
    columns = torch.cat([torch.as_tensor(chosen, dtype=torch.long) for chosen in positions])
    return rows, columns


def _split(
    gathered: Mapping[int, Float32[Tensor, "n d_model"]], counts: list[int]
) -> Iterator[dict[int, Tensor]]:
    per_layer = {layer: torch.split(vectors, counts) for layer, vectors in gathered.items()}
    for row in range(len(counts)):
        yield {layer: parts[row] for layer, parts in per_layer.items()}


def _read_batch(
    subject: Subject,
    input_ids: TokenIds,
    mask: AttentionMask,
    layers: list[int],
    sites: tuple[Tensor, Tensor],
) -> dict[int, Float32[Tensor, "n d_model"]]:
    _check_vocabulary(subject, input_ids)
    device = subject.compute.device
    input_ids, mask = input_ids.to(device), mask.to(device)
    rows, columns = (index.to(device) for index in sites)
    gathered: dict[int, Tensor] = {}

    def keep(layer: int, hidden: HiddenStates) -> None:
        chosen = hidden[rows.to(hidden.device), columns.to(hidden.device)]
        gathered[layer] = chosen.to("cpu", torch.float32)

    try:
        with torch.no_grad(), _hooked(subject.blocks, layers, keep):
            subject.text_model(input_ids=input_ids, attention_mask=mask, use_cache=False)
    except _DeepestBlockReachedError:
        pass
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"a forward of {input_ids.shape[0]} × {input_ids.shape[1]} tokens does not fit into the "
            f"memory of {device}",
            expected="a batch that fits",
            consequence="the capture would stop half way",
            remedy="lower batch_tokens, or cut the text into shorter passages",
        ) from error
    assert list(gathered) == layers, "the forward ended before the deepest block"
    return gathered


def _check_vocabulary(subject: Subject, input_ids: TokenIds) -> None:
    # Checked on the CPU: on an accelerator a bad id ends the process's context, not this call.
    size = subject.vocab_size
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= size:
        raise TextError(
            f"token id {low if low < 0 else high} is in the text",
            expected=f"ids from 0 to {size - 1} of {subject.name}",
            consequence="the model has no embedding for it",
            remedy="tokenise the text with the subject's own tokenizer",
        )


@contextmanager
def _hooked(blocks: nn.ModuleList, layers: list[int], keep: Any) -> Generator[None]:
    """Hooks that hand each wanted block's output to `keep` and leave the forward after the last one."""
    owner = threading.get_ident()

    def hook_for(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if threading.get_ident() != owner:
                return  # another thread's forward through the same model is not ours to read or to stop
            keep(layer, _hidden_state(output, layer))
            if layer == layers[-1]:
                raise _DeepestBlockReachedError

        return hook

    handles = [blocks[layer].register_forward_hook(hook_for(layer)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hidden_state(output: Any, layer: int) -> HiddenStates:
    """A block returns its hidden state, or a tuple that starts with it (GPT-2, GPT-NeoX)."""
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise SubjectError(
            f"block {layer} returns {shape}",
            expected="a hidden state [batch, seq, d_model], or a tuple that starts with one",
            consequence="the vectors would not be residual-stream states",
            remedy="report the model family; its blocks need an adapter",
        )
    return hidden
