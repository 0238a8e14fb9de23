"""What callers hand in: of the right type, or a ConfigError that names the argument.

Owns the checks of single values. numpy's numbers are as good as Python's and come out as those;
what Python itself would let pass for a number, such as True, is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from operator import index
from typing import Any

import numpy as np

from octavo.base import ConfigError

SHOWN = 80
"""Most characters of a wrong value that a message repeats."""


def shown(value: Any) -> str:
    """A wrong value as a message repeats it."""
    written = repr(value)
    return written if len(written) <= SHOWN else f"{written[:SHOWN]}..."


def whole(name: str, value: Any) -> int:
    """A whole number."""
    if not isinstance(value, bool | np.bool_):
        try:
            return index(value)
        except TypeError:
            pass
    raise ConfigError(f"{name} must be a whole number, not {shown(value)}")


def number(name: str, value: Any) -> float:
    """A number; infinity and NaN are for whoever knows the range."""
    if isinstance(value, Real | np.floating | np.integer) and not isinstance(value, bool):
        try:
            return float(value)
        except (OverflowError, TypeError, ValueError):
            pass
    raise ConfigError(f"{name} must be a number, not {shown(value)}")


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ConfigError(f"{name} must be True or False, not {shown(value)}")


def text(name: str, value: Any) -> str:
    """A text that can be written down: one without halves of characters."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a text, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} is no text: character {error.start} is half of a surrogate pair"
        ) from error
    return value


def many(name: str, value: Any, what: str) -> list[Any]:
    """Several values: a list, a tuple, an array. what: of which, for the message."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of {what}, not {shown(value)}")
    try:
        return value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else list(value)
    except TypeError as error:
        raise ConfigError(f"{name} must be a list of {what}, not {shown(value)}") from error


def wholes(name: str, value: Any, what: str) -> list[int]:
    """Several whole numbers."""
    values = many(name, value, what)
    # Prompts are long; nearly all are lists of plain numbers.
    if {*map(type, values)} <= {int}:
        return values
    return [whole(name, one) for one in values]
