"""What capture is compared with: texts of random ids, and hooks on the untouched model."""

from __future__ import annotations

import torch

from dragoman.subjects import Subject

TEXTS = [
    "The treaty of 1815 redrew the borders of the continent, and the small states of the south",
    "def merge(left, right):\n    return sorted(left + right)",
    "Rain.",
    "She put the letter back into its envelope and wondered whether anybody else had read it before her.",
]


def random_texts(lengths: list[int]) -> list[list[int]]:
    return [torch.randint(3, 100, (n,)).tolist() for n in lengths]


def everywhere(sequences: list[list[int]]) -> list[list[int]]:
    return [list(range(len(ids))) for ids in sequences]


def padded(sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(ids) for ids in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


def hooked_outputs(subject: Subject, sequences: list[list[int]]) -> dict[int, torch.Tensor]:
    """What a plain hook on every block of the whole, untouched model sees."""
    seen: dict[int, torch.Tensor] = {}

    def hook(k):
        return lambda _module, _args, out: seen.update(
            {k: (out[0] if isinstance(out, tuple) else out).clone()}
        )

    handles = [block.register_forward_hook(hook(k)) for k, block in enumerate(subject.blocks)]
    try:
        with torch.no_grad():
            subject.model(**padded(sequences))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def by_length(sequences: list[list[int]]) -> list[list[int]]:
    return sorted(sequences, key=len, reverse=True)


def hook_count(subject: Subject) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in subject.model.modules())


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())
