"""A loaded, frozen model with everything the other rooms ask of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.subjects.chat import encode_conversation
from dragoman.subjects.compute import Compute
from dragoman.subjects.families import EmbeddingGain, Family, find_family, measure_gain, text_config

_SAMPLES = 16
_SAMPLE_BYTES = 4096


class Subject:
    """The frozen model being read.

    Attributes:
        name: as the user gave it.
        revision: commit of a hub model, hash of a GGUF file, or None.
        model: causal language model in eval mode, no parameter requires a gradient.
        tokenizer: its tokenizer, always with a chat template.
        family: where the parts are.
        compute: device, dtype and attention it runs with.
        source: folder that the weights were read from; None for a model made in memory.
        quantization: None, "int8" or "int4".
        chat_template_origin: "own", or the name of the template supplied for a model without one.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        compute: Compute,
        *,
        revision: str | None = None,
        source: Path | None = None,
        quantization: str | None = None,
        chat_template_origin: str = "own",
    ) -> None:
        self.name = name
        self.revision = revision
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.family: Family = find_family(model)
        self.compute = compute
        self.source = source
        self.quantization = quantization
        self.chat_template_origin = chat_template_origin

    def __repr__(self) -> str:
        return (
            f"Subject({self.name!r}, {self.family.model_type}, d_model={self.d_model}, "
            f"num_layers={self.num_layers}, {self.compute.device}, {self.compute.dtype})"
        )

    # ------------------------------------------------------------ parts

    @property
    def blocks(self) -> nn.ModuleList:
        """Residual blocks; the output of `blocks[layer_index]` is what is read."""
        return self.family.blocks

    @property
    def text_model(self) -> nn.Module:
        """Embedding, blocks and final norm, without the output head and outside any wrapper."""
        return self.family.text_model

    @property
    def final_norm(self) -> nn.Module:
        """Norm after the last block."""
        return self.family.final_norm

    @property
    def embedding(self) -> nn.Module:
        """Input embedding module."""
        return self.family.embedding

    @property
    def text_config(self) -> Any:
        """Config of the text part."""
        return text_config(self.model)

    # ------------------------------------------------------------ numbers

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return int(self.text_config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which may be more than the tokenizer's entries."""
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return int(weight.shape[0])

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model's positions cover, in tokens."""
        return int(getattr(self.text_config, "max_position_embeddings", 0) or 2**31 - 1)

    @cached_property
    def gain(self) -> EmbeddingGain:
        """Measured embedding gain, inside and after the embedding module.

        Raises:
            SubjectError: the path from embedding to block 0 is not a plain factor.
        """
        return measure_gain(self.family)

    @property
    def embedding_gain(self) -> float:
        """Block 0's input / raw embedding row, position vectors aside (Gemma: sqrt(d_model))."""
        return self.gain.total

    @property
    def gain_after(self) -> float:
        """The part of the gain applied after the embedding module (Granite; 1.0 mostly)."""
        return self.gain.after

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens: BOS, turn marks, and every added token marked special."""
        added = self.tokenizer.added_tokens_decoder
        marked = {int(i) for i, token in added.items() if token.special}
        return frozenset(marked | {int(i) for i in self.tokenizer.all_special_ids})

    # ------------------------------------------------------------ text

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with BOS where the tokenizer adds it by default.

        Literal special-token text ("<|im_end|>" in a dump) is split into ordinary tokens.
        """
        return list(self.tokenizer(text, split_special_tokens=True)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ending as the conversation ends.

        Literal special-token text inside a message is split into ordinary tokens, as in `encode`.
        """
        return encode_conversation(self.tokenizer, messages)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Each token as readable text; a token that is part of a character shows as U+FFFD."""
        return [
            self.tokenizer.decode([int(i)], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for i in ids
        ]

    # ------------------------------------------------------------ identity

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the weights: sha256 over names, shapes and samples of bytes; 64 hex digits.

        Taken from the safetensors files where there are any, so that it does not depend on the dtype the
        subject was loaded in.
        """
        files = sorted(self.source.glob("*.safetensors")) if self.source else []
        digest = hashlib.sha256()
        if files:
            for path in files:
                _hash_file_samples(digest, path)
        else:
            for name, parameter in sorted(self.model.named_parameters()):
                _hash_tensor_samples(digest, name, parameter)
        return digest.hexdigest()

    def provenance(self) -> dict[str, Any]:
        """What an artefact must say about the model it came from."""
        return {
            "subject": self.name,
            "revision": self.revision,
            "model_type": self.family.model_type,
            "d_model": self.d_model,
            "num_layers": self.num_layers,
            "fingerprint": self.fingerprint,
            "quantization": self.quantization,
            "chat_template": self.chat_template_origin,
            "compute": self.compute.to_json(),
        }


def _hash_file_samples(digest: Any, path: Path) -> None:
    """Header (names, dtypes, shapes), size, and evenly spread samples of the tensor bytes."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        header_bytes = min(int.from_bytes(stream.read(8), "little"), size)
        digest.update(size.to_bytes(8, "little") + stream.read(header_bytes))
        for sample in range(_SAMPLES):
            stream.seek(8 + header_bytes + (size - 8 - header_bytes) * sample // _SAMPLES)
            digest.update(stream.read(_SAMPLE_BYTES))


def _hash_tensor_samples(digest: Any, name: str, tensor: Tensor) -> None:
    flat = tensor.detach().flatten()
    stride = max(1, flat.numel() // 1024)
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(flat[::stride].to("cpu", torch.float32).numpy().tobytes())
