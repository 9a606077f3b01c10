"""A PE's view of its peers' credits in a workspace: the launches that they have begun, and their contracts."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from .backend import Backend, Peeked
from .compile.description import COMM, describe
from .heap import SymmetricHeap

__all__ = ["Credits", "OtherCall", "credit_bytes"]


def credit_bytes(world_size: int) -> int:
    """Return the size of a workspace's credits."""
    description = describe(COMM)
    count = description.queries["num_grants"]
    return (count(world_size) + count(1)) * ctypes.sizeof(description.structs["Grant"])


class OtherCall(NamedTuple):
    """A peer is in another call than this PE.

    Attributes:
        peer: it.
        mine, theirs: the contracts of what this PE has begun and the peer has not, and the other way round.
    """

    peer: int
    mine: tuple[int, ...]
    theirs: tuple[int, ...]


class Credits:
    """A workspace's credits: the launches that its peers and this PE have begun. Made collectively.

    Args:
        backend, heap: of the world.
        world_size: of the world.
        further: see `SymmetricHeap.empty`.

    Attributes:
        memory: in the heap, the Grants of the world's launches, and then those of a team of this PE (`Team`).
        piece: for `Backend.peek`, which looks at the world's Grants; the next attributes are of the last look.
    """

    def __init__(self, backend: Backend, heap: SymmetricHeap, world_size: int, further: int) -> None:
        description = describe(COMM)
        self._world_size, self._copies = world_size, description.constants["kGrantCopies"]
        self._epoch_shift = description.constants["kEpochShift"]
        self._grant = description.structs["Grant"]
        self.memory = heap.empty((credit_bytes(world_size) // 8,), torch.int64, further=further)
        self.memory.zero_()
        self._count = description.queries["num_grants"](world_size)
        kind = self._grant * self._count
        self._mailbox = backend.host_visible_bytes(ctypes.sizeof(kind))
        self._seen: Any = kind.from_address(self._mailbox.data_ptr())
        self.piece = Peeked(self.memory.data_ptr(), self._seen)

    def address(self, *, is_alone: bool) -> int:
        """Return where the credits of the world's launches begin, or of this PE's launches alone."""
        first = self._count * is_alone
        return self.memory.data_ptr() + first * ctypes.sizeof(self._grant)

    def _places(self, pe: int) -> tuple[int, int]:
        """Return where grants of a PE lie; the second place is for odd epochs where PEs may put."""
        return pe, self._world_size + self._copies + pe

    def _last(self, pe: int) -> Any:
        return max((self._seen[place] for place in self._places(pe)), key=lambda grant: grant.flag)

    def begun(self) -> list[int]:
        """Return the last epoch that each peer has begun; 0 for this PE."""
        return [self._last(pe).flag >> self._epoch_shift for pe in range(self._world_size)]

    def contract_of(self, peer: int) -> tuple[int, ...]:
        """Return the contract of that."""
        return tuple(self._last(peer).contract)

    def own_contract(self, epoch: int) -> tuple[int, ...]:
        """Return the contract of this PE's last launch, which has this epoch."""
        return tuple(self._seen[self._world_size + epoch % self._copies].contract)

    def launched_by(self, pe: int, epoch: int) -> tuple[int, ...]:
        """Return the contract of a PE's launch, as its credit in device memory says; zeros where that is not here."""
        count = ctypes.sizeof(self._grant) // 8
        for place in self._places(pe):
            words = (ctypes.c_int64 * count)(*self.memory[place * count :][:count].tolist())
            grant = self._grant.from_buffer(words)
            if grant.flag >> self._epoch_shift == epoch:
                return tuple(grant.contract)
        return (0,) * len(grant.contract)
