"""The checker of shapes and types that tests put on signatures, and the way around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# A whole number is a float to a type checker (PEP 484's numeric tower); so it is here.
checker = beartype(conf=BeartypeConf(is_pep484_tower=True))


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The bare function, to show what users who run no checker are told about a value of a wrong type."""
    return inspect.unwrap(function)
