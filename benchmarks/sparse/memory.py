"""Peak memory of a call, without its input and its result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from persistent_ops.ops.sparse_plan import OPERATOR
from persistent_ops.runtime.areas import Area
from persistent_ops.runtime.world import World

from .methods import EAGER, OURS, Methods

__all__ = ["MemoryMeter"]

_GATHERING = ("allgather", "into_allgather")


class MemoryMeter:
    """Separates the operator's memory from the benchmark's memory. It measures on GPUs only.

    Make it before the first call of the operator in a world. Call `case_begins` and `case_ready` around the making of a
    case's buffers.

    Args:
        world: of this PE.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._at_start = self._allocated()
        self._kept_before = 0
        self._ready = 0
        self._left_over = 0
        self._gather_before: Area | None = None

    def case_begins(self) -> None:
        """Note what earlier cases have left: what the operator keeps, and what their graphs hold on to."""
        self._kept_before = max(0, self._allocated() - self._at_start)
        areas = OPERATOR.state(self._world).areas
        kept = (areas.nbytes_of(name) for name in ("headers", "progress", "planes"))
        self._left_over = self._heap_in_use() - sum(kept)
        self._gather_before = areas.get("gather")

    def case_ready(self) -> None:
        """Note where the case's buffers have been allocated."""
        self._ready = self._allocated()

    def measure(self, methods: Methods, name: str, call: Callable[[], object]) -> int:
        """Return the bytes that a method has beside its input at its peak, its result among them.

        These are its buffers, what torch allocates meanwhile and, for the operator, all of the symmetric heap that is
        in use while the result is held, also what it keeps from call to call and from case to case. Not among them is
        what graphs of earlier cases hold, and the room that "allgather" keeps once it was asked for, except for that
        algorithm itself.

        `call`: made once before, so that what it keeps is there.
        """
        world = self._world
        self._heap_in_use()
        before = self._allocated()
        torch.cuda.reset_peak_memory_stats(world.backend.device)
        result = call()
        world.check()
        nbytes = torch.cuda.max_memory_allocated(world.backend.device) - before + methods.kept_bytes(name)
        if name in OURS:
            nbytes += self._kept_before + before - self._ready
            nbytes += world.heap.free_list.size - world.heap.free_list.free_bytes - self._left_over
            nbytes += self._gather_bytes(is_used=name in _GATHERING)
        if name in EAGER:
            nbytes -= methods.symmetric_bytes
        del result
        return nbytes

    def _gather_bytes(self, *, is_used: bool) -> int:
        """Return what to add to what this case has taken of the heap, for the room that rows are gathered in."""
        gather = OPERATOR.state(self._world).areas.get("gather")
        nbytes = 0 if gather is None else gather.nbytes
        is_of_this_case = gather is not self._gather_before
        if is_used:
            return 0 if is_of_this_case else nbytes
        return -nbytes if is_of_this_case else 0

    def _heap_in_use(self) -> int:
        self._world.check()
        self._world.heap.reclaim()  # results that nobody holds any more, of any size
        return self._world.heap.free_list.size - self._world.heap.free_list.free_bytes

    def _allocated(self) -> int:
        device = self._world.backend.device
        return torch.cuda.memory_allocated(device) if self._world.backend.name == "cuda" else 0
