"""Which PE gets which slice of which table: by what slices cost, and by the memory that they take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .embedding_tables import TableConfig
from .table_placements import REPLICATED, TablePlacement

__all__ = ["Costs", "bytes_read", "choose_owners", "slice_bytes"]

_ROOMS = 1.25, 1.5, 2.0  # times a PE's share of the bytes: the first one is no reason to give tables other owners
_FEW_BYTES = 1 << 30  # nor is this on top of it, or what other owners save
_WORTH = 1.1  # times the most that a PE has to do, which one may have for less memory


class Costs(NamedTuple):
    """What placements are balanced by.

    Attributes:
        unit: of the numbers.
        of_slices: what a slice of each table, or a replica, costs the PE that has it, of every resource that is used
            beside the others. A PE is done when it is with the one that it uses most.
    """

    unit: str
    of_slices: tuple[tuple[float, ...], ...]

    @property
    def no_load(self) -> tuple[float, ...]:
        """What a PE without tables uses."""
        return tuple(0.0 for _ in self.of_slices[0])


def bytes_read(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    lookups_per_sample: Mapping[str, float],
    world_size: int,
) -> Costs:
    """Return the bytes of rows that a sample of the global batch makes a slice's owner, or each replica, read."""
    of_slices = []
    for config, placement in zip(configs, placements, strict=True):
        lookups = sum(lookups_per_sample[name] for name in config.feature_names)
        width = config.embedding_dim // placement.num_slices
        samples = 1.0 / world_size if placement.kind == REPLICATED else 1.0
        of_slices.append((lookups * width * config.data_type.itemsize * samples,))
    return Costs("bytes_per_sample", tuple(of_slices))


def choose_owners(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    costs: Costs,
    world_size: int,
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[float, ...]]]:
    """Return the owners of each table's slices, and what every PE uses of each resource.

    The costliest slice comes first, and each goes to the PE that has the least to do so far; of several to the one with
    the fewest bytes.

    Costs say little about memory: a table of few lookups may be the largest. Where a PE gets more than a quarter above
    its share of all rows' bytes (and 1 GiB) that way, slices come in the order of what they are of all costs or of all
    bytes, whichever is more, and each goes to the PE with the least to do among those with room: 1.25 times a PE's
    share, 1.5 or 2, with and without more for the PE that has a slice beyond it. Of these ways the one is taken in
    which the PE with the most memory has the least, by more than 1 GiB, or else the next one, and none has 10 % more to
    do than the PE with the most had.

    Args:
        configs: of the tables.
        placements: of each; those that name owners are as they say, and replicas everybody's.
        costs: of their slices.
        world_size: number of PEs.

    Raises:
        ValueError: a placement names a PE that there is not.
    """
    fixed, free = _fixed(configs, placements, costs, world_size)
    chosen = by_cost = _spread(fixed, sorted(free, key=lambda part: -part.most), math.inf, math.inf)
    cost, memory = sum(part.most for part in free) or 1.0, sum(part.nbytes for part in free) or 1
    by_both = sorted(free, key=lambda part: (-max(part.most / cost, part.nbytes / memory), -part.most))
    share = sum(by_cost.nbytes) / world_size
    for times in _ROOMS:
        if max(by_cost.nbytes) <= times * share + _FEW_BYTES:
            break
        for beside in (0, (times - 1) * share + _FEW_BYTES):
            limited = _spread(fixed, by_both, times * share + _FEW_BYTES, beside)
            if limited.most <= _WORTH * by_cost.most and limited.saves_memory(chosen):
                chosen = limited
    return tuple(map(tuple, chosen.owners)), chosen.loads


class _Part(NamedTuple):
    """A slice of a table that is to get an owner: what it costs of each resource, and the bytes of its rows."""

    table: int
    slice: int
    cost: tuple[float, ...]
    nbytes: int

    @property
    def most(self) -> float:
        return max(self.cost)


class _Owned(NamedTuple):
    """The owners of each table's slices so far; what every PE uses of each resource, its bytes, its largest part's."""

    owners: list[list[int]]
    loads: list[tuple[float, ...]]
    nbytes: list[int]
    largest: list[int]

    @property
    def most(self) -> float:
        """What the PE with the most to do uses of what it uses most."""
        return max(map(max, self.loads))

    def saves_memory(self, other: _Owned) -> bool:
        """Return whether a PE has much less than its counterpart in the order of bytes, and none before it more."""
        ours, theirs = (sorted(each.nbytes, reverse=True) for each in (self, other))
        for here, there in zip(ours, theirs, strict=True):
            if here > there or here < there - _FEW_BYTES:
                return here < there
        return False


def _fixed(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    costs: Costs,
    world_size: int,
) -> tuple[_Owned, list[_Part]]:
    """Return what placements say, and the slices whose owners they leave open."""
    owned = _Owned([], [costs.no_load] * world_size, [0] * world_size, [0] * world_size)
    free = []
    for table, (config, placement) in enumerate(zip(configs, placements, strict=True)):
        cost, nbytes = costs.of_slices[table], slice_bytes(config, placement)
        is_replicated = placement.kind == REPLICATED
        owned.owners.append([] if is_replicated else list(placement.ranks or [0] * placement.num_slices))
        if not is_replicated and placement.ranks is None:
            free += [_Part(table, number, cost, nbytes) for number in range(placement.num_slices)]
            continue
        for owner in range(world_size) if is_replicated else owned.owners[-1]:
            if not 0 <= owner < world_size:
                raise ValueError(f"placement: {config.name} is on PE {owner}, expected 0 to {world_size - 1}")
            owned.loads[owner] = _plus(owned.loads[owner], cost)
            owned.nbytes[owner] += nbytes
            owned.largest[owner] = max(owned.largest[owner], nbytes)
    return owned, free


def _spread(fixed: _Owned, parts: Sequence[_Part], room: float, beside: float) -> _Owned:
    """Give each part to the PE with the least to do among those that have room, or to the one with the fewest bytes.

    Of PEs that have as much to do it is the one with the fewest bytes.

    Args:
        fixed: what has an owner.
        parts: in this order.
        room: of a PE, in bytes.
        beside: the same beside a PE's largest part, where that leaves less.
    """
    owners, loads = [list(of_table) for of_table in fixed.owners], list(fixed.loads)
    nbytes, largest = list(fixed.nbytes), list(fixed.largest)
    for part in parts:
        pes = [
            pe
            for pe, has in enumerate(nbytes)
            if has + part.nbytes <= max(room, max(largest[pe], part.nbytes) + beside)
        ]
        if not pes:
            pes = [pe for pe, has in enumerate(nbytes) if has == min(nbytes)]
        owner = min(pes, key=lambda pe: (max(_plus(loads[pe], part.cost)), nbytes[pe]))
        owners[part.table][part.slice] = owner
        loads[owner] = _plus(loads[owner], part.cost)
        nbytes[owner] += part.nbytes
        largest[owner] = max(largest[owner], part.nbytes)
    return _Owned(owners, loads, nbytes, largest)


def slice_bytes(config: TableConfig, placement: TablePlacement) -> int:
    """Return the bytes of the rows of each of a table's slices."""
    return config.num_embeddings * (config.embedding_dim // placement.num_slices) * config.data_type.itemsize


def _plus(load: tuple[float, ...], cost: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(load, cost, strict=True))
