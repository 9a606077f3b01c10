"""Recognize a list of tables that was passed before, at a cost of well under a microsecond per table.

A set stays the same while the storages of its tables live. Addresses alone are not enough: tables that were freed and
allocated again may have the same addresses on one PE and not on another. A set is known by its tensor objects. What may
change under such an object (`w.data = ...`, `w.resize_(...)`) is compared at every call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...runtime.plain_call import require_plain_list
from ...runtime.torch_private import TensorGuards, storage_has_expired

__all__ = ["Sighting", "TableSet", "TableSets"]

_address_of = torch.Tensor.data_ptr
_MAX_SETS = 256  # lists that change without end must not collect
_MAX_KEYS = 64


class TableSet:
    """A list of tables.

    Attributes:
        dim_per_rank: what the PEs have agreed on for it; None before.
        keys: of the plans of calls, by what a call was like.
        handles: of the tables' storages, for `storage_has_expired`.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.dim_per_rank: tuple[int, ...] | None = None
        self.keys: dict[Hashable, Any] = {}
        self._storages = [StorageWeakRef(weight.untyped_storage()) for weight in weights]
        self.handles = [storage.cdata for storage in self._storages]

    def is_alive(self) -> bool:
        """Return whether no table has been freed."""
        return not any(map(storage_has_expired, self.handles))

    def keep_key(self, call: Hashable, key: Any) -> None:
        """Keep the key of calls like this one."""
        if len(self.keys) >= _MAX_KEYS:
            self.keys.clear()
        self.keys[call] = key


@dataclass
class Sighting:
    """A list of tensor objects that has been a set of tables.

    Attributes:
        tables: that set.
        addresses: of the tables.
        geometry: see `_geometry`.
        guards: compare a list with geometry, and with more, at less cost; None: there are none, or one occurs twice.
        requires_grad: whether one of the objects does; `guards` compares that, too.
        references: to the objects; their ends make an end of this.
    """

    tables: TableSet
    addresses: list[int]
    geometry: list[tuple[object, ...]]
    guards: Any
    requires_grad: bool
    references: list[weakref.ref[torch.Tensor]]


def _geometry(weights: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    """Return all that a plan knows of tables, beside their addresses."""
    return [(weight.shape, weight.stride(), weight.dtype) for weight in weights]


def _guards(weights: Sequence[torch.Tensor]) -> Any:
    if TensorGuards is None or not len(weights) or len(set(map(id, weights))) < len(weights):
        return None
    sizes: list[Any] = [list(weight.shape) for weight in weights]
    strides: list[Any] = [list(weight.stride()) for weight in weights]
    return TensorGuards(*weights, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


class TableSets:
    """The sets of one world.

    Args:
        make_room: World.make_room.
        keep: called with the sets that are left where some may have been dropped.
    """

    def __init__(
        self,
        make_room: Callable[[dict[Any, Any], int], None],
        keep: Callable[[Set[TableSet]], None] = lambda kept: None,
    ) -> None:
        self._make_room = make_room
        self._keep = keep
        # By the identities of the tensor objects: an entry goes when one of them does, so an identity cannot be reused.
        self._sightings: dict[tuple[int, ...], Sighting] = {}
        self._sets: dict[tuple[object, ...], TableSet] = {}

    def find(self, weights: Sequence[torch.Tensor]) -> TableSet:
        """Return the set that these tables are, a new one where they have not been seen; raise for what are none."""
        return self.see(weights).tables

    def see(self, weights: Sequence[torch.Tensor]) -> Sighting:
        """Return the same with what the tensor objects are now."""
        if not isinstance(weights, (list, tuple)):
            require_plain_list("weights", weights)  # raises
        identity = tuple(map(id, weights))
        sighting = self._sightings.get(identity)
        if (
            sighting is not None
            and sighting.addresses == list(map(_address_of, weights))
            and not any(map(storage_has_expired, sighting.tables.handles))
        ):
            if sighting.guards is not None and sighting.guards.check(*weights):
                return sighting
            if sighting.geometry == _geometry(weights):
                sighting.guards = _guards(weights)
                sighting.requires_grad = any(weight.requires_grad for weight in weights)
                return sighting
        require_plain_list("weights", weights)
        storages = (weight.untyped_storage()._cdata for weight in weights)
        addresses, geometry = [weight.data_ptr() for weight in weights], _geometry(weights)
        devices = (weight.device for weight in weights)
        key = tuple(zip(storages, addresses, geometry, devices, strict=True))
        tables = self._sets.get(key)
        if tables is None or not tables.is_alive():
            tables = TableSet(weights)
            self._sets.pop(key, None)
            self._make_room(self._sets, _MAX_SETS)
            self._sets[key] = tables
            # A dropped set is forgotten altogether: to PEs that see its tables in other tensor objects it is new.
            kept = set(self._sets.values())
            for seen in [seen for seen, sighting in self._sightings.items() if sighting.tables not in kept]:
                del self._sightings[seen]
            self._keep(kept)
        if len(self._sightings) > _MAX_SETS:
            self._sightings.clear()
        sightings = self._sightings

        def forget(_: object) -> None:
            sightings.pop(identity, None)

        references = [weakref.ref(weight, forget) for weight in weights]
        requires_grad = any(weight.requires_grad for weight in weights)
        sighting = Sighting(tables, addresses, geometry, _guards(weights), requires_grad, references)
        sightings[identity] = sighting
        return sighting
