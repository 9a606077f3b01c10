"""The handle of a result that is not ready yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from .uncompiled import uncompiled

__all__ = ["Work"]

Result = TypeVar("Result")


class Work(Generic[Result]):
    """A result that is not ready yet: a call with `async_op=True` returns it.

    Wait for handles in the same order on all PEs: a wait may launch again.
    """

    def __init__(self, take: Callable[[], Result], is_ready: Callable[[], bool]) -> None:
        self._take = take
        self._is_ready = is_ready

    @uncompiled
    def wait(self) -> Result:
        """Make the current stream wait for the result, and return it. Later calls return the same result.

        Raises:
            Exception: errors that launches have reported. Bad rows of this call's input are raised each time, and only
                here.
        """
        return self._take()

    def done(self) -> bool:
        """Return whether `wait` would return without a wait or a launch."""
        return self._is_ready()
