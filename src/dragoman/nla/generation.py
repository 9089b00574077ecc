"""Batched decoding on this machine: prefix computed once, keys and values preallocated, finished rows leave.

All rows of a batch share the prompt's length, so there is no padding, no attention mask and one position a
step. What plain `generate` spends on concatenating keys and values and on finished rows is saved; the tokens
are the same.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from dragoman.nla.decoder import expand_rows, keep_rows
from dragoman.nla.explanation import Decoding
from dragoman.shapes import Vectors

if TYPE_CHECKING:
    from dragoman.injection import ReplaceInjector
    from dragoman.nla.decoder import Decoder
    from dragoman.runs import Progress

GROWTH = 64
"""Token slots added when the preallocated keys and values are full: most answers need one allocation."""
NUCLEUS_START = 256
"""Candidates that top-p looks at first: on a CPU, sorting the vocabulary costs more than the forward."""


@dataclass
class Answer:
    """One generated answer.

    Attributes:
        token_ids: generated tokens, the end token included.
        logprobs: raw log-probability of each (nat): no temperature, nothing suppressed, nothing cut off, as a
            policy gradient needs it.
        ended: the last token is an end token.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


class PreallocatedLayer(DynamicLayer):
    """Keys and values in buffers with room to grow: a step writes one slot and copies nothing."""

    def __init__(
        self, keys: Float[Tensor, "1 heads seq width"], values: Float[Tensor, "1 heads seq width"], batch: int
    ) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self._length = keys.shape[2]
        self._buffers = [self._room(part, batch, self._length + GROWTH) for part in (keys, values)]
        self.is_initialized = True
        self._publish()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new states; returns views of all states so far."""
        end = self._length + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            batch = self._buffers[0].shape[0]
            self._buffers = [self._room(b[:, :, : self._length], batch, end + GROWTH) for b in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : end] = states
        self._length = end
        self._publish()
        return self.keys, self.values  # pyright: ignore[reportReturnType]  # set by _publish

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows."""
        self._buffers = [buffer.index_select(0, beam_idx) for buffer in self._buffers]
        self._publish()

    def _publish(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)

    @staticmethod
    def _room(states: Tensor, batch: int, slots: int) -> Tensor:
        buffer = states.new_empty(batch, states.shape[1], slots, states.shape[3])
        buffer[:, :, : states.shape[2]] = states
        return buffer


def expanded_cache(prefix: DynamicCache, batch: int) -> DynamicCache:
    """A batch's own cache that starts with the prefix; the prefix itself is left as it is.

    Plain layers get preallocated buffers; sliding windows and recurrent states keep the kind their model
    needs.
    """
    layers: list[Any] = prefix.layers
    if all(type(layer) is DynamicLayer for layer in layers):
        cache = DynamicCache()
        cache.layers.extend(PreallocatedLayer(layer.keys, layer.values, batch) for layer in layers)
        return cache
    cache = copy.deepcopy(prefix)
    expand_rows(cache, batch)
    return cache


