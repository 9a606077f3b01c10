"""Layout of tables: as requested, or chosen by measured costs for "auto"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..runtime.compile.literals import vector_bytes
from ..runtime.world import World
from .embedding_tables import TableConfig
from .placement_costs import Workload, measured_rates
from .table_layout import Layout, place
from .table_owners import bytes_read, first_room, load, slice_bytes
from .table_placements import AUTO, COLUMN_WISE, REPLICATED, TABLE_WISE, TablePlacement
from .table_rounding import draws

__all__ = ["decided", "layout_of"]

_LARGEST_REPLICA_BYTES = 8 << 20  # 16384 rows of 128 floats
_NARROWEST_SLICE_BYTES = 64  # two sectors of memory; narrower rows are read at a waste
_MOST_SLICES_PER_PE = 2
_MOST_TABLES = 4  # of a PE, that are tried
_WORTH = 0.98  # of what it was before
_OF_A_SLICE = 0.01  # of a step's time, which each further slice is to save
_FEWEST_TRIED = 4  # layouts
_MOST_EFFORT = 1 << 15  # for those after, the sum of slices times PEs


def layout_of(
    world: World,
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    estimates: Mapping[str, float],
    max_batch: int,
    optimizer: str,
    wire_dtype: torch.dtype | None,
    rounding: str,
) -> Layout:
    """Return each PE's tables and slices; collective where costs are to be measured.

    Args:
        world: of this PE.
        configs: of the tables.
        placements: of the tables.
        estimates: lookups per sample of each feature.
        max_batch: samples of a PE.
        optimizer: its name.
        wire_dtype: of what float32 tables send; None for theirs.
        rounding: of the rows of tables of 16 bits.
    """
    if all(each.kind != AUTO for each in placements):
        return place(configs, placements, bytes_read(configs, placements, estimates, world.size), estimates, world.size)
    workload = Workload(measured_rates(world), world.size, max_batch, estimates, optimizer, wire_dtype)
    placements = decided(configs, placements, workload, rounding)
    return place(configs, placements, workload.costs(configs, placements), estimates, world.size)


def decided(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    workload: Workload,
    rounding: str = "nearest",
) -> tuple[TablePlacement, ...]:
    """Return placements with "auto" replaced; the same for the same arguments.

    A table of at most 8 MiB is replicated where that takes a PE less time than its share of the table does otherwise,
    if all such tables together save more than their launches and copies take.

    Then tables are cut into slices, or into more of them, one after the other, as long as that makes the time of a
    step, or what a PE has of memory beyond what `choose_owners` grants, 2 % less, and 1 % for each further slice.
    Looked at are the four costliest tables of the PE with the most to do and the four largest of the one with the most
    memory, each with every number of slices that there may be, and the best one is cut. The same is done with the
    costliest table cut at first in each of these ways, and as it is then to the end. Where there are many tables or
    PEs, fewer ways are looked at.

    Never cut under "rowwise_adagrad", where the number of slices is part of what is trained. Tables that are rounded
    stochastically are neither cut nor replicated: which random bits their rows get depends on both (`drawn_of`), and so
    the bits of a training would depend on what was measured. All others are "table_wise".

    Args:
        configs: of the tables.
        placements: of each.
        workload: by which costs are measured.
        rounding: of the rows of tables of 16 bits.
    """
    chosen = [TablePlacement(TABLE_WISE) if each.kind == AUTO else each for each in placements]
    free = [
        table
        for table, each in enumerate(placements)
        if each.kind == AUTO and not draws(configs[table].data_type, rounding)
    ]
    saved = {table: _saved_by_replicas(configs[table], workload) for table in free}
    worth = [table for table in free if saved[table] > 0]
    if sum(saved[table] for table in worth) > workload.replicas_overhead(configs):
        for table in worth:
            chosen[table] = TablePlacement(REPLICATED)
    if workload.optimizer == "rowwise_adagrad":
        return tuple(chosen)
    return _Cuts(workload, [table for table in free if chosen[table].kind == TABLE_WISE]).best(configs, chosen)


class _Cuts:
    """A search for tables to cut.

    Args:
        workload: by which costs are measured.
        cuttable: tables.
    """

    def __init__(self, workload: Workload, cuttable: Sequence[int]) -> None:
        self._workload, self._cuttable = workload, cuttable

    def best(self, configs: Sequence[TableConfig], placements: Sequence[TablePlacement]) -> tuple[TablePlacement, ...]:
        """Return placements with tables cut; see `decided`."""
        self._tried = self._effort = 0
        layout = self._placed(configs, placements)
        best = self._cut_while_it_helps(layout, self._cuttable)
        # Single steps do not find a placement with few slices of the costliest table and some of others.
        for table in _first_by_cost(layout, self._cuttable)[:1]:
            others = [each for each in self._cuttable if each != table]
            for way in self._ways(layout, [table]):
                best = min(best, self._cut_while_it_helps(way, others), key=_badness)
        return best.placements

    def _placed(self, configs: Sequence[TableConfig], placements: Sequence[TablePlacement]) -> Layout:
        workload = self._workload
        self._tried += 1
        self._effort += sum(each.num_slices for each in placements) * workload.world_size
        costs = workload.costs(configs, placements)
        return place(configs, placements, costs, workload.lookups_per_sample, workload.world_size)

    def _cut_while_it_helps(self, layout: Layout, cuttable: Sequence[int]) -> Layout:
        while True:
            best = min(self._ways(layout, cuttable), key=_badness, default=layout)
            if not _badness(best) < _WORTH * _badness(layout):
                return layout
            layout = best

    def _ways(self, layout: Layout, cuttable: Sequence[int]) -> Iterator[Layout]:
        """Yield layouts with more slices of a table: of the costliest and the largest ones of the PEs with the most."""
        for table in dict.fromkeys([*_first_by_cost(layout, cuttable), *_first_by_bytes(layout, cuttable)]):
            fewest, most = layout.placements[table].num_slices + 1, _MOST_SLICES_PER_PE * self._workload.world_size
            for count in range(fewest, most + 1):
                may_go_on = self._tried < _FEWEST_TRIED or self._effort < _MOST_EFFORT
                if may_go_on and _is_possible(layout.configs[table], count):
                    placements = list(layout.placements)
                    placements[table] = TablePlacement(COLUMN_WISE, count)
                    yield self._placed(layout.configs, placements)


def _badness(layout: Layout) -> float:
    """Return the time of a step, with further slices' share, times the factor of memory above the granted room."""
    further = sum(each.num_slices - 1 for each in layout.placements)
    crowding = max(1.0, max(layout.table_bytes) / first_room(layout.table_bytes))
    return layout.time * crowding * (1 + _OF_A_SLICE * further)


