"""Whole numbers of any type, as arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["whole_number", "whole_numbers"]


def whole_number(value: Any, message: str) -> int:
    """Return a whole number of any type as an int; TypeError with the message for all else, also truth values."""
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        raise TypeError(message)
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(message) from error


def whole_numbers(values: Iterable[Any], message: str) -> tuple[int, ...]:
    """The same for several; TypeError also where there are not several."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(message)
    return tuple(whole_number(value, message) for value in values)
