"""The least traffic of a PE in a step, phase by phase, by the rows that its batches touch.

There are P PEs and B samples; a PE has b samples. A table's slice has N lookups of U rows of w bytes, with s bytes of
states. D' is the size in bytes of a sample's columns that the PE pools for all; A is the size that it gets from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from embedding.backward_configs import SECTOR_BYTES, SECTOR_ROWS, Moved

from persistent_ops.nn.table_layout import Slot
from persistent_ops.runtime.world import World
from persistent_ops.testing.exchanged_embedding import own_slots

from .cases import Case, Sizes
from .lookups import Batch, values_of
from .tables import StepTables

__all__ = ["StepMoves", "step_moves"]

_INDEX_BYTES, _SENT_INDEX_BYTES = 8, 4
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class StepMoves:
    """What one PE moves in each phase, and the rows that it updates."""

    exchange: Moved
    forward: Moved
    backward: Moved
    unique_rows: float
    lookups: float

    @property
    def phases(self) -> tuple[Moved, ...]:
        return self.exchange, self.forward, self.backward


def step_moves(world: World, case: Case, sizes: Sizes, tables: StepTables, batches: Sequence[Batch]) -> StepMoves:
    """Return what this PE moves, the mean over the batches; collective.

    - *exchange*: its lookups are read (8 bytes each), lookups of its slices written; it sends 4 bytes for each of its
      lookups elsewhere.
    - *forward*: ``U w + 4 N`` read, the result written; it sends ``(B - b) D'``.
    - *backward*: gradients are read, and what arrives, ``(B - b) D'``, is written and read; ``2 U (w + s)`` and
      ``4 N``; it sends ``b A``.

    Replicated tables have the lookups of its own samples alone, and their sums travel: ``2 (P - 1) / P * 4`` bytes for
    each element of the U rows that some PE touches.
    """
    spread, copied = own_slots(tables.layout, world.rank)
    split = batches[0].split
    here, size = split[world.rank], world.size
    wire, row_bytes = case.wire_dtype().itemsize, case.torch_dtype().itemsize
    result = here * len(sizes.rows) * sizes.dim * wire
    pooled = sum(slot.width for slot in spread) * wire
    columns = (len(sizes.rows) - len(copied)) * sizes.dim * wire
    arriving = (sizes.batch - here) * pooled
    touched = _Touched(case)
    rows = lookups = 0.0
    updated, sums = 0.0, 0.0
    for batch in batches:
        of_pes = [values_of(sizes, batch, rank) for rank in range(size)]
        of_tables = [torch.cat(parts) for parts in zip(*of_pes, strict=True)]
        for slot in (*spread, *copied):
            rows_bytes, rows_here = touched.bytes(slot, of_tables[slot.table], row_bytes)
            updated += rows_bytes
            rows += rows_here
            if tables.layout.is_replicated(slot.table):
                sums += rows_here * slot.width * _FLOAT_BYTES
            else:
                lookups += of_tables[slot.table].numel()
    count = len(batches)
    rows, lookups, updated, sums = rows / count, lookups / count, updated / count, sums / count
    read_once = sum(touched.read[slot.table, slot.slice] for slot in (*spread, *copied)) / count
    own = here * sum(hotness for table, hotness in enumerate(sizes.hotness) if not tables.layout.is_replicated(table))
    of_others = {  # each PE has a table's lookups once, however many slices of it
        (rank, slot.table)
        for rank, of_pe in enumerate(tables.layout.groups[0].slots if tables.layout.groups else ())
        for slot in of_pe
        if rank != world.rank
    }
    elsewhere = here * sum(sizes.hotness[table] for _, table in of_others)
    away = (size - 1) / size
    return StepMoves(
        exchange=Moved(
            read=_INDEX_BYTES * own + _SENT_INDEX_BYTES * lookups, updated=0.0, sent=_SENT_INDEX_BYTES * elsewhere
        ),
        forward=Moved(read=read_once + _SENT_INDEX_BYTES * lookups + result, updated=0.0, sent=arriving),
        backward=Moved(
            read=result + _SENT_INDEX_BYTES * lookups,
            updated=2 * arriving + 2 * updated + 2 * sums,
            sent=here * (columns - pooled) + 2 * away * sums,
        ),
        unique_rows=rows,
        lookups=lookups,
    )


class _Touched:
    """Counts what lookups touch.

    Attributes:
        read: bytes of rows by table and slice, of all sets.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self.read: dict[tuple[int, int], float] = {}

    def bytes(self, slot: Slot, lookups: torch.Tensor, element_bytes: int) -> tuple[float, float]:
        """Return the bytes of rows and states that a slot's lookups touch, and how many rows they are."""
        unique = lookups.unique()
        rows = float(unique.numel())
        of_rows = rows * slot.width * element_bytes
        key = (slot.table, slot.slice)
        self.read[key] = self.read.get(key, 0.0) + of_rows
        if self._case.optimizer == "rowwise_adagrad":
            return of_rows + SECTOR_BYTES * float((unique // SECTOR_ROWS).unique().numel()), rows
        return of_rows + rows * slot.width * _FLOAT_BYTES, rows
