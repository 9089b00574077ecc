"""The sidecar as frozen models. Keys unknown to this package are kept, at the level where they stood."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dragoman.errors import SidecarError

Scale = float | Literal["sqrt_d_model"] | None
"""A norm, "sqrt_d_model", or None: vectors stay raw."""


def _scale_from_file(value: Any) -> Any:
    # The public release accepts these words, and YAML 1.1 reads 8e4 (no dot) as a string.
    if value in ("raw", "none"):
        return None
    if isinstance(value, str) and value != "sqrt_d_model":
        return float(value)
    if isinstance(value, bool):
        raise ValueError("a truth value is not a scale")
    return value


_FileScale = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["sqrt_d_model"] | None,
    BeforeValidator(_scale_from_file),
]
_TokenId = Annotated[int, Field(ge=0, strict=True)]
_LayerIndex = Annotated[int, Field(ge=0, strict=True)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Extraction(_Section):
    """Where the vectors come from and which norms they take at injection and at the loss."""

    layer_index: _LayerIndex
    """The hooked block, counted from 0: vectors are its output, hidden_states[layer_index + 1]."""
    base_model: str = ""
    """Name of the subject; empty when the file does not say."""
    injection_scale: _FileScale = None
    """L2 norm at injection. Whether it was stated at all (null is) stands in `model_fields_set`."""
    mse_scale: _FileScale = "sqrt_d_model"
    """L2 norm of both sides before the error is taken."""
    norm: Literal["none"] = "none"
    """Stored vectors are raw; no other value is accepted."""


class Tokens(_Section):
    """The marker, its neighbours in the canonical prompt, and how an AR prompt ends, as token ids."""

    injection_char: Annotated[str, Field(min_length=1)]
    """What stands in the template for the vector: one token, often one character."""
    injection_token_id: _TokenId
    injection_left_neighbor_id: _TokenId
    injection_right_neighbor_id: _TokenId
    ar_suffix_ids: tuple[_TokenId, ...] = ()
    """Last ids of every AR prompt, minus the suffix's first, which can merge with the text; () = unknown."""


class Templates(_Section):
    """Prompt templates with the literal slots {injection_char} (av) and {explanation} (ar)."""

    av: str | None = None
    ar: str | None = None


class Baseline(_Section):
    """Denominators of FVE, from held-out vectors normalised to sqrt(d_model)."""

    raw_variance: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Mean squared error of predicting the mean vector."""
    normalised_mean: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """The same when the mean vector is itself brought to the norm sqrt(d_model)."""
    n: Annotated[int, Field(ge=1)]
    """Vectors that went into both."""


class Sidecar(_Section):
    """What must be known to use a model or a dataset of vectors (`nla_meta.yaml`, schema 1 and 2)."""

    kind: Literal["nla_model", "nla_dataset"]
    schema_version: Annotated[int, Field(ge=1, le=2)] = 2
    role: Literal["av", "ar"] | None = None
    d_model: Annotated[int, Field(ge=1, strict=True)]
    extraction: Extraction
    tokens: Tokens | None = None
    """None for a dataset of bare vectors."""
    prompt_templates: Templates = Templates()
    ar_layer_index: _LayerIndex | None = None
    """The AR runs blocks 0 to this one."""
    baseline: Baseline | None = None
    score_threshold: float | None = None
    """Scores below it are flagged low-score; calibrated on held-out scores."""
    norm_quantiles: dict[str, float] | None = None
    """Quantiles of the raw norms of the layer: p001, p50, p999."""
    system_prompt: str | None = None
    """None: what the chat template does by itself; "": an explicit empty system message."""
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    provenance: dict[str, Any] = {}

    def require_tokens(self) -> Tokens:
        """The marker's tokens.

        Raises:
            SidecarError: this sidecar has none.
        """
        if self.tokens is None:
            raise _missing("tokens", "the marker, its neighbours and their ids")
        return self.tokens

    def require_template(self, role: Literal["av", "ar"]) -> str:
        """The prompt template of `role`.

        Raises:
            SidecarError: this sidecar has none for that role.
        """
        template = self.prompt_templates.av if role == "av" else self.prompt_templates.ar
        if template is None:
            raise _missing(f"prompt_templates.{role}", "the prompt that the model was trained with")
        return template


def _missing(key: str, meaning: str) -> SidecarError:
    return SidecarError(
        f"the sidecar has no {key}",
        expected=f"{key}: {meaning}",
        consequence="the prompt would have to be guessed, and a model answers nonsense to another one",
        remedy="use the sidecar that came with the model, or add the key to it",
    )
