"""A bound on what tests share: nobody waits longer than a minute for what the first of them makes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["bounded"]

_MOST_CPU_S = 60.0
_MOST_S = 240.0  # whatever it does, on a machine that others keep busy


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Fail where the set-up of something takes more than a minute of a quiet machine.

    On a busy one it takes longer, so what counts is the CPU time of this process and of its children that have ended,
    if it has taken so long at all. What waits uses none: for that the bound has room.
    """
    cpu, begin = _cpu_seconds(), time.monotonic()
    yield
    cpu, whole = _cpu_seconds() - cpu, time.monotonic() - begin
    if whole > _MOST_S or min(cpu, whole) > _MOST_CPU_S:
        pytest.fail(
            f"{what} took {whole:.1f} s to set up, of which {cpu:.1f} s of CPU time: expected at most {_MOST_S:g} s in "
            f"all, or {_MOST_CPU_S:g} s of CPU time. Share less, or make it when it is asked for"
        )


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
