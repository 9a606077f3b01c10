"""Library calls without a time-out of their own, made in threads that the caller can abandon.

A thread cannot be ended from outside. A thread whose call never returns stays until the process ends. So the number of
such threads is limited, and a caller that would exceed the limit is refused.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import BootstrapError

__all__ = ["leave_behind", "refuse_after", "within"]

_T = TypeVar("_T")
_hanging: defaultdict[str, list[threading.Thread]] = defaultdict(list)


def leave_behind(thread: threading.Thread, what: str) -> None:
    """Remember a thread whose call has not returned; `what` names the call."""
    if thread.is_alive():
        _hanging[what].append(thread)


def refuse_after(most: int, what: str, remedy: str) -> None:
    """Raise BootstrapError where `most` earlier calls, named by `what`, still have not returned."""
    _hanging[what] = [thread for thread in _hanging[what] if thread.is_alive()]
    if len(_hanging[what]) >= most:
        raise BootstrapError(
            f"{what} has no time-out, and {len(_hanging[what])} earlier call(s) of this process still have not "
            f"returned; {remedy}"
        )


def within(seconds: float, call: Callable[[], _T], what: str) -> _T:
    """Return what `call` returns, or raise what it raises.

    Args:
        seconds: to wait for it; without a bound where the interpreter exits and threads can no longer be started.
        call: made in a thread of its own, which continues if the time does not suffice.
        what: names the call in errors. While one of this name hangs, no other one is begun.

    Raises:
        BootstrapError: it did not return in time, or an earlier one still has not.
    """
    refuse_after(1, what, "start this process again")
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:  # handed to the caller
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True, name=f"persistent_ops {what}")
    try:
        thread.start()
    except RuntimeError:  # in a handler of atexit, where CPython from 3.12 on starts no thread
        return call()
    thread.join(seconds)
    if not outcome:
        leave_behind(thread, what)
        raise BootstrapError(f"{what} did not finish within {seconds:g} s; a peer may have died")
    thread.join()
    good, value = outcome[0]
    if not good:
        raise value
    return value  # type: ignore[no-any-return]
