"""What a verbalizer says about a vector, how it is asked to say it, and how its answer is parsed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from dragoman.errors import ConfigError

OPEN_TAG = "<explanation>"
CLOSE_TAG = "</explanation>"


@dataclass
class Explanation:
    """One vector in words.

    Attributes:
        text: what stands between the tags; of a truncated answer, all that was said.
        token_ids: the whole generated answer with its tags, and its end token where there is one.
        truncated: the answer has no closing tag.
        ended: the model ended the answer itself, before max_new_tokens.
        mean_logprob: mean raw log-probability of the generated tokens (nat; no temperature, nothing
            suppressed).
        cosine, mse, fve: how much of the vector the text carries, per reconstructor; None until scored.
    """

    text: str
    token_ids: list[int]
    truncated: bool
    ended: bool = True
    mean_logprob: float | None = None
    cosine: float | None = None
    mse: float | None = None
    fve: float | None = None


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded.

    Attributes:
        temperature: 0 is greedy.
        top_p: sample from the smallest set of tokens with this probability mass, after temperature.
        max_new_tokens: cap on an answer with tags and end token; None takes the sidecar's, or 160.
        best_of: candidates sampled a vector, of which the one the reconstructor scores best is kept.
        seed: together with the vector's bytes it decides every random draw, so that neither batch mates nor
            the order of the vectors changes a sample.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    best_of: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for message in self._problems():
            raise ConfigError(
                message,
                expected="temperature ≥ 0, 0 < top_p ≤ 1, max_new_tokens ≥ 1, best_of ≥ 1 (1 if greedy), "
                "a seed of at most 64 bits",
                consequence="decoding would fail or return the same candidate several times",
                remedy="correct this setting, for example temperature=1.0 with best_of=4",
            )

    def _problems(self) -> Iterator[str]:
        if not 0.0 <= self.temperature < float("inf"):
            yield f"temperature is {self.temperature}"
        if not 0.0 < self.top_p <= 1.0:
            yield f"top_p is {self.top_p}"
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            yield f"max_new_tokens is {self.max_new_tokens}"
        if self.best_of < 1:
            yield f"best_of is {self.best_of}"
        if not -(2**63) <= self.seed < 2**63:
            yield f"seed is {self.seed}"
        if self.best_of > 1 and self.temperature == 0.0:
            yield f"best_of is {self.best_of} with greedy decoding"


@dataclass(frozen=True)
class Scores:
    """How well texts carry vectors, one entry a row, float32 on the CPU.

    Attributes:
        cosine: between reconstruction and vector.
        mse: normalised, 2(1 - cosine).
        fve: 1 - mse / raw variance of the sidecar's baseline; None where the sidecar has no baseline.
    """

    cosine: Float[Tensor, " n"]
    mse: Float[Tensor, " n"]
    fve: Float[Tensor, " n"] | None = field(default=None)


class Parsed(NamedTuple):
    """A response taken apart."""

    text: str
    closed: bool


def render_response(text: str) -> str:
    """The answer a verbalizer is trained to give, without its end token."""
    return f"{OPEN_TAG}\n{text}\n{CLOSE_TAG}"


def parse_response(response: str) -> Parsed:
    """Take what stands between the first pair of tags, stripped.

    Without a closing tag everything after the opening one is returned and `closed` is False; a missing
    opening tag is forgiven, since the text is what matters.
    """
    _, opened, after = response.partition(OPEN_TAG)
    text, closed, _ = (after if opened else response).partition(CLOSE_TAG)
    return Parsed(text=text.strip(), closed=bool(closed))
