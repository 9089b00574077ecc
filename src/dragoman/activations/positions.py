"""Which token positions of a text are read.

A rule is written as a short string (`all`, `last`, `every:4`, `sample:6`, `sample:6@20`, `3,5,9`) and
selects 0-based positions in the ids the model receives, special tokens counted but never chosen unless
`include_special` asks for them.

The sample is not drawn from a generator with a state: every position gets a 64-bit rank from a keyed hash
of (seed, doc_id, position) and the N lowest ranks win. Shards, order, number of workers and the versions of
Python and numpy cannot change it, and the sample of N is contained in the sample of N + 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from dragoman.errors import ConfigError, TextError

DEFAULT_MIN_POSITION = 50
"""First position a sample may take: earlier ones have too little context to hold much (facts: stage 0)."""

# Weyl increment and multipliers of splitmix64 (Steele, Lea, Flood 2014): a full-avalanche 64-bit mixer.
_WEYL, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class PositionRule:
    """One way to choose positions; build it with `parse_position_rule`.

    Attributes:
        kind: `all`, `last`, `every` (the first eligible position and each n-th eligible one after it),
            `sample` (n eligible positions from `min_position` on), or `explicit`.
        n: stride of `every`, size of `sample`; unused otherwise.
        min_position: first position a sample may take, counted from 0; unused otherwise.
        explicit: the positions of an explicit list, ascending.
        include_special: also choose special tokens (BOS, chat mark-up).
    """

    kind: Literal["all", "last", "every", "sample", "explicit"]
    n: int = 1
    min_position: int = DEFAULT_MIN_POSITION
    explicit: tuple[int, ...] = ()
    include_special: bool = False

    def __str__(self) -> str:
        if self.kind == "explicit":
            return ",".join(map(str, self.explicit))
        if self.kind == "every":
            return f"every:{self.n}"
        if self.kind == "sample":
            at = "" if self.min_position == DEFAULT_MIN_POSITION else f"@{self.min_position}"
            return f"sample:{self.n}{at}"
        return self.kind

    def select(
        self, ids: Sequence[int], special_ids: Collection[int], *, seed: int = 0, doc_id: str = ""
    ) -> list[int]:
        """Choose positions of one text.

        A sample returns fewer positions than asked, or none, where the text is too short: in bulk that is
        normal. The other rules are asked for by a person and raise instead of returning nothing.

        Args:
            ids: token ids as the model receives them, specials included.
            special_ids: ids never chosen unless `include_special`.
            seed: key of the sample; other rules ignore it.
            doc_id: key of the sample; stable per document, not a running number.

        Returns:
            Ascending positions, counted from 0.

        Raises:
            TextError: nothing to choose from (not for samples); an explicit position beyond the text or
                on a special token.
        """
        eligible = self._eligible(ids, special_ids)
        if self.kind == "sample":
            return self._sample(eligible, seed=seed, doc_id=doc_id)
        if not eligible:
            raise TextError(
                f"the text has no readable token ({len(ids)} ids, all of them special)",
                expected="at least one ordinary token",
                consequence="there would be no vector to read",
                remedy="give a text that is not empty, or ask for special tokens to be included",
            )
        if self.kind == "explicit":
            return self._explicit(ids, eligible)
        if self.kind == "last":
            return eligible[-1:]
        return eligible[:: self.n] if self.kind == "every" else eligible

    def _eligible(self, ids: Sequence[int], special_ids: Collection[int]) -> list[int]:
        if self.include_special:
            return list(range(len(ids)))
        special = special_ids if isinstance(special_ids, set | frozenset) else frozenset(special_ids)
        return [position for position, token in enumerate(ids) if token not in special]

    def _sample(self, eligible: list[int], *, seed: int, doc_id: str) -> list[int]:
        candidates = np.array([p for p in eligible if p >= self.min_position], dtype=np.uint64)
        ranks = _ranks(candidates, seed=seed, doc_id=doc_id)
        # Distinct positions can share a rank once in 2^64; the stable sort then keeps the earlier one.
        chosen = candidates[np.argsort(ranks, kind="stable")[: self.n]]
        return sorted(int(p) for p in chosen)

    def _explicit(self, ids: Sequence[int], eligible: list[int]) -> list[int]:
        beyond = [p for p in self.explicit if p >= len(ids)]
        if beyond:
            raise TextError(
                f"position {beyond[0]} was asked for, but the text has {len(ids)} tokens",
                expected=f"positions from 0 to {len(ids) - 1}",
                consequence="another token than the one meant would be read",
                remedy="ask for smaller positions or give a longer text",
            )
        allowed = frozenset(eligible)
        special = [p for p in self.explicit if p not in allowed]
        if special:
            raise TextError(
                f"position {special[0]} holds a special token (id {ids[special[0]]})",
                expected="positions of ordinary tokens",
                consequence="the state of a special token (often an outlier in norm) would be read as text",
                remedy="choose another position, or ask for special tokens to be included",
            )
        return list(self.explicit)


def parse_position_rule(text: str, *, include_special: bool = False) -> PositionRule:
    """Read a rule from its short form.

    Args:
        text: `all`, `last`, `every:N`, `sample:N`, `sample:N@MIN`, or positions such as `3,5,9`.
        include_special: also choose special tokens.

    Raises:
        ConfigError: any other text, a count of zero, or a negative position.
    """
    rule = text.strip().lower().replace(" ", "")
    if rule in ("all", "last"):
        return PositionRule("all" if rule == "all" else "last", include_special=include_special)
    # [0-9], not \d, which also takes digits of other scripts; 9 digits keep numbers within any model.
    if (match := re.fullmatch(r"every:([0-9]{1,9})", rule)) and int(match[1]) > 0:
        return PositionRule("every", n=int(match[1]), include_special=include_special)
    if (match := re.fullmatch(r"sample:([0-9]{1,9})(?:@([0-9]{1,9}))?", rule)) and int(match[1]) > 0:
        least = DEFAULT_MIN_POSITION if match[2] is None else int(match[2])
        return PositionRule("sample", n=int(match[1]), min_position=least, include_special=include_special)
    if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", rule):
        explicit = tuple(sorted({int(part) for part in rule.split(",")}))
        return PositionRule("explicit", explicit=explicit, include_special=include_special)
    raise ConfigError(
        f"the position rule {text[:80]!r} cannot be read",
        expected="all, last, every:N, sample:N, sample:N@MIN (N ≥ 1), or positions from 0 such as 3,5,9",
        consequence="other tokens than the ones meant would be read",
        remedy="write the rule in one of these forms",
    )


def _ranks(positions: np.ndarray, *, seed: int, doc_id: str) -> np.ndarray:
    """64-bit rank of each position (uint64, [n]), keyed on (seed, doc_id)."""
    # surrogatepass: a doc id read from a file name can hold lone surrogates and must not stop a run.
    document = f"{seed}\x00{doc_id}".encode("utf-8", "surrogatepass")
    key = int.from_bytes(blake2b(document, digest_size=8, person=b"dragoman-pos").digest(), "little")
    state = np.uint64(key) + (positions + np.uint64(1)) * np.uint64(_WEYL)  # wraps modulo 2^64
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
    return state ^ (state >> np.uint64(31))
