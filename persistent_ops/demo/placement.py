"""Assignment of embedding tables to PEs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["fit_rows", "lookup_costs", "place_tables"]

# What a bag costs besides its rows (its offsets, the pooled row's way out), in rows: keeps a PE from being handed every
# table that is looked up once.
_BAG_OVERHEAD_ROWS = 1.0


def lookup_costs(pooling: Sequence[float], dim: int, element_bytes: int) -> list[float]:
    """Return the cost of each table per sample, in bytes.

    Args:
        pooling: mean number of rows that a sample looks up, per table.
        dim: elements of a row.
        element_bytes: bytes of an element.

    Returns:
        Bytes read per sample plus a fixed cost per bag.
    """
    return [(rows + _BAG_OVERHEAD_ROWS) * dim * element_bytes for rows in pooling]


def place_tables(costs: Sequence[float], world_size: int) -> list[list[int]]:
    """Spread tables over PEs so that the PE with the most work has little more than the others.

    Greedy: the dearest table that is left goes to the PE with the least work (longest processing time first). The most
    loaded PE then has at most 4/3 - 1/(3 world_size) of the best possible maximum. Ties go to the lower table and the
    lower PE, so every PE computes the same placement.

    Args:
        costs: of each table, not negative.
        world_size: number of PEs, at least 1; it may exceed the number of tables.

    Returns:
        For each PE the numbers of its tables, ascending; a PE may have none.

    Raises:
        ValueError: world_size is below 1 or a cost is negative.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if any(cost < 0 for cost in costs):
        raise ValueError(f"costs must not be negative, got {list(costs)}")
    placement: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0.0, pe) for pe in range(world_size)]
    for table in sorted(range(len(costs)), key=lambda table: (-costs[table], table)):
        load, pe = heapq.heappop(loads)
        placement[pe].append(table)
        heapq.heappush(loads, (load + costs[table], pe))
    return [sorted(tables) for tables in placement]


def fit_rows(num_rows: Sequence[int], placement: Sequence[Sequence[int]], row_bytes: int, budget_bytes: int) -> int:
    """Return the largest cap on a table's rows with which every PE's tables fit.

    Args:
        num_rows: rows of each table before the cap.
        placement: tables of each PE.
        row_bytes: bytes of a row.
        budget_bytes: bytes that the tables of a PE may take.

    Returns:
        The cap; the largest table's rows where no cap is needed.

    Raises:
        ValueError: not even one row per table fits.
    """

    def fits(cap: int) -> bool:
        return all(
            sum(min(num_rows[table], cap) for table in tables) * row_bytes <= budget_bytes for tables in placement
        )

    low, high = 1, max(num_rows)
    if not fits(low):
        raise ValueError(f"budget_bytes is {budget_bytes}, not enough for one row of {row_bytes} bytes per table")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
