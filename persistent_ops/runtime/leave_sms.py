"""SMs for other libraries' collectives, which also wait for peers (cuda/DESIGN.md, "Launches side by side")."""

from __future__ import annotations

from .operator import Operator
from .world import World

__all__ = ["leave_sms"]

_LEAVE = Operator("agreement on SMs that are left to other libraries", ("num_sms",), has_kernel=False)


def leave_sms(world: World, num_sms: int, problem: str = "") -> None:
    """Leave SMs to other libraries' collectives, so that these and launches become resident in any order; collective.

    Launches have at most one WG for each of the other SMs from now on. CUDA graphs keep those that they have captured.

    Args:
        world: of this PE.
        num_sms: to leave, the same on all PEs.
        problem: why this PE cannot, or "".

    Raises:
        ValueError: a PE cannot; then none does.
        RuntimeError: in a CUDA-graph capture.
    """
    if world.workspace.is_capturing():
        raise RuntimeError("PEs cannot agree in a CUDA-graph capture on the SMs that launches leave to others")
    world.meet(_LEAVE.contract(world.team, num_sms))
    backend = world.backend
    free = world.residency.num_free(is_beside=backend.runs_beside)
    if not problem and not 1 <= num_sms < free:
        problem = f"num_sms: expected 1 to {free - 1}, of the {free} SMs that launches may take, got {num_sms}"
    for pe, told in enumerate(world.bootstrap.exchange("leave-sms", problem.encode())):
        if told:
            raise ValueError(f"on PE {pe}: {told.decode()}")
    world.residency.leave(num_sms, is_beside=backend.runs_beside)
    backend.num_sms, backend.default_blocks_per_sm, backend.leaves_room = free - num_sms, 1, True
    world.plan_anew()
