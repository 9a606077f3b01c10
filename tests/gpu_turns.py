"""Worlds of tests side by side, one of which has the GPUs to itself at a time.

Where several worlds have a PE on each of the same GPUs, they take turns of milliseconds, and a launch waits until all
PEs of its world have had a turn. A world that makes thousands of launches then takes minutes. Alone it takes seconds.
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

_LONGEST_S = 200.0  # for the worlds before; after that, this world continues beside them


@contextlib.contextmanager
def gpus_alone() -> Iterator[None]:
    """Exclude launches of other worlds that also ask for the GPUs, if each PE has a GPU of its own; collective."""
    if po.backend() != "cuda" or po.world_size() > torch.cuda.device_count():
        yield
        return
    torch.cuda.synchronize()  # what was launched before is not part of the turn
    with turn(
        Path(tempfile.gettempdir(), f"persistent_ops-tests-{os.getuid()}"), os.environ["PERSISTENT_OPS_JOB"], po.rank()
    ):
        yield
        torch.cuda.synchronize()


@contextlib.contextmanager
def turn(path: Path, job: str, rank: int) -> Iterator[None]:
    """Hold a file for all PEs of a job: the first PE locks it, and the others wait until they find the job in it."""
    with path.open("a") as file:
        if rank == 0:
            lock_within(_LONGEST_S, file.fileno())
            path.write_text(job)
        deadline = time.monotonic() + _LONGEST_S
        while path.read_text() != job and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
        if rank == 0:  # the other PEs of the job wait only for what has been launched
            path.write_text("")
