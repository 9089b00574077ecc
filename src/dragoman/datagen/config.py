"""The config of a run that makes sets of vectors and explanations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dragoman.datagen.split import check_fractions
from dragoman.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]

HELD_OUT = "test"
"""The split that nothing is fitted on."""


class CorpusSpec(BaseModel):
    """One corpus and how much of it is used.

    Attributes:
        name: an embedded corpus, a file or a folder, as `load_corpus` takes it.
        limit: at most this many passages, drawn over all documents; None takes all. Balances the corpora.
        max_documents: read at most this many documents from the start; bounds what is tokenised.
        positions_per_passage: vectors a passage where this corpus differs from the others.
        text_column: key or column with the text in .jsonl and .parquet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    limit: Positive | None = None
    max_documents: Positive | None = None
    positions_per_passage: Positive | None = None
    text_column: str = "text"


class DataConfig(BaseModel):
    """Which vectors are captured, from what, and how they are split.

    Attributes:
        corpora: at least one.
        layer_index: the captured block, counted from 0.
        positions_per_passage: vectors a passage; fewer where it is short.
        min_position: first position that may be read, counted from 0.
        max_tokens: longest passage, in the subject's tokens, specials included.
        fractions: share of the documents by split; holds `test`, on which nothing is fitted.
        seed: key of the split, of the passages and of the positions.
        max_vectors: at most this many over all splits; None takes all.
        value_type: how vectors are stored; `bfloat16` is a third of the size.
        shard_passages: passages captured between two points of resumption. Neither it nor `batch_tokens`
            changes which positions are read; vectors agree within rounding.
        batch_tokens: tokens of one forward, pads included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    corpora: tuple[CorpusSpec, ...] = (
        CorpusSpec(name="wikipedia-sample"),
        CorpusSpec(name="news-sample"),
        CorpusSpec(name="python-docs"),
    )
    layer_index: Annotated[int, Field(ge=0)]
    positions_per_passage: Positive = 6
    min_position: Annotated[int, Field(ge=0)] = 50
    max_tokens: Positive = 256
    fractions: dict[str, float] = {"av_sft": 0.4, "ar_sft": 0.4, "calibration": 0.1, HELD_OUT: 0.1}
    seed: int = 0
    max_vectors: Positive | None = None
    value_type: Literal["float32", "bfloat16"] = "float32"
    shard_passages: Positive = 64
    batch_tokens: Positive = 4096

    @field_validator("corpora")
    @classmethod
    def _some_distinct_corpora(cls, corpora: tuple[CorpusSpec, ...]) -> tuple[CorpusSpec, ...]:
        names = [spec.name for spec in corpora]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"corpora are {', '.join(names) or '(none)'}: at least one, each once")
        return corpora

    @field_validator("fractions")
    @classmethod
    def _whole_with_held_out(cls, fractions: dict[str, float]) -> dict[str, float]:
        try:
            check_fractions(fractions)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if HELD_OUT not in fractions or not any(
            fractions[name] > 0 for name in fractions if name != HELD_OUT
        ):
            raise ValueError(f"fractions need {HELD_OUT!r} and a split to train on")
        named = all(name.replace("_", "").replace("-", "").isalnum() for name in fractions)
        if not named:
            raise ValueError("names of splits become names of files: letters, digits, - and _ only")
        return fractions

    @model_validator(mode="after")
    def _room_for_positions(self) -> DataConfig:
        if self.max_tokens <= self.min_position:
            raise ValueError(
                f"max_tokens is {self.max_tokens} but the first position to read is {self.min_position}: "
                "no passage would reach it"
            )
        return self
