"""Layout of tables: the parts of each PE, and the order of columns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from .embedding_tables import TableConfig
from .table_owners import Costs, choose_owners, load, slice_bytes, step_time
from .table_placements import REPLICATED, TablePlacement

__all__ = ["Group", "Layout", "Run", "Slot", "place"]


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
        slots: of every PE: slots with the most lookups first, then in the order of its tables, slices and features. For
            replicated tables: the slots of one PE, since all PEs have the same, in that order alone.
    """

    pooling: str
    dtype: torch.dtype
    slots: tuple[tuple[Slot, ...], ...]

    @functools.cached_property
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


@dataclass(frozen=True)
class Layout:
    """Which PE has which slice, and how results are put together.

    Attributes:
        configs, placements: of the tables.
        features: names, in the order of inputs: as they occur first.
        owners: of every table's slices; none of a replicated table.
        groups: see `Group`, of tables that are spread over the PEs.
        replicated: the same, of tables that every PE has.
        outputs: for every block of the result's columns its group and its number among the group's slots. Groups of
            replicated tables are counted after the others.
        names, dims: of the result's features, and their columns.
        costs: that owners were chosen by.
        loads: of every PE, in their unit.
        time: of a step of all PEs together, in that unit, too (`step_time`).
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
    costs: Costs = field(compare=False, repr=False)
    loads: tuple[float, ...] = field(compare=False, repr=False)
    time: float = field(compare=False, repr=False)

    @functools.cached_property
    def begins(self) -> tuple[tuple[int, ...], ...]:
        """The first columns of each group's slots in the group's pooled rows.

        Columns of spread tables come in the order of the result; columns of replicated tables in the order of slots.
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
        """The runs of columns that make up the result."""
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
        """The bytes of the rows of every PE's tables, without optimizer states."""
        return tuple(
            sum(
                slice_bytes(config, placement) * len(self.slices_of(table, pe))
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


def place(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    costs: Costs,
    lookups_per_sample: Mapping[str, float],
    world_size: int,
) -> Layout:
    """Give every slice an owner (`choose_owners`), and every block of the result's columns its place.

    A PE's slots come in the order of their features' lookups. Slots with the most lookups come first, and run beside
    the others in the forward pass (`ExchangeOrder`). Slots of replicated tables come in the order of the tables.

    Args:
        configs: of the tables.
        placements: of each.
        costs: of their slices.
        lookups_per_sample: of each feature.
        world_size: number of PEs.
    """
    features = tuple(dict.fromkeys(name for config in configs for name in config.feature_names))
    owners, used = choose_owners(configs, placements, costs, world_size)
    spread, replicated = (
        [table for table, placement in enumerate(placements) if (placement.kind == REPLICATED) is wanted]
        for wanted in (False, True)
    )

    def slots(table: int, number: int) -> list[Slot]:
        config, width = configs[table], configs[table].embedding_dim // placements[table].num_slices
        return [Slot(table, number, features.index(name), width) for name in config.feature_names]

    def by_lookups(of_pe: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return tuple(sorted(of_pe, key=lambda slot: -lookups_per_sample[features[slot.feature]]))

    def groups(tables: Sequence[int], owners_of: Mapping[int, Sequence[int]], size: int) -> list[Group]:
        made: dict[tuple[str, torch.dtype, int | None], list[list[Slot]]] = {}
        for table in tables:
            config = configs[table]
            width = config.embedding_dim if placements[table].kind == REPLICATED else None
            of_pes = made.setdefault((config.pooling, config.data_type, width), [[] for _ in range(size)])
            for number, owner in enumerate(owners_of[table]):
                of_pes[owner] += slots(table, number)
        return [Group(pooling, dtype, tuple(map(tuple, of_pes))) for (pooling, dtype, _), of_pes in made.items()]

    of_spread = [
        replace(group, slots=tuple(map(by_lookups, group.slots)))
        for group in groups(spread, {table: owners[table] for table in spread}, world_size)
    ]
    of_replicated = groups(replicated, dict.fromkeys(replicated, (0,)), 1)
    outputs = _outputs(configs, placements, features, [*of_spread, *of_replicated])
    names, dims = [], []
    num_tables = {name: sum(name in config.feature_names for config in configs) for name in features}
    for config in configs:
        for name in config.feature_names:
            names.append(f"{name}@{config.name}" if num_tables[name] > 1 else name)  # as EmbeddingBagCollection does
            dims.append(config.embedding_dim)
    return Layout(
        tuple(configs),
        tuple(placements),
        features,
        owners,
        tuple(of_spread),
        tuple(of_replicated),
        outputs,
        tuple(names),
        tuple(dims),
        costs,
        tuple(map(load, used)),
        step_time(used),
    )


def _outputs(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    features: Sequence[str],
    groups: Sequence[Group],
) -> tuple[tuple[int, int], ...]:
    """Return where every block of the result's columns comes from (`Layout`)."""
    at = {
        (slot.table, slot.feature, slot.slice): (number, column)
        for number, group in enumerate(groups)
        for column, slot in enumerate(group.columns)
    }
    return tuple(
        at[table, features.index(name), number]
        for table, config in enumerate(configs)
        for name in config.feature_names
        for number in range(placements[table].num_slices)
    )
