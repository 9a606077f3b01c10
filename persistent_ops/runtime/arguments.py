"""Numbers as arguments, of any type."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["as_number", "as_whole_number", "as_whole_numbers"]


def as_number(name: str, given: Any) -> float:
    """Return a number of any type as a float, infinity for one that is too large; TypeError names what is none."""
    try:
        if not isinstance(given, str):
            return float(given)
    except OverflowError:  # a whole number
        return math.inf if given > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name}: expected a number, got {given!r}")


def as_whole_number(value: Any, message: str) -> int:
    """Return a whole number of any type as an int; TypeError with the message for all else, also truth values."""
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        raise TypeError(message)
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(message) from error


def as_whole_numbers(values: Iterable[Any], message: str) -> tuple[int, ...]:
    """The same for several; TypeError also where there are not several."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(message)
    return tuple(as_whole_number(value, message) for value in values)
