"""Layouts of tables as they are asked for, or, where that is left open, as measured costs choose them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..runtime.literals import vector_bytes
from ..runtime.world import World
from .embedding_tables import TableConfig
from .placement_costs import Workload, measured_rates
from .table_layout import Layout, place
from .table_owners import bytes_read
from .table_placements import AUTO, COLUMN_WISE, REPLICATED, TABLE_WISE, TablePlacement
from .table_rounding import draws

__all__ = ["decided", "layout_of"]

_LARGEST_REPLICA_BYTES = 8 << 20  # 16384 rows of 128 floats
_NARROWEST_SLICE_BYTES = 64  # two sectors of memory; narrower rows are read at a waste
_MOST_SLICES_PER_PE = 2


def layout_of(
    world: World,
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    estimates: Mapping[str, float],
    max_batch: int,
    algorithm: str,
    wire_dtype: torch.dtype | None,
    rounding: str,
) -> Layout:
    """Return which PE has what; collective where costs are to be measured.

    Args:
        world: of this PE.
        configs: of the tables.
        placements: of the tables.
        estimates: lookups per sample of each feature.
        max_batch: samples of a PE.
        algorithm: of the optimizer.
        wire_dtype: of what float32 tables send; None for theirs.
        rounding: of the rows of tables of 16 bits.
    """
    if all(each.kind != AUTO for each in placements):
        return place(configs, placements, bytes_read(configs, placements, estimates, world.size), world.size)
    workload = Workload(measured_rates(world), world.size, max_batch, estimates, algorithm, wire_dtype)
    placements = decided(configs, placements, workload, rounding)
    return place(configs, placements, workload.costs(configs, placements), world.size)


def decided(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    workload: Workload,
    rounding: str = "nearest",
) -> tuple[TablePlacement, ...]:
    """Return placements with "auto" replaced; the same for the same arguments.

    A table of at most 8 MiB is replicated where that takes a PE less time than its share of the table does otherwise,
    if all such tables together save more than their launches take. Then a table that costs more than a PE's share of
    everything is cut into the fewest slices that do not, if the PE with the most has less to do then; never under
    "rowwise_adagrad", where the number of slices is part of what is trained. Tables that are rounded stochastically are
    neither cut nor replicated: which random bits their rows get depends on both (`drawn_of`), and so the bits of a
    training would depend on what was measured. All others are "table_wise".

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
    if sum(saved[table] for table in worth) > workload.replicas_overhead():
        for table in worth:
            chosen[table] = TablePlacement(REPLICATED)
    if workload.algorithm == "rowwise_adagrad":
        return tuple(chosen)
    costs = [max(cost) for cost in workload.costs(configs, chosen).of_slices]
    share = sum(cost * each.num_slices for cost, each in zip(costs, chosen, strict=True) if each.kind != REPLICATED)
    share /= workload.world_size
    sliced = list(chosen)
    for table in free:
        if chosen[table].kind == TABLE_WISE and costs[table] > share:
            sliced[table] = _sliced(configs[table], workload, share)
    before, after = (
        max(place(configs, each, workload.costs(configs, each), workload.world_size).loads) for each in (chosen, sliced)
    )
    return tuple(sliced if after < before else chosen)


def _saved_by_replicas(config: TableConfig, workload: Workload) -> float:
    """Return the seconds that a PE saves, below 0 where it saves none; launches of replicas do one thing at a time."""
    is_small = config.num_embeddings * config.embedding_dim * config.data_type.itemsize <= _LARGEST_REPLICA_BYTES
    if not is_small or config.data_type == torch.float16:
        return -1.0
    share = max(workload.cost(config, TablePlacement(TABLE_WISE))) / workload.world_size
    return share - sum(workload.cost(config, TablePlacement(REPLICATED)))


def _sliced(config: TableConfig, workload: Workload, share: float) -> TablePlacement:
    """Return the fewest slices that cost no more than a share, or the most that there may be."""
    best = TablePlacement(TABLE_WISE)
    for count in range(2, _MOST_SLICES_PER_PE * workload.world_size + 1):
        width, rest = divmod(config.embedding_dim, count)
        nbytes = width * config.data_type.itemsize
        if rest or nbytes % vector_bytes() or nbytes < _NARROWEST_SLICE_BYTES:
            continue
        best = TablePlacement(COLUMN_WISE, count)
        if max(workload.cost(config, best)) <= share:
            break
    return best
