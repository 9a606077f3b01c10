"""The durations of the phases of the operator's launches.

Every launch leaves time stamps of its first WG in a report that the host can read, also if no one asks for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

from persistent_ops.ops.sparse_plan import OPERATOR
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import gather

__all__ = ["PHASES", "time_phases"]

PHASES = ("row sets", "row numbers", "rows")
"""Until the PEs know each other's row sets; until the result's indices are there; until all rows have come."""


def time_phases(world: World, call: Callable[[], object], *, trials: int) -> tuple[dict[str, float], str]:
    """Time the phases of one launch of the operator; collective.

    Args:
        world: of this PE.
        call: of the operator; where it launches more than once, the last launch counts.
        trials: calls.

    Returns:
        Each phase's median seconds on the PE where it is longest, and the algorithm that the launch used.

    Raises:
        RuntimeError: the call has launched nothing.
    """
    samples: list[list[float]] = []
    gathers = False
    for _ in range(trials):
        for plan in OPERATOR.state(world).plans.values():
            plan.report.state = 0
        world.barrier()
        call()
        world.check()
        launched = [
            (list(plan.report.phase_ns), plan.gathers)
            for plan in OPERATOR.state(world).plans.values()
            if plan.report.state
        ]
        if not launched:
            raise RuntimeError("the call has not launched the operator")
        stamps, gathers = max(launched)
        samples.append([(end - begin) * 1e-9 for begin, end in pairwise(stamps)])
    everyone = gather([statistics.median(each) for each in zip(*samples, strict=True)])
    longest = [max(each) for each in zip(*everyone, strict=True)]
    return dict(zip(PHASES, longest, strict=True)), "allgather" if gathers else "owner"
