"""How long PEs wait: as the caller says, as the environment does, or by default."""

from __future__ import annotations

import math
import os

__all__ = ["seconds_of"]


def seconds_of(name: str, given: float | None, default: float) -> float:
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
    if not isinstance(given, (int, float)):
        raise TypeError(f"{name}: expected seconds, got {given!r}")
    if not 0 < given < math.inf:
        raise ValueError(f"{name}: expected seconds above 0 and below infinity, got {given}")
    return given
