"""Computations that PE threads make one after the other.

torch releases the interpreter's lock in every operation, however small. Threads that compute side by side pass the lock
back and forth, which takes most of the time. Each thread would also compute what a cache would keep for all.
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
    """Make a function that only one thread runs at a time. The function must not wait for other PEs."""

    @functools.wraps(function)
    def one_at_a_time(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with _lock:
            return function(*args, **options)

    return one_at_a_time
