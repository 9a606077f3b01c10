"""Areas: memory that plans name and that is replaced if a launch needs more of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .contract import Contract
from .errors import SymmetricHeapError
from .heap import room_of
from .plans import Plans
from .site import Site

__all__ = ["Area", "Areas", "Need"]


class Area(NamedTuple):
    """One of them.

    Attributes:
        memory: its words.
        offset: in the heap; 0 outside of it.
    """

    memory: torch.Tensor
    offset: int

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return self.memory.nbytes

    @property
    def address(self) -> int:
        """Return where it begins."""
        return self.memory.data_ptr()


class Need(NamedTuple):
    """What a launch needs of an area.

    Attributes:
        name: of the area.
        nbytes: of it.
        room: bytes that are set aside where there are fewer than `nbytes`, and at least so many.
        fill: what each of its 64-bit words must be before peers write to it; None for anything.
        is_restored: whether launches leave it so, but for those that are given up: `recover` fills it again.
    """

    name: str
    nbytes: int
    room: int = 0
    fill: int | None = None
    is_restored: bool = False

    @property
    def size(self) -> int:
        """Return the bytes that are set aside, in whole words."""
        return -(-max(self.nbytes, self.room, 1) // 8) * 8


class Areas(dict[str, Area]):
    """An operator's areas in one world, by name.

    Setting an area aside, or a larger one, renews the plans that name the last one. Plans of CUDA graphs keep it.

    Args:
        site: of this PE.
        plans: of the operator.
    """

    def __init__(self, site: Site, plans: Plans[Any]) -> None:
        super().__init__()
        self._site = site
        self._plans = plans

    def reserve(self, needs: Sequence[Need], contract: Callable[[], Contract], own: Need | None = None) -> None:
        """See to symmetric areas; collective where one is too small, which it is on all PEs at once, or on none.

        Args:
            needs: all that the launch has.
            contract: of the launch, under which the PEs meet.
            own: what the launch needs besides in this PE's part of the heap; None for nothing.

        Raises:
            SymmetricHeapError: no room for all of them on some PE; then none is set aside.
            RuntimeError: the current stream is being captured.
        """
        missing = [need for need in needs if self._is_too_small(need)]
        if not missing:
            if own is not None:
                self.reserve_own(own.name, own.nbytes, own.room)
            return
        self._plans.refuse_capture()
        site = self._site
        site.meet(contract())
        fresh: dict[str, Area] = {}
        lacking = [own] if own is not None and self._is_too_small(own) else []
        rooms = [room_of(need.size) for need in (*missing, *lacking)]
        try:
            for number, need in enumerate(missing):
                fresh[need.name] = self._symmetric(need, sum(rooms[number + 1 :]))
            # After the exchange there, no PE writes to an area before it is filled.
            taken = site.outputs.take_on_all_pes([max(need.nbytes, need.room) for need in lacking], "room")
        except SymmetricHeapError:  # as on all other PEs, which have made the same ones
            for area in fresh.values():
                site.heap.free(area.memory, lambda: None)  # the PEs have met
            raise
        for need in missing:
            if need.is_restored:
                assert need.fill is not None
                site.workspace.restore_in_recovery(fresh[need.name].memory, need.fill)
        for need, (memory, offset) in zip(lacking, taken, strict=True):
            fresh[need.name] = Area(memory, offset)
        # Of plans that are not a graph's, all are to name the same areas as on the other PEs.
        self.put(fresh)

    def put(self, fresh: Mapping[str, Area]) -> None:
        """Have plans name these areas from now on."""
        self._plans.renew(set(fresh), lambda: self.update(fresh))

    def reserve_own(self, name: str, nbytes: int, room: int = 0) -> Area:
        """See to an area of this PE's part of the heap alone; arguments as of `Need`."""

        def take() -> Area:
            size = max(nbytes, room, 1)
            slot = self._site.outputs.take(size, self._site.backend.stream(), is_captured=False)
            return Area(slot.tensor(torch.uint8, (size,)), slot.offset)

        return self._reserve_alone(name, nbytes, take)

    def reserve_private(self, name: str, nbytes: int, room: int = 0) -> Area:
        """See to an area outside of the heap, zero at first; arguments as of `Need`."""
        return self._reserve_alone(
            name, nbytes, lambda: Area(self._site.backend.private_words(-(-max(nbytes, room, 1) // 8)), 0)
        )

    def _reserve_alone(self, name: str, nbytes: int, take: Callable[[], Area]) -> Area:
        if self.nbytes_of(name) < max(nbytes, 1):
            self._site.backend.synchronize()  # launches in flight may still use the last one, and what names it

            def replace() -> None:
                self.pop(name, None)  # its room may be needed
                self[name] = take()

            self._plans.renew({name}, replace)
        return self[name]

    def _is_too_small(self, need: Need) -> bool:
        return self.nbytes_of(need.name) < max(need.nbytes, 1)

    def nbytes_of(self, name: str) -> int:
        """Return the size of an area; 0 where there is none."""
        area = self.get(name)
        return 0 if area is None else area.nbytes

    def _symmetric(self, need: Need, further: int) -> Area:
        memory = self._site.heap.empty((need.size // 8,), torch.int64, further=further)
        if need.fill is not None:
            memory.fill_(need.fill)
        return Area(memory, memory.data_ptr() - self._site.backend.heap_base)
