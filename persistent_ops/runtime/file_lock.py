"""Locks of the operating system on files, awaited with a bound. They end with their holder, however it ends."""

from __future__ import annotations

import fcntl
import time

__all__ = ["lock_within"]

_POLL_S = 0.01


def lock_within(seconds: float, descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file; return whether that succeeded within so many seconds. Closing it, or LOCK_UN, unlocks it.

    Args:
        seconds: to wait for other holders.
        descriptor: of the file.
        shared: beside others that hold it so, instead of alone.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
