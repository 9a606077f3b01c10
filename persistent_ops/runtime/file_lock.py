"""File locks of the operating system with bounded waits. A lock ends with its holder, however the holder ends."""

from __future__ import annotations

import fcntl
import time

__all__ = ["lock_within"]

_POLL_S = 0.02  # who has waited longer looks more often, and so comes first
_SHORTEST_POLL_S = 0.002


def lock_within(seconds: float, descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file; return whether that succeeded within this time. Closing it, or LOCK_UN, unlocks it.

    Args:
        seconds: to wait for other holders.
        descriptor: of the file.
        shared: beside others that hold it so, instead of alone.
    """
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began  # before the look: this process may not run for a while
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if waited >= seconds:
                return False
            time.sleep(max(_SHORTEST_POLL_S, _POLL_S / (1.0 + 4.0 * waited)))
