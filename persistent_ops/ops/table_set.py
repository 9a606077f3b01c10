"""Recognising a list of tables that was passed before, at a cost of well under a microsecond per table.

A set is the same while the storages behind its tables live: their addresses alone would say the same of tables that
were freed and allocated anew, and would say it on one PE and not on another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["TableSet", "TableSets"]

_MAX_SETS = 256  # lists that change without end must not collect


class TableSet:
    """A list of tables.

    Attributes:
        dim_per_rank: what the PEs have agreed on for it; None before.
        plans: an operator's plans for it, by the rest of their signature.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.dim_per_rank: tuple[int, ...] | None = None
        self.plans: dict[tuple[object, ...], Any] = {}
        self._storages = [StorageWeakRef(weight.untyped_storage()) for weight in weights]

    def is_alive(self) -> bool:
        """Return whether no table has been freed."""
        return not any(storage.expired() for storage in self._storages)


class TableSets:
    """The sets of one world.

    Args:
        make_room: World.make_room.
    """

    def __init__(self, make_room: Callable[[dict[Any, Any], int], None]) -> None:
        self._make_room = make_room
        # By the identities of the tensor objects: an entry goes when one of them does, so an identity cannot be reused.
        self._sightings: dict[tuple[int, ...], tuple[list[int], TableSet, list[weakref.ref[torch.Tensor]]]] = {}
        self._sets: dict[tuple[object, ...], TableSet] = {}

    def find(self, weights: Sequence[torch.Tensor]) -> TableSet:
        """Return the set that these tables are, a new one where they have not been seen."""
        identity = tuple(map(id, weights))
        sighting = self._sightings.get(identity)
        if sighting is not None and sighting[0] == [weight.data_ptr() for weight in weights]:
            return sighting[1]
        key = tuple(
            (w.untyped_storage()._cdata, w.data_ptr(), w.shape, w.dtype, w.is_contiguous(), w.device) for w in weights
        )
        tables = self._sets.get(key)
        if tables is None or not tables.is_alive():
            tables = TableSet(weights)
            self._sets.pop(key, None)
            self._make_room(self._sets, _MAX_SETS)
            self._sets[key] = tables
            # A dropped set is forgotten altogether: to PEs that see its tables in other tensor objects it is new.
            kept = set(map(id, self._sets.values()))
            for seen in [seen for seen, sighting in self._sightings.items() if id(sighting[1]) not in kept]:
                del self._sightings[seen]
        if len(self._sightings) > _MAX_SETS:
            self._sightings.clear()
        sightings = self._sightings

        def forget(_: object) -> None:
            sightings.pop(identity, None)

        sightings[identity] = ([w.data_ptr() for w in weights], tables, [weakref.ref(w, forget) for w in weights])
        return tables
