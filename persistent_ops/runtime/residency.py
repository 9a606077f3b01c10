"""Find which launches fit on a GPU side by side, for any placement of their work-groups (WGs).

A launch waits for peers while it is resident. Two launches that may run at once must not keep each other from becoming
fully resident. Otherwise PEs that started them in different orders would wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from .compile.literals import warp_size

__all__ = ["Footprint", "Residency", "Sm", "room_beside", "room_on_gpu"]

_REGISTERS_AT_ONCE = 256  # that a warp takes
_SHARED_AT_ONCE = 128  # bytes
_SHARED_OF_SYSTEM = 1024  # bytes of each WG
# The possible sizes of an SM's shared memory, in KiB. A busy SM keeps its size when another kernel comes.
_DIVISIONS = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)


class Sm(NamedTuple):
    """The resources of a streaming multiprocessor; without bounds on the host."""

    threads: int = 1 << 30
    registers: int = 1 << 30
    shared_bytes: int = 1 << 30
    blocks: int = 32


class Footprint(NamedTuple):
    """The resources of an SM that WGs of a kernel take.

    Attributes:
        threads, shared_bytes: of a WG.
        registers: of a thread.
        most: WGs that an SM holds when it holds nothing else.
        overlaps: whether launches begin before those in front of them have ended: two kernels may then fill an SM.
        cluster: WGs that become resident together, on SMs that lie near each other.
        is_resident: whether its WGs wait for each other or for peers: see `LaunchShape`.
    """

    threads: int
    registers: int
    shared_bytes: int
    most: int
    overlaps: bool = False
    cluster: int = 1
    is_resident: bool = True

    @property
    def registers_of_wg(self) -> int:
        warps = -(-self.threads // warp_size())
        return warps * (-(-self.registers * warp_size() // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE)

    @property
    def shared_of_wg(self) -> int:
        return -(-self.shared_bytes // _SHARED_AT_ONCE) * _SHARED_AT_ONCE + _SHARED_OF_SYSTEM


def room_beside(sm: Sm, resident: Footprint, count: int, own: Footprint) -> int:
    """Return how many WGs of a kernel an SM has room for beside `count` WGs of another one."""
    if count == 0:
        return own.most
    if resident.overlaps:
        return 0
    taken = count * resident.shared_of_wg
    # The least size that the SM may have.
    shared = next((kib << 10 for kib in _DIVISIONS if kib << 10 >= taken), sm.shared_bytes)
    free = (
        (sm.threads - count * resident.threads) // own.threads,
        (sm.registers - count * resident.registers_of_wg) // max(own.registers_of_wg, 1),
        (min(shared, sm.shared_bytes) - taken) // own.shared_of_wg,
        sm.blocks - count,
        own.most,
    )
    return max(0, min(free))


def room_on_gpu(sm: Sm, num_sms: int, resident: Footprint, grid: int, own: Footprint) -> int:
    """Return how many WGs of a kernel a GPU has room for, at least, however `grid` WGs of another one, or fewer, lie.

    SMs hold 0 to `most` of them each: the least sum of rooms that such numbers can have is no less than what the convex
    hull of the rooms has at their average.
    """
    if resident.overlaps:
        return 0
    each = (room_beside(sm, resident, count, own) for count in range(resident.most + 1))
    rooms = list(itertools.accumulate(each, min))
    average = min(grid / num_sms, resident.most)
    hull = (
        rooms[low] if low == high else rooms[low] + (rooms[high] - rooms[low]) * (average - low) / (high - low)
        for low in range(len(rooms))
        for high in range(low, len(rooms))
        if low <= average <= high
    )
    return int(num_sms * min(hull) + 1e-6)


class Residency:
    """What may be resident in a world: kernels of its workspace and of workspaces beside it.

    Args:
        sm: of the GPU.
        num_sms: of it.
    """

    def __init__(self, sm: Sm, num_sms: int) -> None:
        self._sm, self._num_sms = sm, num_sms
        self._num_left = 0
        self._main: dict[Footprint, int] = {}  # with the most WGs
        self._beside: dict[str, dict[Footprint, int]] = {}  # by workspace

    def add(self, workspace: str, kernel: Footprint, grid: int) -> None:
        """Take note of a launch; `workspace`: its name, "" for the world's own.

        One that waits for nobody ends, and others then find the room that it had.
        """
        if not kernel.is_resident:
            return
        noted = self._beside.setdefault(workspace, {}) if workspace else self._main
        noted[kernel] = max(grid, noted.get(kernel, 0))

    def replace(self, workspace: str, launches: Iterable[tuple[Footprint, int]]) -> None:
        """Let these be all launches of a workspace so far."""
        self._beside[workspace] = {}
        for kernel, grid in launches:
            self.add(workspace, kernel, grid)

    @property
    def _num_beside(self) -> int:
        """WGs of the largest launches of workspaces beside the world's own, one of each."""
        return sum(max(of_workspace.values(), default=0) for of_workspace in self._beside.values())

    def num_free(self, *, is_beside: bool) -> int:
        """Return for how many WGs of the world's own launch there are SMs, one each, beside other workspaces' WGs.

        Args:
            is_beside: whether these run beside it.
        """
        return self._num_sms - (self._num_beside if is_beside else 0)

    def leave(self, num_sms: int, *, is_beside: bool) -> None:
        """Leave so many SMs to others from now on; forget the launches so far, but those that run beside others."""
        self._num_left = num_sms
        self._main.clear()
        if not is_beside:
            self._beside.clear()

    def leaves_room(self, *, is_beside: bool) -> bool:
        """Return whether the WGs that may be resident together are no more than the SMs that are not left to others."""
        main = max(self._main.values(), default=0)
        each = (max(of_workspace.values(), default=0) for of_workspace in self._beside.values())
        together = main + self._num_beside if is_beside else max((main, *each))
        return not self._num_left or together <= self._num_sms - self._num_left

    def fits(self) -> bool:
        """Return whether all launches of workspaces beside the world's own find room, whatever that one's launch has.

        One launch of each workspace at a time. Where there is room for all WGs of these, then until all are resident
        some SM has fewer of them than it has room for: the next one finds room there. A cluster needs room on several
        SMs that lie near each other, which this does not show: a kernel with clusters runs beside no other.
        """
        if not self.leaves_room(is_beside=True):
            return False
        kernels = [kernel for of_workspace in self._beside.values() for kernel in of_workspace]
        if not kernels:
            return True
        if any(kernel.cluster > 1 for kernel in kernels):
            return False
        needed = self._num_beside
        largest = Footprint(
            max(kernel.threads for kernel in kernels),
            max(kernel.registers for kernel in kernels),
            max(kernel.shared_bytes for kernel in kernels),
            min(kernel.most for kernel in kernels),
        )
        rooms = (room_on_gpu(self._sm, self._num_sms, resident, grid, largest) for resident, grid in self._main.items())
        return needed <= min((self._num_sms * largest.most, *rooms))
