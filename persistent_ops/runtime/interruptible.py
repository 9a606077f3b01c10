"""Calls that block outside of Python, made so that a signal (Ctrl-C) is handled during the wait.

Python runs signal handlers only in the main thread, between two of its own instructions. A library call in the main
thread would delay them until it returns.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Interruptible"]

T = TypeVar("T")


class Interruptible:
    """Makes such calls from a thread of its own where the caller is the main thread.

    Attributes:
        interrupted: as long as the context that it returns is open, a call that is under way returns soon.
    """

    def __init__(self) -> None:
        self.interrupted: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def call(self, function: Callable[[], T], patience: float | None = None) -> T:
        """Return what `function` returns; where a signal handler raises, let it end and raise that.

        Args:
            function: that blocks.
            patience: seconds after which it is let end too; None for as long as it takes, and so where no thread can be
                started: the interpreter exits, or the system has no room.
        """
        if patience is None and threading.current_thread() is not threading.main_thread():
            return function()  # no signal is handled here
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "persistent_ops wait")
        try:
            future = self._pool.submit(function)
        except RuntimeError:  # in a handler of atexit, or there is no room for a thread
            # It may be queued all the same, and a thread of another call would make it a second time.
            pool, self._pool = self._pool, None
            pool.shutdown(wait=False, cancel_futures=True)
            return function()
        try:
            concurrent.futures.wait([future], patience)
            if not future.done():
                with self.interrupted():
                    concurrent.futures.wait([future])
            return future.result()
        except BaseException:
            # Also if a handler raises once more: the call uses memory that the caller releases.
            while not future.done():
                with contextlib.suppress(BaseException), self.interrupted():
                    concurrent.futures.wait([future])
            raise

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
