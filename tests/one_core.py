"""PEs that are threads use one core while they run Python, and all cores while their kernels run.

torch releases the interpreter's lock in every operation. A thread that waits for the lock on another core is woken each
time, and most of the time is lost there. On the same core it waits until the first thread has nothing to do.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from persistent_ops.runtime import host, pe_threads

__all__ = ["share_one_core"]

_this_thread = threading.local()


def share_one_core(worker: int) -> None:
    """Let the PEs that are threads of this process share a core from now on.

    Args:
        worker: number of this process among the processes that run tests side by side; each has the next core.
    """
    cores = os.sched_getaffinity(0)
    mine = {sorted(cores)[worker % len(cores)]}
    be_pe = pe_threads._Threads._be_pe

    def be_pe_there(threads: Any, rank: int) -> None:
        _this_thread.cores = mine
        os.sched_setaffinity(0, mine)
        be_pe(threads, rank)

    pe_threads._Threads._be_pe = be_pe_there  # type: ignore[method-assign]
    for place, name in ((host._HostKernel, "launch"), (host.HostBackend, "load")):
        setattr(place, name, _on(cores, getattr(place, name)))


def _on(cores: set[int], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with _all(cores):
            return function(*args, **options)

    return call


@contextlib.contextmanager
def _all(cores: set[int]) -> Iterator[None]:
    """Let this thread, and the threads that it starts, run on all cores."""
    mine = getattr(_this_thread, "cores", None)
    if mine is None:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
