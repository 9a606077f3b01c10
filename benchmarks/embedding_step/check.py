"""Expected pooled rows, updated rows and states, in fp64: of some samples, and of some rows of every table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from embedding.backward_check import UNIT, RowsReference

from persistent_ops.nn.table_layout import Slot
from persistent_ops.runtime.world import World

from .cases import Case, Sizes
from .lookups import Batch, draw_step_gradient, values_of
from .tables import StepTables, first_rows, first_states

__all__ = ["StepReference"]

_SAMPLES = 16  # of a PE
_LOOKED_UP, _OTHERS = 24, 8  # rows of a table: of each PE's lookups, and any
_AT_ONCE = 1 << 17  # lookups whose gradients are summed at a time


class StepReference:
    """The reference of one case; collective.

    Differences are reported as shares of what rounding explains, see `embedding.backward_check`. Rows that no bag has
    must keep their bits.

    Args:
        world: of this PE.
        case, sizes: what is checked.
        tables: of this PE.
        batches: of this PE. Other PEs' batches come by broadcasts of torch.distributed.
    """

    def __init__(self, world: World, case: Case, sizes: Sizes, tables: StepTables, batches: Sequence[Batch]) -> None:
        self._world, self._case, self._sizes, self._slots = world, case, sizes, tables.slots
        self._device, self._batches = world.backend.device, batches
        self._rows = self._chosen_rows()
        self._sums = [self._sums_of(number) for number in range(len(batches))]

    def _chosen_rows(self) -> list[torch.Tensor]:
        generator = torch.Generator(self._device).manual_seed(17)
        of_pes = [values_of(self._sizes, self._batches[0], rank) for rank in range(self._world.size)]
        chosen = []
        for table, rows in enumerate(self._sizes.rows):
            looked_up = [values[table][:_LOOKED_UP] for values in of_pes]
            others = torch.randint(rows, (_OTHERS,), generator=generator, device=self._device)
            chosen.append(torch.cat([*looked_up, others]).unique())
        return chosen

    def _sums_of(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, of each table, the sums of the rows' gradients over the global batch, and of how many each is."""
        sizes, dim = self._sizes, self._sizes.dim
        found = [
            (
                torch.zeros(len(rows), dim, dtype=torch.float64, device=self._device),
                torch.zeros(len(rows), dtype=torch.float64, device=self._device),
            )
            for rows in self._rows
        ]
        for rank in range(self._world.size):
            values = values_of(sizes, self._batches[number], rank)
            gradient = draw_step_gradient(
                sizes, rank=rank, world_size=self._world.size, dtype=self._case.wire_dtype(), device=self._device
            )
            for table, (rows, (sums, counts)) in enumerate(zip(self._rows, found, strict=True)):
                places = torch.searchsorted(rows, values[table]).clamp_(max=len(rows) - 1)
                hits = (rows[places] == values[table]).nonzero().flatten()
                columns = gradient[:, table * dim : (table + 1) * dim]
                for some in hits.split(_AT_ONCE):
                    sums.index_add_(0, places[some], columns[some // sizes.hotness[table]].double())
                counts += torch.bincount(places[hits], minlength=len(rows))
        return found

    # ---- comparisons -------------------------------------------------------------------------------------------------

    def taken(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return copies of the rows that are looked at, and of their states."""
        pairs = zip(self._slots, parts, strict=True)
        return [tensor[self._rows[slot.table]] for slot, of_slot in pairs for tensor in of_slot]

    def rows_off(self, parts: Sequence[Sequence[torch.Tensor]], order: Sequence[int]) -> tuple[float, str]:
        """Return the largest difference of rows and states, at most 1 where all is right, and what has it.

        Args:
            parts: of this PE's slots, rows and states.
            order: numbers of the sets, in the order of the steps.
        """
        worst, where = 0.0, ""
        for slot, (actual, *states) in zip(self._slots, parts, strict=True):
            rows = self._rows[slot.table]
            expected = self._updated(slot, order)
            shares = {"table": expected.share(actual[rows], expected.rows, expected.rows_off)}
            if states and expected.state is not None:
                found = states[0][rows].view(len(rows), -1)
                shares["states of table"] = expected.share(found, expected.state, expected.off)
            for name, share in shares.items():
                if not share <= worst:
                    worst, where = (share if math.isfinite(share) else math.inf), f"{name} {slot.table}"
        return worst, where

    def _updated(self, slot: Slot, order: Sequence[int]) -> RowsReference:
        case, rows = self._case, self._rows[slot.table]
        is_rowwise = case.optimizer == "rowwise_adagrad"
        first = first_rows(slot, rows).to(case.torch_dtype())
        states = first_states(slot, rows, is_rowwise=is_rowwise)
        expected = RowsReference(case.config(self._sizes), case.optimizer, first, states)
        columns = slice(slot.slice * slot.width, (slot.slice + 1) * slot.width)
        for number in order:
            sums, counts = self._sums[number][slot.table]
            expected.step(sums[:, columns] / self._world.size, counts[:, None])
        return expected

    def pooled_off(self, pooled: torch.Tensor, *, is_ours: bool) -> float:
        """Return the largest difference of what a first step with set 0 has pooled on this PE; see `rows_off`.

        Args:
            pooled: `[B, F * D]`.
            is_ours: whether bags are summed in fp32 whatever the tables' dtype, and rounded once.
        """
        case, dim, samples = self._case, self._sizes.dim, len(pooled)
        if samples == 0:
            return 0.0
        chosen = torch.linspace(0, samples - 1, min(samples, _SAMPLES), device=self._device).long()
        values = self._batches[0].values.split([samples * hotness for hotness in self._sizes.hotness])
        unit, worst = UNIT[case.wire or case.dtype], 0.0
        for table, hotness in enumerate(self._sizes.hotness):
            lookups = values[table].view(samples, hotness)[chosen].flatten()
            rows = first_rows(Slot(table, 0, table, dim), lookups).to(case.torch_dtype()).double()
            expected = rows.view(len(chosen), hotness, dim).sum(1)
            off = 2 * unit * (expected.abs() if is_ours else hotness) + 8 * UNIT["fp32"] * hotness
            actual = pooled[chosen, table * dim : (table + 1) * dim].double()
            share = float(((actual - expected).abs() / off).max())
            worst = worst if share <= worst else (share if math.isfinite(share) else math.inf)
        return worst
