"""The activation verbalizer: a vector replaces one token embedding of a fixed prompt, then the model speaks.

Departures from the public release: the constant prompt before the marker runs once a batch, not once a row
(exact, see `decoder`); the loss computes logits at response positions only; a structural copy of the subject
shares its weights, so an untrained or unmerged verbalizer costs no second model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dragoman.errors import ConfigError, SubjectError, TextError
from dragoman.injection import Marker, ReplaceInjector
from dragoman.nla import adapters
from dragoman.nla.decoder import Decoder, expand_rows
from dragoman.nla.explanation import (
    CLOSE_TAG,
    OPEN_TAG,
    Decoding,
    Explanation,
    parse_response,
    render_response,
)
from dragoman.nla.generation import Answer, Generator
from dragoman.nla.vectors import as_vectors, check_width
from dragoman.shapes import TokenIds, TokenMask, Vectors
from dragoman.sidecar import Sidecar, av_prompt_ids, read_sidecar, verify_tokens, write_sidecar

if TYPE_CHECKING:
    from dragoman.runs import Progress
    from dragoman.subjects import Subject

DEFAULT_MAX_NEW_TOKENS = 160


@dataclass(frozen=True)
class VerbalizerBatch:
    """Prompts and answers, padded on the right.

    Attributes:
        vectors: one a row, raw, float32.
        input_ids: prompt, answer, end token, padding.
        response: True at the tokens to be predicted: answer with tags and end token.
        content: the part of `response` between the tags.
    """

    vectors: Vectors
    input_ids: TokenIds
    response: TokenMask
    content: TokenMask


@dataclass(frozen=True)
class VerbalizerLoss:
    """Negative log-likelihoods, one entry a row, float32 on the model's device.

    Attributes:
        nll: summed over the response tokens, nat; carries the gradient.
        tokens: number of response tokens.
        content_nll: summed over the tokens between the tags, nat. The tags are the same for every vector and
            are soon predicted perfectly, so the whole-response mean understates how much a vector helps.
        content_tokens: number of tokens between the tags.
    """

    nll: Float[Tensor, " batch"]
    tokens: Int[Tensor, " batch"]
    content_nll: Float[Tensor, " batch"]
    content_tokens: Int[Tensor, " batch"]

    def mean(self) -> Float[Tensor, ""]:
        """Mean over all response tokens of the batch: the training loss."""
        return self.nll.sum() / self.tokens.sum()

    def content_mean(self) -> Float[Tensor, ""]:
        """Mean over all tokens between the tags."""
        return self.content_nll.sum() / self.content_tokens.sum().clamp_min(1)


class Verbalizer:
    """A model that puts vectors of its subject into words.

    Args:
        subject: the frozen model; its weights are never changed.
        model: a copy of `subject.model` by `adapters.share_structure` or `adapters.own_weights`.
        sidecar: of role av: marker, prompt, scale.

    Attributes:
        model: the copy; put adapters on it with `adapters.attach_lora`.

    Raises:
        SidecarError: the sidecar does not fit the tokenizer or the subject's width, or has no prompt
            template.
    """

    def __init__(self, subject: Subject, model: nn.Module, sidecar: Sidecar) -> None:
        check_width(sidecar, subject)
        verify_tokens(sidecar, subject.tokenizer)
        self.subject = subject
        self.model = model
        self.sidecar = sidecar
        self._decoder = Decoder(subject, model)
        self._prompt = list(av_prompt_ids(sidecar, subject.tokenizer))
        tokens = sidecar.require_tokens()
        marker = Marker(
            tokens.injection_char,
            tokens.injection_token_id,
            tokens.injection_left_neighbor_id,
            tokens.injection_right_neighbor_id,
        )
        self._injector = ReplaceInjector(
            self._decoder.embedding, marker, sidecar.extraction.injection_scale, gain_after=subject.gain_after
        )
        self._shared = self._prompt.index(marker.token_id)
        self._stop_ids = stop_ids(subject)
        self._end_id = _end_of_turn(subject, self._stop_ids)
        self._open = self._encode(f"{OPEN_TAG}\n")
        self._close = self._encode(f"\n{CLOSE_TAG}")

    @classmethod
    def from_subject(cls, subject: Subject, sidecar: Sidecar, *, own_weights: bool = False) -> Verbalizer:
        """An untrained verbalizer.

        Args:
            subject: the model to be read.
            sidecar: of role av.
            own_weights: copy all weights and make them trainable (full fine-tuning); otherwise the weights
                are the subject's, frozen, and an adapter is attached afterwards.
        """
        copied = (
            adapters.own_weights(subject.model) if own_weights else adapters.share_structure(subject.model)
        )
        return cls(subject, copied, sidecar)

    @classmethod
    def load(
        cls, folder: str | Path, subject: Subject, *, merge: bool = True, trainable: bool = False
    ) -> Verbalizer:
        """A trained verbalizer from a folder with a sidecar and an adapter or full weights.

        Args:
            folder: as `save` writes it.
            subject: the base model.
            merge: add the adapter into a copy of the linear layers; otherwise it runs beside the shared
                weights: slower, but without a second copy in memory. `trainable` implies no merging.
            trainable: leave the adapter (or the full weights) trainable.

        Raises:
            PairError: the weights are missing, damaged or of another model.
            SidecarError: the sidecar is missing or disagrees with the subject.
        """
        folder = Path(folder)
        sidecar = read_sidecar(folder)
        model = adapters.share_structure(subject.model)
        adapters.load_weights(model, folder, merge=merge and not trainable, trainable=trainable)
        return cls(subject, model, sidecar)

    def save(self, folder: str | Path) -> None:
        """Write adapter or full weights and the sidecar; each file atomically, the sidecar last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        adapters.save_weights(self.model, folder, base_model=self.sidecar.extraction.base_model)
        write_sidecar(folder, self.sidecar)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that require a gradient, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def training_batch(self, vectors: Any, texts: Sequence[str]) -> VerbalizerBatch:
        """Prompts with their answers, ready for `batch_loss`.

        Args:
            vectors: raw, [n, d_model].
            texts: the explanations, n of them, without tags.

        Raises:
            VectorError: vectors of another width or not finite.
            TextError: another number of texts, or an answer that is too long for the model.
        """
        checked = as_vectors(vectors, self.subject.d_model)
        if len(texts) != len(checked):
            raise TextError(
                f"{len(texts)} texts for {len(checked)} vectors",
                expected="one text a vector",
                consequence="vectors would be paired with the texts of others",
                remedy="pass both in the same order and number",
            )
        answers = [self._answer(text) for text in texts]
        width = len(self._prompt) + max(len(ids) for ids, _ in answers)
        self._check_length(width)
        ids = torch.full((len(answers), width), self._end_id, dtype=torch.long)
        response = torch.zeros(len(answers), width, dtype=torch.bool)
        content = torch.zeros_like(response)
        start = len(self._prompt)
        ids[:, :start] = torch.tensor(self._prompt)
        for row, (answer, (first, last)) in enumerate(answers):
            ids[row, start : start + len(answer)] = torch.tensor(answer)
            response[row, start : start + len(answer)] = True
            content[row, start + first : start + last] = True
        device = self._decoder.text.device
        return VerbalizerBatch(checked.to(device), ids.to(device), response.to(device), content.to(device))

    def loss(self, vectors: Any, texts: Sequence[str]) -> VerbalizerLoss:
        """Negative log-likelihood of explanations given vectors; see `training_batch` and `batch_loss`."""
        return self.batch_loss(self.training_batch(vectors, texts))

    def batch_loss(self, batch: VerbalizerBatch, *, share_prefix: bool = True) -> VerbalizerLoss:
        """Negative log-likelihood of a batch, float32 log-softmax over logits at response positions only.

        Args:
            batch: from `training_batch`.
            share_prefix: run the constant prompt once a batch and expand it; exact to rounding.
        """
        cache = self._decoder.text.run_prefix(self._prompt[: self._shared]) if share_prefix else None
        skip = 0 if cache is None else self._shared
        if cache is not None:
            expand_rows(cache, len(batch.input_ids))
        ids = batch.input_ids[:, skip:]
        left = self._prompt[skip - 1] if skip else None
        with self._injector.inject(batch.vectors, left_context=left):
            hidden = self._decoder.text.hidden(ids, cache)
        predicted = batch.response[:, skip + 1 :]
        rows = predicted.nonzero()[:, 0]
        logits = self._decoder.logits(hidden[:, :-1][predicted])
        nll = nn.functional.cross_entropy(logits.float(), ids[:, 1:][predicted], reduction="none")
        inside = batch.content[:, skip + 1 :][predicted]
        zeros = nll.new_zeros(len(ids))
        return VerbalizerLoss(
            nll=zeros.index_add(0, rows, nll),
            tokens=batch.response.sum(dim=1),
            content_nll=zeros.index_add(0, rows, nll * inside),
            content_tokens=batch.content.sum(dim=1),
        )

    @torch.no_grad()
    def explain(
        self,
        vectors: Any,
        *,
        decoding: Decoding | None = None,
        batch_size: int = 32,
        progress: Progress | None = None,
    ) -> list[Explanation]:
        """Put vectors into words.

        Args:
            vectors: raw, [n, d_model].
            decoding: default greedy; `best_of` above 1 needs a reconstructor, see `Pair.explain`.
            batch_size: vectors decoded side by side.
            progress: called with (done, n, "vectors").

        Returns:
            One explanation a vector, in order.

        Raises:
            VectorError: no vectors, another width or not finite.
            ConfigError: `best_of` above 1.
        """
        decoding = decoding or Decoding()
        if decoding.best_of > 1:
            raise ConfigError(
                f"best_of is {decoding.best_of} on a verbalizer alone",
                expected="1, since choosing among candidates needs a reconstructor",
                consequence="candidates could not be compared",
                remedy="use Pair.explain, or Verbalizer.sample for all candidates",
            )
        return [
            rows[0] for rows in self.sample(vectors, 1, decoding, batch_size=batch_size, progress=progress)
        ]

    @torch.no_grad()
    def sample(
        self,
        vectors: Any,
        number: int,
        decoding: Decoding,
        *,
        batch_size: int = 32,
        progress: Progress | None = None,
    ) -> list[list[Explanation]]:
        """`number` independent explanations of each vector; `decoding.best_of` is not looked at."""
        checked = as_vectors(vectors, self.subject.d_model)
        answers = self._generator(decoding).generate(
            checked, number=number, decoding=decoding, batch_size=batch_size, progress=progress
        )
        return [[self._explanation(answer) for answer in row] for row in answers]

    def _generator(self, decoding: Decoding) -> Generator:
        limit = decoding.max_new_tokens or self.sidecar.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        self._check_length(len(self._prompt) + limit)
        return Generator(
            self._decoder,
            self._injector,
            prompt=self._prompt,
            shared=self._shared,
            stop_ids=self._stop_ids,
            suppressed=self.suppressed_ids(),
            max_new_tokens=limit,
        )

    def suppressed_ids(self) -> list[int]:
        """Tokens never generated: marker, specials that do not stop, and ids beyond the tokenizer."""
        odd = {self.sidecar.require_tokens().injection_token_id, *self.subject.special_ids}
        vocab = int(self.model.get_output_embeddings().weight.shape[0])  # pyright: ignore[reportCallIssue]  # transformers method
        odd.update(range(len(self.subject.tokenizer), vocab))
        return sorted(id_ for id_ in odd if id_ < vocab and id_ not in self._stop_ids)

    def _explanation(self, answer: Answer) -> Explanation:
        said = answer.token_ids[:-1] if answer.ended else answer.token_ids
        parsed = parse_response(self.subject.tokenizer.decode(said, skip_special_tokens=False))
        return Explanation(
            text=parsed.text,
            token_ids=answer.token_ids,
            truncated=not parsed.closed,
            ended=answer.ended,
            mean_logprob=sum(answer.logprobs) / len(answer.logprobs),
        )

    def _answer(self, text: str) -> tuple[list[int], tuple[int, int]]:
        """Ids of tags, text and end token, and the half-open range of those that belong to the text."""
        ids = self._encode(render_response(text))
        first = _common_prefix(ids, self._open)
        last = len(ids) - _common_prefix(ids[first:][::-1], self._close[::-1])
        return [*ids, self._end_id], (first, last)

    def _encode(self, text: str) -> list[int]:
        encoded: Mapping[str, list[int]] = self.subject.tokenizer(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return list(encoded["input_ids"])

    def _check_length(self, width: int) -> None:
        if width > self.subject.max_positions:
            raise TextError(
                f"prompt and answer take {width} tokens",
                expected=f"at most {self.subject.max_positions}, the positions of {self.subject.name}",
                consequence="the model would run beyond the positions it was trained for",
                remedy="shorten the explanation, or lower max_new_tokens",
            )


def stop_ids(subject: Subject) -> frozenset[int]:
    """Tokens that end an answer: those of the generation config and the tokenizer's end token.

    Raises:
        SubjectError: there are none.
    """
    configured: Any = getattr(getattr(subject.model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list | tuple) else [configured]
    found = frozenset(int(i) for i in [*listed, subject.tokenizer.eos_token_id] if i is not None)
    if not found:
        raise SubjectError(
            f"{subject.name} has no end-of-text token",
            expected="one in its generation config or tokenizer",
            consequence="no explanation would ever end",
            remedy="set tokenizer.eos_token",
        )
    return found


def _end_of_turn(subject: Subject, stops: frozenset[int]) -> int:
    """The token that the chat template puts after an assistant's message, where it is one that stops."""
    preferred = subject.tokenizer.eos_token_id
    if getattr(subject.tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rendered: list[int] = subject.tokenizer.apply_chat_template(turn, tokenize=True, return_dict=False)
        preferred = next((id_ for id_ in reversed(rendered) if id_ in stops), preferred)
    return int(preferred) if preferred is not None else min(stops)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
