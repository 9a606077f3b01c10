"""The time-outs of `persistent_ops.init`: from arguments, from the environment, or defaults."""

from __future__ import annotations

import os

__all__ = ["for_joining", "for_operators"]

_MOST_S = 1e9  # kernels count nanoseconds in 64 bits


def for_joining(given: float | None) -> float:
    """Return the seconds in which PEs join a world."""
    return _seconds("timeout", given, 120.0)


def for_operators(given: float | None) -> float:
    """Return the seconds that an operator waits for a peer."""
    return _seconds("operator_timeout", given, 600.0)


def _seconds(name: str, given: float | None, default: float) -> float:
    """Return a time-out as it was given, by the environment (PERSISTENT_OPS_ and its name), or by default."""
    if given is None:
        variable = f"PERSISTENT_OPS_{name.upper()}"
        text = os.environ.get(variable, "")
        if not text:
            return default
        try:
            given, name = float(text), variable
        except ValueError:
            raise ValueError(f"{variable}: expected seconds, got {text!r}") from None
    if not isinstance(given, (int, float)) or isinstance(given, bool):
        raise TypeError(f"{name}: expected seconds, got {given!r}")
    if not 0 < given <= _MOST_S:
        raise ValueError(f"{name}: expected seconds above 0, {_MOST_S:.0f} (30 years) at most, got {given}")
    return given
