"""The PEs of a launch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALONE", "WORLD", "Team"]

WORLD, ALONE = 0, 1  # numbers of teams


@dataclass(frozen=True, eq=False)
class Team:
    """PEs that launch together; a world has two, `World.team` and `World.alone`. A part of plans' keys and contracts.

    Attributes:
        rank: of this PE.
        size: number of PEs.
        room: PEs that kernels have room for, size rounded up to a multiple.
        number: of the team, the same on all its PEs: WORLD or ALONE.
        all_reachable: whether every PE's heap is mapped on every other.
    """

    rank: int
    size: int
    room: int
    number: int
    all_reachable: bool
