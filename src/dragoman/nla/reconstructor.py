"""The activation reconstructor: the subject's first blocks and a head turn words back into a vector.

The backbone is blocks 0..layer_index with an identity final norm; the head reads the last prompt token in
float32 (`heads`). Outputs are compared after both sides are normalised, so only the direction is learnt;
`reconstruct` gives vectors the norm that the sidecar's `mse_scale` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dragoman.errors import PairError, TextError
from dragoman.nla import adapters
from dragoman.nla.decoder import TextModel
from dragoman.nla.heads import DEFAULT_HEAD, build_head
from dragoman.nla.vectors import as_vectors, check_width
from dragoman.runs import atomic_write_bytes
from dragoman.scaling import normalised_mse, rescale
from dragoman.shapes import AttentionMask, TokenIds, Vectors
from dragoman.sidecar import (
    Sidecar,
    ar_prompt_ids,
    compute_suffix_ids,
    read_sidecar,
    verify_tokens,
    write_sidecar,
)
from dragoman.subjects import truncated_model

if TYPE_CHECKING:
    from dragoman.runs import Progress
    from dragoman.subjects import Subject

HEAD_FILE = "value_head.safetensors"


@dataclass(frozen=True)
class ReconstructorBatch:
    """Tokenised prompts; padding may stand on either side."""

    input_ids: TokenIds
    attention_mask: AttentionMask


class Reconstructor:
    """A model that turns explanations into vectors of its subject.

    Args:
        subject: the frozen model; its weights are never changed.
        backbone: a truncated model of the subject, `subjects.truncated_model` or a copy of it.
        head: float32 read-out, `heads.build_head`.
        sidecar: of role ar: prompt template, suffix ids, mse_scale.
        head_name: stored beside the head's weights.

    Attributes:
        backbone: put adapters on `backbone.text_model`.

    Raises:
        SidecarError: the sidecar does not fit the tokenizer or the width.
    """

    def __init__(
        self,
        subject: Subject,
        backbone: nn.Module,
        head: nn.Module,
        sidecar: Sidecar,
        head_name: str = DEFAULT_HEAD,
    ) -> None:
        check_width(sidecar, subject)
        verify_tokens(sidecar, subject.tokenizer)
        self.subject = subject
        self.backbone = backbone
        self.head = head
        self.sidecar = _with_suffix(sidecar, subject.tokenizer)
        self.head_name = head_name
        self._text = TextModel(backbone.text_model)  # pyright: ignore[reportArgumentType]  # TruncatedModel's attribute

    @classmethod
    def from_subject(
        cls,
        subject: Subject,
        layer_index: int,
        sidecar: Sidecar,
        *,
        head: str = DEFAULT_HEAD,
        own_weights: bool = False,
    ) -> Reconstructor:
        """An untrained reconstructor: the subject's own blocks and an identity head, which is trainable.

        Args:
            subject: the model to be read.
            layer_index: last block kept; the one whose output the vectors are.
            sidecar: of role ar.
            head: name in `heads.HEADS`.
            own_weights: copy the blocks and make them trainable (full fine-tuning).
        """
        backbone: nn.Module = truncated_model(subject, layer_index)
        if own_weights:
            backbone = adapters.own_weights(backbone)
        fresh = build_head(head, subject.d_model).to(next(backbone.parameters()).device)
        return cls(subject, backbone, fresh, sidecar, head)

    @classmethod
    def load(
        cls, folder: str | Path, subject: Subject, *, merge: bool = True, trainable: bool = False
    ) -> Reconstructor:
        """A trained reconstructor from a folder with sidecar, head, and an adapter or full weights.

        Args:
            folder: as `save` writes it.
            subject: the base model.
            merge: see `Verbalizer.load`.
            trainable: leave head and adapter (or full weights) trainable.

        Raises:
            PairError: weights are missing, damaged or of another model.
            SidecarError: the sidecar is missing or disagrees with the subject.
        """
        folder = Path(folder)
        sidecar = read_sidecar(folder)
        layer_index = (
            sidecar.extraction.layer_index if sidecar.ar_layer_index is None else sidecar.ar_layer_index
        )
        backbone = truncated_model(subject, layer_index)
        adapters.load_weights(backbone.text_model, folder, merge=merge and not trainable, trainable=trainable)
        head_name, head = _load_head(folder / HEAD_FILE, subject.d_model)
        head = head.to(next(backbone.parameters()).device).requires_grad_(trainable)
        return cls(subject, backbone, head, sidecar, head_name)

    def save(self, folder: str | Path) -> None:
        """Write adapter or full weights, head and sidecar; each file atomically, the sidecar last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        adapters.save_weights(self._text.module, folder, base_model=self.sidecar.extraction.base_model)
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.head.state_dict().items()
        }
        atomic_write_bytes(
            folder / HEAD_FILE, save(tensors, metadata={"format": "pt", "head": self.head_name})
        )
        write_sidecar(folder, self.sidecar)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of backbone and head that require a gradient, by name."""
        named = [("backbone." + name, p) for name, p in self.backbone.named_parameters()]
        named += [("head." + name, p) for name, p in self.head.named_parameters()]
        return {name: p for name, p in named if p.requires_grad}

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of one prompt, checked to end in the sidecar's suffix.

        Raises:
            TextError: an empty text, or one too long for the model.
            SidecarError: the prompt does not end in the suffix ids.
        """
        if not text.strip():
            raise TextError(
                "an explanation is empty",
                expected="at least one word",
                consequence="the reconstructor would return the same vector for nothing said",
                remedy="drop empty explanations; a truncated answer still has text",
            )
        ids = list(ar_prompt_ids(self.sidecar, self.subject.tokenizer, text))
        if len(ids) > self.subject.max_positions:
            raise TextError(
                f"a reconstructor prompt takes {len(ids)} tokens",
                expected=f"at most {self.subject.max_positions}, the positions of {self.subject.name}",
                consequence="the model would run beyond the positions it was trained for",
                remedy="shorten the explanation",
            )
        return ids

    def training_batch(self, texts: Sequence[str]) -> ReconstructorBatch:
        """Prompts padded on the right."""
        return self._pad([self.prompt_ids(text) for text in texts])

    def predict(self, batch: ReconstructorBatch) -> Float[Tensor, "batch d_model"]:
        """The head's output, float32, any norm; gradients flow to backbone and head."""
        mask = batch.attention_mask
        # Right padding needs no mask under causal attention, and maskless attention is the fastest.
        right_padded = bool((mask[:, 1:] <= mask[:, :-1]).all())
        extra: dict[str, Any] = {}
        if not right_padded:
            extra = {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp_min(0)}
        return self.head(self._text.hidden(batch.input_ids, **extra), mask)

    def loss(self, vectors: Any, texts: Sequence[str]) -> Float[Tensor, " n"]:
        """Normalised MSE per row, 2(1 - cosine); its mean is the training loss."""
        target = as_vectors(vectors, self.subject.d_model)
        return self.batch_loss(target, self.training_batch(texts))

    def batch_loss(self, vectors: Vectors, batch: ReconstructorBatch) -> Float[Tensor, " n"]:
        """The same for a batch from `training_batch`."""
        predicted = self.predict(batch)
        return normalised_mse(predicted, vectors.to(predicted.device))

    @torch.no_grad()
    def reconstruct(
        self, texts: Sequence[str], *, batch_tokens: int = 4096, progress: Progress | None = None
    ) -> Vectors:
        """Turn explanations into vectors.

        Args:
            texts: explanations without tags.
            batch_tokens: padded tokens a forward; texts of like length run together.
            progress: called with (done, n, "texts").

        Returns:
            Float32 on the CPU, in the order of the texts, with the norm that the sidecar's mse_scale says
            (raw head output where it is null).

        Raises:
            TextError: no texts, an empty one or one too long.
        """
        if not texts:
            raise TextError(
                "no texts were given",
                expected="at least one explanation",
                consequence="there would be nothing to compare",
                remedy="pass at least one text",
            )
        ids = [self.prompt_ids(text) for text in texts]
        vectors = torch.empty(len(ids), self.subject.d_model)
        done = 0
        for rows in _length_buckets([len(row) for row in ids], batch_tokens):
            vectors[rows] = self.predict(self._pad([ids[row] for row in rows])).cpu()
            done += len(rows)
            if progress is not None:
                progress(done, len(ids), "texts")
        return rescale(vectors, self.sidecar.extraction.mse_scale)

    def _pad(self, rows: Sequence[Sequence[int]]) -> ReconstructorBatch:
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        device = self._text.device
        return ReconstructorBatch(ids.to(device), mask.to(device))


