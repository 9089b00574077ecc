"""User-facing errors: each says what was found, what was expected, what would have gone wrong, what to do.

A `DragomanError` is a user's mistake or a bad file and becomes one paragraph and exit code 2 on the
command line. An `AssertionError` anywhere in this package is our own bug and keeps its traceback.
"""

from __future__ import annotations

from typing import Any


class DragomanWarning(UserWarning):
    """Something works but is likely not what was meant; tests turn these into errors."""


class DragomanError(Exception):
    """Base of all errors that a user can cause and repair.

    Args:
        found: what is there, with the value, as a sentence without its full stop.
        expected: what should have been there.
        consequence: what would silently have gone wrong had this not stopped.
        remedy: what to do, as an imperative.
    """

    def __init__(self, found: str, *, expected: str, consequence: str, remedy: str) -> None:
        super().__init__(found)
        self.found = found.rstrip(".")
        self.expected = expected.rstrip(".")
        self.consequence = consequence.rstrip(".")
        self.remedy = remedy.rstrip(".")

    def __str__(self) -> str:
        return (
            f"{_capital(self.found)}. Expected: {self.expected}. "
            f"Otherwise: {self.consequence}. To fix it: {self.remedy}."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments do not survive the default pickling between worker processes.
        return _rebuild, (type(self), self.found, self.expected, self.consequence, self.remedy)


def _capital(sentence: str) -> str:
    # A sentence that starts with a file's or a key's name keeps the name as it is spelt.
    return sentence[:1].upper() + sentence[1:] if sentence.partition(" ")[0].isalpha() else sentence


def _rebuild(
    kind: type[DragomanError], found: str, expected: str, consequence: str, remedy: str
) -> DragomanError:
    return kind(found, expected=expected, consequence=consequence, remedy=remedy)


class SubjectError(DragomanError, ValueError):
    """A model cannot be found, loaded or understood."""


class FetchError(DragomanError, OSError):
    """A download failed: no network, wrong hash, missing package."""


class SidecarError(DragomanError, ValueError):
    """A sidecar is missing, malformed, or disagrees with the live tokenizer, model or data."""


class InjectionError(DragomanError, RuntimeError):
    """A vector cannot enter the forward pass at the one right place."""


class ScaleError(DragomanError, ValueError):
    """A scale or a norm is missing, not finite or not positive."""


class VectorError(DragomanError, ValueError):
    """Vectors have the wrong width, are not finite, or a file of vectors is damaged."""


class TextError(DragomanError, ValueError):
    """A text is empty, too short for the requested position, or too long for the model."""


class CorpusError(DragomanError, ValueError):
    """A corpus cannot be read or is too small for what is asked."""


class ConfigError(DragomanError, ValueError):
    """A config has an unknown key, a value out of range, or contradicts what it is used with."""


class PairError(DragomanError, ValueError):
    """A pair's folder is incomplete or its two halves do not belong together."""


class RunError(DragomanError, RuntimeError):
    """A run folder belongs to another config, is in use, or cannot be resumed."""


class ResourceError(DragomanError, OSError):
    """Too little disk or memory; nothing was written under its final name."""


class TrainingError(DragomanError, RuntimeError):
    """Training cannot go on: non-finite steps in a row, nothing supervised, an empty set."""