def _first_by_cost(layout: Layout, tables: Sequence[int]) -> list[int]:
    """Return the costliest tables of the PE with the most to do."""
    return _first(layout, tables, layout.loads, [load(cost) for cost in layout.costs.of_slices])


def _first_by_bytes(layout: Layout, tables: Sequence[int]) -> list[int]:
    """Return the largest tables of the PE with the most memory."""
    of_slices = list(map(slice_bytes, layout.configs, layout.placements))
    return _first(layout, tables, layout.table_bytes, of_slices)


def _first(layout: Layout, tables: Sequence[int], of_pes: Sequence[float], of_slices: Sequence[float]) -> list[int]:
    pe = of_pes.index(max(of_pes))
    here = {table: of_slices[table] * len(layout.slices_of(table, pe)) for table in tables}
    return sorted((table for table in tables if here[table]), key=lambda table: -here[table])[:_MOST_TABLES]


def _is_possible(config: TableConfig, num_slices: int) -> bool:
    width, rest = divmod(config.embedding_dim, num_slices)
    nbytes = width * config.data_type.itemsize
    return rest == 0 and nbytes % vector_bytes() == 0 and nbytes >= _NARROWEST_SLICE_BYTES


def _saved_by_replicas(config: TableConfig, workload: Workload) -> float:
    """Return the seconds that a PE saves, below 0 where it saves none; launches of replicas do one thing at a time."""
    is_small = config.num_embeddings * config.embedding_dim * config.data_type.itemsize <= _LARGEST_REPLICA_BYTES
    if not is_small or config.data_type == torch.float16:
        return -1.0
    share = load(workload.cost(config, TablePlacement(TABLE_WISE))) / workload.world_size
    return share - sum(map(sum, workload.cost(config, TablePlacement(REPLICATED))))
