"""The training config of a pair: frozen, validated once at the door, unknown keys refused.

One YAML file describes a whole pair, from corpora to shipped folder. Every stage reads the same file, so
that `dragoman train verbalizer CONFIG` and `dragoman train pair CONFIG` cannot disagree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dragoman.datagen.config import DataConfig
from dragoman.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PromptConfig(_Section):
    """What surrounds the injected vector and the explanation.

    `system_prompt` None keeps the chat template's default; "" sends an empty system message, which on
    SmolLM2 saves 17 tokens a vector. `marker` "auto" searches the live vocabulary.
    """

    system_prompt: str | None = ""
    av_template: str = "Explain <concept>{injection_char}</concept>"
    ar_template: str = "Summary of the following text: <text>{explanation}</text> <summary>"
    marker: str = "auto"


class StageConfig(_Section):
    """How one model is trained.

    Units: `examples` are rows seen (repeats count), `learning_rate` is AdamW's peak, `warmup` and
    `final_learning_rate` are fractions of the steps and of the peak, `evaluate_every` and
    `checkpoint_minutes` count steps and minutes.
    """

    method: Literal["lora", "full"] = "lora"
    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    final_learning_rate: Fraction = 0.1
    warmup: Fraction = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_gradient_norm: Annotated[float, Field(gt=0)] = 1.0
    examples: Positive = 8000
    batch_size: Positive = 16
    seed: int = 0
    evaluate_every: Positive = 100
    evaluate_rows: Annotated[int, Field(ge=8)] = 256
    checkpoint_minutes: Annotated[float, Field(gt=0)] = 5.0
    max_skipped_steps: Positive = 10


class VerbalizerConfig(StageConfig):
    """Supervised training of the AV on (vector, explanation) rows."""


class ReconstructorConfig(StageConfig):
    """Supervised training of the AR on (explanation, vector) rows."""

    examples: Positive = 8000


class RefitConfig(StageConfig):
    """Second training of the AR, on the AV's own words.

    The AR trained on references alone does not carry over to what an AV says, so a pair without this
    stage scores below zero on its round trip. `samples` vectors are verbalized, one explanation each at
    `temperature`; `reference_share` of the rows keep their reference explanation.
    """

    samples: Positive = 3000
    temperature: Annotated[float, Field(ge=0)] = 0.7
    reference_share: Fraction = 0.25
    learning_rate: Annotated[float, Field(gt=0)] = 5e-4
    examples: Positive = 6000


class PairConfig(_Section):
    """A pair from corpora to folder.

    `injection_scale` "auto" takes the round number just above the layer's mean norm in the training set.
    `max_new_tokens` caps an explanation when reading.
    """

    subject: str
    layer_index: Annotated[int, Field(ge=0)]
    output: str
    data: DataConfig
    prompt: PromptConfig = PromptConfig()
    injection_scale: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    max_new_tokens: Positive = 80
    verbalizer: VerbalizerConfig = VerbalizerConfig()
    reconstructor: ReconstructorConfig = ReconstructorConfig()
    refit: RefitConfig = RefitConfig()

    @model_validator(mode="after")
    def _one_layer(self) -> PairConfig:
        if self.data.layer_index != self.layer_index:
            raise ValueError(
                f"data.layer_index is {self.data.layer_index} but layer_index is {self.layer_index}: "
                "a pair reads the layer its vectors were captured at"
            )
        return self


def read_config(path: str | Path) -> PairConfig:
    """Read and validate a pair's YAML config.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, or a value out of range; names the key.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"no config file at {file}",
            expected="a YAML file as `dragoman init` writes it",
            consequence="nothing could be trained",
            remedy="run `dragoman init MODEL` to write one, or correct the path",
        )
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{file} holds {file.stat().st_size} bytes",
            expected=f"a config of at most {MAX_CONFIG_BYTES} bytes",
            consequence="a wrong file would be parsed into memory",
            remedy="pass the YAML config, not a data or model file",
        )
    return parse_config(file.read_bytes(), name=str(file))


def parse_config(text: str | bytes, *, name: str) -> PairConfig:
    """Validate YAML text; `name` stands for the file in messages. Raises ConfigError."""
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{name} is not valid YAML: {' '.join(str(error).split())[:300]}",
            expected="a YAML mapping",
            consequence="settings would be guessed",
            remedy="correct the line named",
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{name} holds {type(raw).__name__}",
            expected="a YAML mapping with the keys subject, layer_index, output, data",
            consequence="settings would be guessed",
            remedy="start from `dragoman init MODEL`",
        )
    # The layer stands once in a config; the data section gets it from there.
    data = raw.get("data", {})
    if isinstance(data, dict) and "layer_index" in raw:
        raw = {**raw, "data": {"layer_index": raw["layer_index"], **data}}
    try:
        return PairConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(
            f"{name} does not validate: {_problems(error)}",
            expected="the keys and ranges of docs/train.md",
            consequence="a misspelt or contradictory setting would silently be ignored",
            remedy="correct these keys",
        ) from error


def _problems(error: ValidationError) -> str:
    lines = []
    for problem in error.errors()[:5]:
        where = ".".join(str(part) for part in problem["loc"]) or "config"
        what = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"{where}: {what}")
    return "; ".join(lines)
