"""What PEs that are threads compute one after the other.

torch lets go of the interpreter's lock in every operation, however small. Threads that compute side by side hand it
back and forth, which takes most of the time; and each makes for itself what a cache would hold for all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["serially"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_lock = threading.RLock()


def serially(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function, which waits for no other PE, one that a single thread is in at a time."""

    @functools.wraps(function)
    def one_at_a_time(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with _lock:
            return function(*args, **options)

    return one_at_a_time
