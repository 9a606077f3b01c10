"""The handle of a result under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from .uncompiled import uncompiled

__all__ = ["Work"]

Result = TypeVar("Result")


class Work(Generic[Result]):
    """A result under way: what a call with `async_op=True` returns.

    Wait for the handles of a PE in the same order on all PEs: a wait may launch again.
    """

    def __init__(self, take: Callable[[], Result], is_ready: Callable[[], bool]) -> None:
        self._take = take
        self._is_ready = is_ready

    @uncompiled
    def wait(self) -> Result:
        """Let the current stream wait for the result, and return it, the same one each time.

        Raises:
            Exception: what launches have reported; bad rows of this call's input each time, and by this call alone.
        """
        return self._take()

    def done(self) -> bool:
        """Return whether `wait` would neither wait nor launch."""
        return self._is_ready()
