"""Inputs that launches change in place (tables, states of an optimizer), and what an abort makes of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import PersistentOpsError
from .torch_private import storage_of_weak

__all__ = ["Changes", "OnAbort"]

_MANY = 1024


class OnAbort(enum.Enum):
    """What an input is after a launch that was given up."""

    POISON = enum.auto()
    """All bits set, which is NaN: what it holds can be made again."""
    REFUSE = enum.auto()
    """As the launch has left it, and refused until it is said to be loaded anew."""


@dataclass(frozen=True)
class _Input:
    name: str
    on_abort: OnAbort
    storage: StorageWeakRef
    first: int
    nbytes: int

    def poison(self) -> None:
        storage = storage_of_weak(self.storage.cdata)
        if storage is not None:
            bytes_ = torch.empty(0, dtype=torch.uint8, device=storage.device)
            bytes_.set_(storage, self.first, (self.nbytes,), (1,)).fill_(0xFF)


_Place = tuple[int, int]  # of a storage, and where in it


def _place_of(tensor: torch.Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.element_size()


class Changes:
    """The inputs that launches of a world change.

    Args:
        is_capturing: `Workspace.is_capturing`.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self._is_capturing = is_capturing
        self._under_way: dict[_Place, _Input] = {}  # by launches that may still give up
        self._captured: dict[_Place, _Input] = {}  # by graphs, at every replay
        self._given_up: dict[_Place, _Input] = {}

    def begin(self, name: str, tensor: torch.Tensor, on_abort: OnAbort) -> None:
        """Note that the launch to come changes a contiguous tensor.

        Raises:
            PersistentOpsError: it has to be loaded anew.
        """
        storage = tensor.untyped_storage()
        place = _place_of(tensor)
        refused = self._given_up.get(place)
        if refused is not None and not refused.storage.expired():
            raise PersistentOpsError(
                f"{name}: a launch that was given up may have changed a part of this tensor; load it anew, and say so"
            )
        noted = self._captured if self._is_capturing() else self._under_way
        if place not in noted or noted[place].storage.expired():
            if len(noted) > _MANY:
                for dead in [each for each, found in noted.items() if found.storage.expired()]:
                    del noted[dead]
            noted[place] = _Input(name, on_abort, StorageWeakRef(storage), place[1], tensor.nbytes)

    def settle(self) -> None:
        """Take note that what has been launched has completed; what graphs change stays under way."""
        self._under_way.clear()

    def give_up(self) -> None:
        """Take note that a launch was given up: those under way may be any of its, and what came behind it."""
        self._given_up |= self._under_way | self._captured
        self._under_way.clear()
        if not self._is_capturing():
            self._poison()

    def recover(self) -> None:
        """Poison once more, now that no launch writes any longer; what was poisoned may be used."""
        self._poison()
        self._given_up = {at: each for at, each in self._given_up.items() if each.on_abort is OnAbort.REFUSE}

    def loaded(self, *tensors: torch.Tensor) -> None:
        """Let tensors be used that have been loaded anew, as a whole."""
        for tensor in tensors:
            self._given_up.pop(_place_of(tensor), None)

    def _poison(self) -> None:
        for each in self._given_up.values():
            if each.on_abort is OnAbort.POISON:
                each.poison()
