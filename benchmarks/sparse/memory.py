"""Peak memory of a call, beside what its input and its result take."""

from __future__ import annotations

from collections.abc import Callable

import torch

from persistent_ops.runtime.world import World

from .methods import EAGER, OURS, Methods

__all__ = ["MemoryMeter"]

_ROOMY = ("allgather", "into_allgather", "dense")  # these keep room for themselves in the symmetric heap


class MemoryMeter:
    """Tells what the operator keeps from what the benchmark has allocated. It measures on GPUs only.

    Make it before the first call of the operator in a world. Call `case_begins` and `case_ready` around the making of a
    case's buffers, and make every method's first call in a case through `first_call`.

    Args:
        world: of this PE.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._at_start = self._allocated()
        self._kept_before = 0
        self._ready = 0
        self._roomy = 0

    def case_begins(self) -> None:
        """Note what the operator has kept from earlier cases: nothing else is left of them."""
        self._kept_before = max(0, self._allocated() - self._at_start)

    def case_ready(self) -> None:
        """Note where the case's buffers have been allocated."""
        self._ready = self._allocated()

    def first_call(self, name: str, call: Callable[[], object]) -> None:
        """Call a method, and note how much of the symmetric heap it keeps from now on."""
        before = self._heap_in_use()
        call()
        self._world.check()
        if name in _ROOMY:
            self._roomy += self._heap_in_use() - before

    def measure(self, methods: Methods, name: str, call: Callable[[], object]) -> int:
        """Return the bytes that a method has beside its input at its peak, its result among them.

        These are its buffers, what torch allocates meanwhile and, for the operator, all of the symmetric heap that is
        in use while the result is held: also what it keeps from call to call and from case to case, but for the room
        that other algorithms keep for themselves because they were asked for.
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
            nbytes += world.heap.free_list.size - world.heap.free_list.free_bytes
            nbytes -= 0 if name in _ROOMY else self._roomy
        if name in EAGER:
            nbytes -= methods.symmetric_bytes
        del result
        return nbytes

    def _heap_in_use(self) -> int:
        self._world.check()
        self._world.heap.reclaim()  # results that nobody holds any more, of any size
        return self._world.heap.free_list.size - self._world.heap.free_list.free_bytes

    def _allocated(self) -> int:
        device = self._world.backend.device
        return torch.cuda.memory_allocated(device) if self._world.backend.name == "cuda" else 0
