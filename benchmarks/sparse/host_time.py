"""The time that an eager call keeps the host busy, without its wait for the number of rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from persistent_ops.ops.sparse_plan import SparsePlan
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import gather

__all__ = ["time_host"]


def time_host(world: World, call: Callable[[], object], *, trials: int) -> float:
    """Return the seconds of a call, without those in which it waits for a launch; collective.

    The GPU has no other work then; waits for other work would spoil the time. On the host backend a launch runs the
    kernel, so the kernel's time is included.

    Args:
        world: of this PE.
        call: of the operator, which has been called before.
        trials: calls, of which the median counts; on the slowest PE.
    """
    waited = 0.0
    await_report = SparsePlan.await_report

    def timed(plan: SparsePlan, *arguments: Any) -> tuple[int, float]:
        nonlocal waited
        begin = time.perf_counter()
        try:
            return await_report(plan, *arguments)
        finally:
            waited += time.perf_counter() - begin

    samples = []
    with mock.patch.object(SparsePlan, "await_report", timed):
        for _ in range(trials):
            world.barrier()
            world.check()
            waited, begin = 0.0, time.perf_counter()
            result = call()
            samples.append(time.perf_counter() - begin - waited)
            del result  # the next one may have its place
    world.check()
    return float(max(gather(statistics.median(samples))))
