"""The result of an evaluation: figures that name their comparison, rows, and requirements on figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.errors import ConfigError
from dragoman.evaluation.stats import Calibration, Estimate


@dataclass(frozen=True)
class Figure:
    """One number with all that is needed to judge it (invariant: no figure stands alone)."""

    name: str
    meaning: str
    """What was measured, in words."""
    estimate: Estimate
    compared_with: str
    """What the number is to be held against: a baseline, a control, chance."""
    unit: str = ""
    better: str = "higher"
    """"higher", "lower", or "" for a control or a description, which has no better direction."""

    @property
    def value(self) -> float:
        """The figure itself."""
        return self.estimate.value

    def to_json(self) -> dict[str, Any]:
        """A plain dict: value, low, high, n, documents, unit, compared_with, meaning, better."""
        return {
            "value": self.estimate.value,
            "low": self.estimate.low,
            "high": self.estimate.high,
            "n": self.estimate.n,
            "documents": self.estimate.documents,
            "unit": self.unit,
            "compared_with": self.compared_with,
            "meaning": self.meaning,
            "better": self.better,
        }


@dataclass(frozen=True)
class FveReport:
    """What `evaluate_fve` measured.

    Attributes:
        figures: by name, in the order in which they are shown.
        rows: one dict a held-out vector (position, doc_id, reference, explanation, errors, ...).
        calibration: the proposed `low-score` threshold on the `fve` of a row.
        test_set: where the vectors came from, rows available and used, content hash of what was used.
        settings: n, seed, decoding, pool, resamples, level.
    """

    figures: dict[str, Figure]
    rows: list[dict[str, Any]]
    calibration: Calibration
    test_set: dict[str, Any]
    settings: dict[str, Any]

    def value(self, name: str) -> float:
        """The value of a figure by name."""
        return self.figures[name].value

    def to_json(self) -> dict[str, Any]:
        """Figures by name beside calibration, test_set and settings; rows are not included."""
        return {
            **{name: figure.to_json() for name, figure in self.figures.items()},
            "score_threshold": self.calibration.to_json(),
            "test_set": self.test_set,
            "settings": self.settings,
        }


@dataclass(frozen=True)
class Requirement:
    """`NAME>=VALUE`: a bound on one figure."""

    name: str
    operator: str
    bound: float

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.bound:g}"

    def holds(self, value: float) -> bool:
        """Whether a value meets the bound; NaN never does."""
        return {
            ">=": value >= self.bound,
            "<=": value <= self.bound,
            ">": value > self.bound,
            "<": value < self.bound,
        }[self.operator]


_REQUIREMENT = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(>=|<=|>|<)\s*(\S+)\s*")


def parse_requirement(text: str, known: Sequence[str]) -> Requirement:
    """Read `NAME>=VALUE` (also <=, > and <).

    Args:
        text: as given on the command line.
        known: names of figures that exist.

    Raises:
        ConfigError: another form, an unknown figure, or a bound that is no finite number.
    """
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        raise _bad_requirement(f"--require {text!r} is not of the form NAME>=VALUE", known)
    name, operator, number = match.groups()
    if name not in known:
        raise _bad_requirement(f"--require names {name!r}, which is not a figure of this suite", known)
    try:
        bound = float(number)
    except ValueError:
        bound = float("nan")
    if not abs(bound) < float("inf"):
        raise _bad_requirement(f"--require {text!r} has the bound {number!r}", known)
    return Requirement(name, operator, bound)


def _bad_requirement(found: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(
        found,
        expected=f"NAME>=VALUE, NAME<=VALUE, NAME>VALUE or NAME<VALUE with NAME one of {', '.join(known)}",
        consequence="the check would pass without having looked at anything",
        remedy="quote it for the shell, for example --require 'round_trip_fve>=0.2'",
    )


def failed_requirements(
    requirements: Sequence[Requirement], figures: Mapping[str, Figure]
) -> list[tuple[Requirement, float]]:
    """The requirements that do not hold, each with the value found."""
    return [(r, figures[r.name].value) for r in requirements if not r.holds(figures[r.name].value)]
