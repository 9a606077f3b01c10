"""NVSHMEM starts in one job at a time, and ends in none meanwhile, where PEs of a host share GPUs.

PEs that share a GPU tell each other so in shared memory that NVSHMEM (3.4.5, src/host/init/init.cu) names after the
first of them alone: mps_shm_0, in whatever job. What starts beside another job's start finds that one's, and what
starts beside an end finds it removed: either way its processes crash. With a GPU for each PE there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .file_lock import lock_within

__all__ = ["turn_to_end", "turn_to_start"]

_log = logging.getLogger("persistent_ops")
_SHARED_MEMORY = Path("/dev/shm")  # containers that share it share what must not be found there


def turn_to_start(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no other job of this user starts NVSHMEM or ends it; for one PE of a job and host.

    Args:
        seconds: to wait for others; then this one goes on beside them, and says so.
    """
    return _turn(seconds, shared=False)


def turn_to_end(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no job of this user starts NVSHMEM; for every PE. `seconds`: as in turn_to_start."""
    return _turn(seconds, shared=True)


@contextlib.contextmanager
def _turn(seconds: float, *, shared: bool) -> Iterator[None]:
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    path = folder / f"persistent_ops.nvshmem.{os.getuid()}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock_within(seconds, descriptor, shared=shared):
            _log.warning("persistent_ops: %s has been locked for %g s; going on beside its holder", path, seconds)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile shares the lock
        os.close(descriptor)
