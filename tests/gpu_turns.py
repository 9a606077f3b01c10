"""Worlds of tests side by side, of which one at a time has the GPUs to itself.

Where several worlds have a PE on each of the same GPUs, these take turns of milliseconds, and a launch waits until all
PEs of its world have had one. A world that makes thousands of launches takes minutes so, and seconds alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import persistent_ops as po
from persistent_ops.runtime.file_lock import lock_within

__all__ = ["gpus_alone", "turn"]

_LONGEST_S = 200.0  # for the worlds before; then it goes on beside them


@contextlib.contextmanager
def gpus_alone() -> Iterator[None]:
    """Let no other world of tests that asks for it launch meanwhile, where PEs have GPUs of their own; collective."""
    if po.backend() != "cuda" or po.world_size() > torch.cuda.device_count():
        yield
        return
    torch.cuda.synchronize()  # what was launched before is none of the turn
    with turn(
        Path(tempfile.gettempdir(), f"persistent_ops-tests-{os.getuid()}"), os.environ["PERSISTENT_OPS_JOB"], po.rank()
    ):
        yield
        torch.cuda.synchronize()


@contextlib.contextmanager
def turn(path: Path, job: str, rank: int) -> Iterator[None]:
    """Hold a file for all PEs of a job: the first one locks it, and the others wait until they find the job in it."""
    with path.open("a") as file:
        if rank == 0:
            lock_within(_LONGEST_S, file.fileno())
            path.write_text(job)
        deadline = time.monotonic() + _LONGEST_S
        while path.read_text() != job and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
        if rank == 0:  # the others of the job have nothing to wait for but what has been launched
            path.write_text("")