class Generator:
    """Decodes answers to one constant prompt with one injected vector a row.

    Args:
        decoder: the verbalizer's model.
        injector: replaces the marker's embedding.
        prompt: ids of the whole prompt.
        shared: length of the prefix that is run once.
        stop_ids: tokens that end an answer.
        suppressed: tokens that are never chosen.
        max_new_tokens: cap on an answer, its end token included.
    """

    def __init__(
        self,
        decoder: Decoder,
        injector: ReplaceInjector,
        *,
        prompt: Sequence[int],
        shared: int,
        stop_ids: frozenset[int],
        suppressed: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        device = decoder.text.device
        self._decoder = decoder
        self._injector = injector
        self._prompt = list(prompt)
        self._shared = shared
        self._stop = torch.tensor(sorted(stop_ids), device=device)
        self._suppressed = torch.tensor(list(suppressed), dtype=torch.long, device=device)
        self._limit = max_new_tokens

    @torch.no_grad()
    def generate(
        self,
        vectors: Vectors,
        *,
        number: int,
        decoding: Decoding,
        batch_size: int,
        progress: Progress | None = None,
    ) -> list[list[Answer]]:
        """`number` answers for each vector, in order.

        Args:
            vectors: raw, float32, on the CPU.
            number: answers a vector; each has its own random draws.
            decoding: temperature, top_p and seed are used.
            batch_size: rows decoded side by side.
            progress: called with (done, n, "vectors").
        """
        prefix = self._decoder.text.run_prefix(self._prompt[: self._shared])
        jobs = [(row, sample) for row in range(len(vectors)) for sample in range(number)]
        answers: list[Answer] = []
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            answers += self._decode(
                [vectors[row] for row, _ in batch], [s for _, s in batch], prefix, decoding
            )
            if progress is not None:
                progress(len(answers) // number, len(vectors), "vectors")
        return [answers[row * number : (row + 1) * number] for row in range(len(vectors))]

    def _decode(
        self,
        vectors: Sequence[Float[Tensor, " d_model"]],
        samples: Sequence[int],
        prefix: DynamicCache | None,
        decoding: Decoding,
    ) -> list[Answer]:
        answers = [Answer() for _ in vectors]
        draws = torch.from_numpy(
            np.stack(
                [_draws(v, s, decoding.seed, self._limit) for v, s in zip(vectors, samples, strict=True)]
            )
        )
        hidden, cache = self._prefill(torch.stack(list(vectors)), prefix)
        active = torch.arange(len(answers))
        for step in range(self._limit):
            tokens, logprobs = self._choose(hidden, draws[active, step], decoding)
            ended = torch.isin(tokens, self._stop)
            for row, token, logprob, end in zip(
                active.tolist(), tokens.tolist(), logprobs.tolist(), ended.tolist(), strict=True
            ):
                answers[row].token_ids.append(token)
                answers[row].logprobs.append(logprob)
                answers[row].ended = end
            going = (~ended).nonzero()[:, 0]
            if len(going) == 0 or step == self._limit - 1:
                break
            if len(going) < len(active):
                keep_rows(cache, going)
                active, tokens = active[going.cpu()], tokens[going]
            hidden = self._decoder.text.hidden(tokens[:, None], cache)[:, -1]
        return answers

    def _prefill(
        self, vectors: Vectors, prefix: DynamicCache | None
    ) -> tuple[Float[Tensor, "batch d_model"], DynamicCache]:
        device = self._decoder.text.device
        cache = self._decoder.text.new_cache() if prefix is None else expanded_cache(prefix, len(vectors))
        rest = self._prompt if prefix is None else self._prompt[self._shared :]
        ids = torch.tensor(rest, device=device).expand(len(vectors), -1)
        left = None if prefix is None else self._prompt[self._shared - 1]
        with self._injector.inject(vectors.to(device), left_context=left):
            hidden = self._decoder.text.hidden(ids, cache)
        return hidden[:, -1], cache

    def _choose(
        self, hidden: Float[Tensor, "batch d_model"], draws: Float64[Tensor, " batch"], decoding: Decoding
    ) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Next tokens and their raw log-probabilities."""
        logits = self._decoder.logits(hidden).float()
        total = logits.logsumexp(dim=-1)
        # In place: a suppressed token's own log-probability is never asked for.
        allowed = logits.index_fill_(1, self._suppressed, float("-inf"))
        if decoding.temperature == 0.0:
            tokens = allowed.argmax(dim=-1)
        else:
            probabilities = (allowed / decoding.temperature).softmax(dim=-1)
            tokens = sample_tokens(probabilities, draws.to(probabilities.device), decoding.top_p)
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - total


def sample_tokens(
    probabilities: Float[Tensor, "batch vocab"], draws: Float64[Tensor, " batch"], top_p: float
) -> Int[Tensor, " batch"]:
    """Sample by inversion: one uniform draw a row decides its token, whatever the other rows are.

    Args:
        probabilities: rows sum to one.
        draws: uniform in [0, 1).
        top_p: keep the smallest set of most probable tokens whose mass reaches this.
    """
    if top_p >= 1.0:
        return _invert(probabilities, draws)
    size = min(NUCLEUS_START, probabilities.shape[1])
    while True:
        ranked, order = probabilities.topk(size, dim=-1)
        mass = ranked.cumsum(dim=-1)
        if size == probabilities.shape[1] or bool((mass[:, -1] >= top_p).all()):
            break
        size = min(size * 8, probabilities.shape[1])
    kept = ranked * (mass - ranked < top_p)
    return order.gather(1, _invert(kept, draws)[:, None])[:, 0]


def _invert(weights: Float[Tensor, "batch k"], draws: Float64[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    # float64: a float32 sum over 10^5 entries would round small probabilities away (MPS has float32 only).
    wide = weights if weights.device.type == "mps" else weights.double()
    mass = wide.cumsum(dim=-1)
    wanted = draws.to(mass.dtype)[:, None] * mass[:, -1:]
    chosen = torch.searchsorted(mass, wanted, right=True)[:, 0]
    return chosen.clamp_max(weights.shape[1] - 1)


def _draws(
    vector: Float[Tensor, " d_model"], sample: int, seed: int, number: int
) -> Float64[np.ndarray, " steps"]:
    """Uniform draws that depend on (seed, sample, vector) alone."""
    key = hashlib.sha256(f"{seed}/{sample}/".encode() + vector.numpy().tobytes()).digest()
    return np.random.default_rng(list(_words(key))).random(number)


def _words(key: bytes) -> Iterator[int]:
    for start in range(0, len(key), 4):
        yield int.from_bytes(key[start : start + 4], "little")