def _with_suffix(sidecar: Sidecar, tokenizer: Any) -> Sidecar:
    """A foreign sidecar may not name its suffix ids: the template and the live tokenizer then do."""
    tokens = sidecar.require_tokens()
    if tokens.ar_suffix_ids:
        return sidecar
    suffix = compute_suffix_ids(tokenizer, sidecar.require_template("ar"))
    return sidecar.model_copy(update={"tokens": tokens.model_copy(update={"ar_suffix_ids": suffix})})


def _length_buckets(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Row numbers in batches of like length, each at most `batch_tokens` when padded (one row at least)."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        # Lengths ascend, so this row's is the padded width of the batch it joins.
        if batches and (len(batches[-1]) + 1) * lengths[row] <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _load_head(path: Path, d_model: int) -> tuple[str, nn.Module]:
    """A head by the name in the file's metadata; a foreign file holds one square matrix."""
    try:
        with safe_open(path, framework="pt") as file:
            name = (file.metadata() or {}).get("head", DEFAULT_HEAD)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError) as error:
        raise _head_error(f"{path} is missing or damaged ({error})") from error
    head = build_head(name, d_model)
    wanted = {key: tensor.shape for key, tensor in head.state_dict().items()}
    if len(tensors) == len(wanted) == 1:
        tensors = dict(zip(wanted, tensors.values(), strict=True))
    if {key: tensor.shape for key, tensor in tensors.items()} != wanted:
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        raise _head_error(f"{path} holds {shapes}")
    if adapters.not_finite(tensors) is not None:
        raise _head_error(f"{path} holds NaN or infinity")
    head.load_state_dict({key: tensor.float() for key, tensor in tensors.items()})
    return name, head


def _head_error(found: str) -> PairError:
    return PairError(
        found,
        expected="the weights of the reconstructor's head for this width",
        consequence="explanations would be scored by an untrained head",
        remedy="train or download the reconstructor again",
    )
