"""Turns of tests that pytest-xdist's workers run: many at a time share the GPUs, one at a time has them alone.

Contexts take turns on a GPU, a few milliseconds each. PEs that wait for one another in every launch then wait for as
many turns, and thousands of launches take a hundred times as long as on GPUs that nobody else uses.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

__all__ = ["turn"]


@contextlib.contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the GPUs, alone or with others; who waits for that is not overtaken.

    Args:
        folder: that all who share them name.
        alone: until all others are through, and none before this one is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "gate").open("w") as gate, (folder / "gpus").open("w") as gpus:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(gpus, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield
