"""Which PE has which part of which table, and in which order columns come."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .embedding_tables import TableConfig
from .table_placements import REPLICATED, TablePlacement

__all__ = ["Costs", "Group", "Layout", "Run", "Slot", "bytes_read", "place"]

_ROOMS = 1.25, 1.5, 2.0  # times a PE's share of the bytes: the first one is no reason to give tables other owners
_FEW_BYTES = 1 << 30  # nor is this on top of it
_WORTH = 1.1  # times the load that a PE may have for less memory


class Slot(NamedTuple):
    """A feature looked up in a slice of a table.

    Attributes:
        table, slice: numbers; `feature`: in the order of inputs.
        width: columns of the slice.
    """

    table: int
    slice: int
    feature: int
    width: int


@dataclass(frozen=True)
class Group:
    """Tables of equal pooling and dtype, which one call of the operator takes; replicated ones also of equal width.

    Attributes:
        pooling, dtype: of the tables.
        slots: of every PE, in the order of its tables, slices and features; of replicated tables those of one PE, which
            all have.
    """

    pooling: str
    dtype: torch.dtype
    slots: tuple[tuple[Slot, ...], ...]

    @property
    def dim_per_rank(self) -> tuple[int, ...]:
        return tuple(sum(slot.width for slot in of_pe) for of_pe in self.slots)

    @property
    def columns(self) -> tuple[Slot, ...]:
        """The slots, PE by PE."""
        return tuple(itertools.chain(*self.slots))


class Run(NamedTuple):
    """Columns of a group that lie side by side in the result, too: [begin, end) of what is pooled for the group."""

    group: int
    begin: int
    end: int


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


@dataclass(frozen=True)
class Layout:
    """Which PE has which slice, and how results are put together.

    Attributes:
        configs, placements: of the tables.
        features: names, in the order of inputs: as they occur first.
        owners: of every table's slices; none of a replicated table.
        groups: see `Group`, of tables that are spread over the PEs.
        replicated: the same, of those that every PE has.
        outputs: for every block of the result's columns its group, those of replicated tables counted behind the
            others, and its number among the group's slots.
        names, dims: of the result's features, and their columns.
        costs: that owners were chosen by.
        loads: of every PE, in their unit.
    """

    configs: tuple[TableConfig, ...]
    placements: tuple[TablePlacement, ...]
    features: tuple[str, ...]
    owners: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]
    replicated: tuple[Group, ...]
    outputs: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    dims: tuple[int, ...]
    costs: Costs = field(compare=False)
    loads: tuple[float, ...] = field(compare=False)

    @functools.cached_property
    def begins(self) -> tuple[tuple[int, ...], ...]:
        """Where the columns of each group's slots begin in what is pooled for it.

        Those of tables that are spread over the PEs come in the order of the result; of replicated ones, of the slots.
        """
        begins = [[0] * len(group.columns) for group in self.groups]
        widths = [0] * len(self.groups)
        for group, number in self.outputs:
            if group < len(self.groups):
                begins[group][number] = widths[group]
                widths[group] += self.groups[group].columns[number].width
        of_replicated = (
            tuple(itertools.accumulate((slot.width for slot in group.columns), initial=0))[:-1]
            for group in self.replicated
        )
        return (*map(tuple, begins), *of_replicated)

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """What the result is put together of."""
        groups = (*self.groups, *self.replicated)
        runs: list[Run] = []
        for group, number in self.outputs:
            begin, width = self.begins[group][number], groups[group].columns[number].width
            if runs and runs[-1].group == group and runs[-1].end == begin:
                runs[-1] = Run(group, runs[-1].begin, begin + width)
            else:
                runs.append(Run(group, begin, begin + width))
        return tuple(runs)

    @functools.cached_property
    def table_bytes(self) -> tuple[int, ...]:
        """What the rows of every PE's tables take, without optimizer states."""
        return tuple(
            sum(
                _slice_bytes(config, placement) * len(self.slices_of(table, pe))
                for table, (config, placement) in enumerate(zip(self.configs, self.placements, strict=True))
            )
            for pe in range(len(self.loads))
        )

    def is_replicated(self, table: int) -> bool:
        """Return whether every PE has a table."""
        return self.placements[table].kind == REPLICATED

    def slices_of(self, table: int, rank: int) -> list[int]:
        """Return the slices of a table that a PE has."""
        if self.is_replicated(table):
            return [0]
        return [number for number, owner in enumerate(self.owners[table]) if owner == rank]


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


def place(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    costs: Costs,
    world_size: int,
) -> Layout:
    """Give every slice an owner, the costliest first and each to the PE that has the least to do so far.

    Costs say little about memory: a table of few lookups may be the largest. Where a PE gets more than a quarter above
    its share of all rows' bytes (and 1 GiB) that way, slices come in the order of what they are of all costs or of all
    bytes, whichever is more, and each goes to the PE with the least to do among those with room: 1.25 times a PE's
    share, 1.5 or 2, with and without more for the PE that has a slice beyond it. Of these ways the one is taken in
    which the PE with the most memory has the least, and none has 10 % more to do.

    Args:
        configs: of the tables.
        placements: of each.
        costs: of their slices.
        world_size: number of PEs.
    """
    features = tuple(dict.fromkeys(name for config in configs for name in config.feature_names))
    owners, loads = _owners(configs, placements, costs, world_size)
    spread, replicated = (
        [table for table, placement in enumerate(placements) if (placement.kind == REPLICATED) is wanted]
        for wanted in (False, True)
    )

    def slots(table: int, number: int) -> list[Slot]:
        config, width = configs[table], configs[table].embedding_dim // placements[table].num_slices
        return [Slot(table, number, features.index(name), width) for name in config.feature_names]

    def groups(tables: Sequence[int], owners_of: Mapping[int, Sequence[int]], size: int) -> list[Group]:
        made: dict[tuple[str, torch.dtype, int | None], list[list[Slot]]] = {}
        for table in tables:
            config = configs[table]
            width = config.embedding_dim if placements[table].kind == REPLICATED else None
            of_pes = made.setdefault((config.pooling, config.data_type, width), [[] for _ in range(size)])
            for number, owner in enumerate(owners_of[table]):
                of_pes[owner] += slots(table, number)
        return [Group(pooling, dtype, tuple(map(tuple, of_pes))) for (pooling, dtype, _), of_pes in made.items()]

    of_spread = groups(spread, {table: owners[table] for table in spread}, world_size)
    of_replicated = groups(replicated, dict.fromkeys(replicated, (0,)), 1)
    at = {
        (slot.table, slot.feature, slot.slice): (number, column)
        for number, group in enumerate([*of_spread, *of_replicated])
        for column, slot in enumerate(group.columns)
    }
    outputs, names, dims = [], [], []
    num_tables = {name: sum(name in config.feature_names for config in configs) for name in features}
    for table, config in enumerate(configs):
        for name in config.feature_names:
            outputs += [at[table, features.index(name), n] for n in range(placements[table].num_slices)]
            names.append(f"{name}@{config.name}" if num_tables[name] > 1 else name)  # as EmbeddingBagCollection does
            dims.append(config.embedding_dim)
    return Layout(
        tuple(configs),
        tuple(placements),
        features,
        owners,
        tuple(of_spread),
        tuple(of_replicated),
        tuple(outputs),
        tuple(names),
        tuple(dims),
        costs,
        tuple(map(max, loads)),
    )


def _owners(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    costs: Costs,
    world_size: int,
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[float, ...]]]:
    """Return the owners of each table's slices, and what every PE uses of each resource."""
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
            if limited.most <= _WORTH * by_cost.most and limited.by_memory < chosen.by_memory:
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

    @property
    def by_memory(self) -> list[int]:
        """The bytes of the PE with the most, then of the next one, and so on."""
        return sorted(self.nbytes, reverse=True)


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
        cost, nbytes = costs.of_slices[table], _slice_bytes(config, placement)
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


def _slice_bytes(config: TableConfig, placement: TablePlacement) -> int:
    return config.num_embeddings * (config.embedding_dim // placement.num_slices) * config.data_type.itemsize


def _plus(load: tuple[float, ...], cost: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(load, cost, strict=True))
