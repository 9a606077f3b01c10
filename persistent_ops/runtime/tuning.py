"""Common rules of all operators' tunings: no choice is below its minimum.

A machine or a shape decides the maximum: an operator checks it when it makes its plan.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, NamedTuple

__all__ = ["BoundedTuning", "at_least"]

_LEAST = "least"


class _Bound(NamedTuple):
    """What a field takes: an int, or a float too, of at least `least`; None where it is optional."""

    kind: type
    least: int
    is_optional: bool

    def __str__(self) -> str:
        what = "an int" if self.kind is int else "a number"
        return f"{what} of at least {self.least}{', or None' if self.is_optional else ''}"


def at_least(least: int, default: Any) -> Any:
    """Return a field of a tuning whose least value is not 1."""
    return dataclasses.field(default=default, metadata={_LEAST: least})


@dataclasses.dataclass(frozen=True)
class BoundedTuning:
    """An operator's tuning: a frozen dataclass whose fields are `int`, `float`, or either `| None`.

    Raises:
        TypeError: a field is of another type; a bool is no number.
        ValueError: it is below 1, or below what `at_least` gives.
    """

    def __post_init__(self) -> None:
        for name, bound in _bounds(type(self)).items():  # type: ignore[arg-type]  # a class has a hash of its own
            value = getattr(self, name)
            if value is None and bound.is_optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int if bound.kind is int else (int, float)):
                raise TypeError(f"{name}: expected {bound}, got {value!r}")
            if not value >= bound.least:  # NaN is no number either
                raise ValueError(f"{name}: expected {bound}, got {value}")


@functools.cache
def _bounds(tuning: type[BoundedTuning]) -> dict[str, _Bound]:
    hints = typing.get_type_hints(tuning)
    bounds = {}
    for field in dataclasses.fields(tuning):
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        kind = float if float in kinds else int
        bounds[field.name] = _Bound(kind, field.metadata.get(_LEAST, 1), type(None) in kinds)
    return bounds
