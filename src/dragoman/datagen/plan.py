"""What a run of sets will capture, decided before the first forward: passages, positions, split.

The plan depends on the config, the corpora and the subject's tokenizer alone. Each choice is made by a rank
hashed from (seed, id), so that shards, batches and processes cannot change it, and a smaller limit chooses a
part of what a larger one chooses.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from dragoman.activations.positions import PositionRule
from dragoman.datagen.config import HELD_OUT, CorpusSpec, DataConfig
from dragoman.datagen.corpora import corpus_name, load_corpus
from dragoman.datagen.passages import CorpusCounts, Passage, cut_passages
from dragoman.datagen.split import assign_split, keyed_uniform
from dragoman.errors import ConfigError, CorpusError
from dragoman.runs import Progress
from dragoman.subjects import Subject


@dataclass(frozen=True)
class Item:
    """One passage to be run, and the positions to be read in it (ascending, counted from 0)."""

    passage: Passage
    corpus: str
    split: str
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Everything to capture, in the order of splits and, within one, of keyed ranks.

    Attributes:
        items: passages with at least one position.
        read: what became of each corpus, before limits.
    """

    items: tuple[Item, ...]
    read: dict[str, CorpusCounts]

    @property
    def n_vectors(self) -> int:
        """Vectors over all splits."""
        return sum(len(item.positions) for item in self.items)

    def shards(self, passages: int) -> Iterator[tuple[str, int, list[Item]]]:
        """Stretches of at most `passages` items of one split: (split, number from 0, items)."""
        for split, group in groupby(self.items, key=lambda item: item.split):
            items = list(group)
            for number, start in enumerate(range(0, len(items), passages)):
                yield split, number, items[start : start + passages]

    def only(self, splits: Collection[str]) -> Plan:
        """The part of the plan that these splits make up."""
        return replace(self, items=tuple(item for item in self.items if item.split in splits))

    def training_texts(self) -> Iterator[str]:
        """Passages that may be fitted on: none of the held-out split."""
        return (item.passage.text for item in self.items if item.split != HELD_OUT)

    def counts(self) -> dict[str, Any]:
        """Documents, passages, tokens and vectors by corpus and by split, as JSON."""
        return {
            "corpora": {
                name: {**asdict(read), "used": _used([i for i in self.items if i.corpus == name])}
                for name, read in self.read.items()
            },
            "splits": {
                split: _used(list(group)) for split, group in groupby(self.items, key=lambda item: item.split)
            },
            "vectors": self.n_vectors,
        }


def make_plan(subject: Subject, config: DataConfig, progress: Progress | None = None) -> Plan:
    """Read, cut, split and sample all corpora.

    Raises:
        ConfigError: passages longer than the subject takes.
        CorpusError: a corpus cannot be read, or a split with a share would stay empty.
    """
    _check_length(subject, config)
    read: dict[str, CorpusCounts] = {}
    items: list[Item] = []
    for done, spec in enumerate(config.corpora):
        _report(progress, done, config)
        name = corpus_name(spec.name)
        read[name] = CorpusCounts()
        items += _corpus_items(subject, config, spec, read[name], progress)
    _report(progress, len(config.corpora), config)
    chosen = _within_budget(sorted(items, key=lambda item: _rank(config, item.passage)), config.max_vectors)
    splits = sorted(config.fractions)
    # sorted() is stable: within a split the ranks' order stays, which mixes the corpora.
    plan = Plan(tuple(sorted(chosen, key=lambda item: splits.index(item.split))), read)
    _check_splits(plan, config)
    return plan


def _report(progress: Progress | None, done: int, config: DataConfig) -> None:
    if progress is not None:
        progress(done, len(config.corpora), "corpora")


def _corpus_items(
    subject: Subject, config: DataConfig, spec: CorpusSpec, counts: CorpusCounts, progress: Progress | None
) -> Iterator[Item]:
    documents = load_corpus(
        spec.name, limit=spec.max_documents, text_column=spec.text_column, progress=progress
    )
    passages = cut_passages(
        documents,
        subject.encode,
        max_tokens=config.max_tokens,
        min_tokens=config.min_position + 1,
        counts=counts,
    )
    if spec.limit is not None:
        passages = heapq.nsmallest(spec.limit, passages, key=lambda passage: _rank(config, passage))
    n_positions = spec.positions_per_passage or config.positions_per_passage
    rule = PositionRule("sample", n=n_positions, min_position=config.min_position)
    for passage in passages:
        positions = rule.select(passage.ids, subject.special_ids, seed=config.seed, doc_id=passage.passage_id)
        if positions:
            split = assign_split(passage.doc_id, config.fractions, config.seed)
            yield Item(passage, corpus_name(spec.name), split, tuple(positions))


def _rank(config: DataConfig, passage: Passage) -> float:
    return keyed_uniform(config.seed, "passage", passage.passage_id)


def _within_budget(ranked: list[Item], max_vectors: int | None) -> list[Item]:
    """The first items that make up `max_vectors`, the last of them cut to fit."""
    if max_vectors is None:
        return ranked
    chosen: list[Item] = []
    left = max_vectors
    for item in ranked:
        if left <= 0:
            break
        chosen.append(replace(item, positions=item.positions[:left]))
        left -= len(item.positions)
    return chosen


def _used(items: list[Item]) -> dict[str, int]:
    return {
        "documents": len({item.passage.doc_id for item in items}),
        "passages": len(items),
        "tokens": sum(len(item.passage.ids) for item in items),
        "vectors": sum(len(item.positions) for item in items),
    }


def _check_length(subject: Subject, config: DataConfig) -> None:
    if config.max_tokens > subject.max_positions:
        raise ConfigError(
            f"max_tokens is {config.max_tokens}",
            expected=f"at most {subject.max_positions}, what {subject.name} was built for",
            consequence="positions beyond that are meaningless to the model",
            remedy="lower max_tokens",
        )


def _check_splits(plan: Plan, config: DataConfig) -> None:
    filled = Counter(item.split for item in plan.items)
    empty = [split for split, share in config.fractions.items() if share > 0 and not filled[split]]
    if empty:
        found = ", ".join(
            f"{name}: {read.documents} documents, {read.short_documents} of them too short"
            for name, read in plan.read.items()
        )
        raise CorpusError(
            f"no document falls into the split {empty[0]!r} ({found})",
            expected="at least one document of sufficient length in every split with a share",
            consequence="training or evaluation would start on an empty set",
            remedy="add documents, lower min_position, raise max_vectors, or set the split's fraction to 0",
        )
