"""Expected tables and states after some backward passes: the sums and the formulas in fp64, a table at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from persistent_ops.runtime.world import World

from .backward_inputs import EPS, RATE, draw_gradient, first_state, first_table
from .configs import Config
from .inputs import LookupSet

__all__ = ["UNIT", "Reference", "RowsReference", "digest"]

UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}  # half of what 1 is away from the next number


class Reference:
    """The tables of one case after passes with given sets.

    A difference is reported as a share of what rounding explains. For a sum of n gradients of at most 1, in any order,
    an error of 8 n units in the last place of fp32 is accepted, and one unit of the wire's dtype, in which a library
    may keep the sum. The errors of row and state follow from the formulas' derivatives, for states of at least 0.5.

    Args:
        world: of this PE.
        config: shape.
        optimizer: its name.
        sets: the lookups.
    """

    def __init__(self, world: World, config: Config, optimizer: str, sets: Sequence[LookupSet]) -> None:
        self._config = config
        self._optimizer = optimizer
        self._rank = world.rank
        self._sets = sets
        own = slice(world.rank * config.tables * config.dim, (world.rank + 1) * config.tables * config.dim)
        device = sets[0].indices.device
        self._gradients = []
        for number in range(len(sets)):
            # Every PE's is drawn here, so that no exchange is trusted.
            parts = [
                draw_gradient(config, world.size, rank=rank, number=number, device=device)[:, own].clone()
                for rank in range(world.size)
            ]
            self._gradients.append(torch.cat(parts))

    def difference(
        self,
        tables: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        order: Sequence[int],
        *,
        looked_at: Sequence[int] | None = None,
    ) -> tuple[float, str]:
        """Return the largest difference, at most 1 where all is right, and which table and tensor it is in.

        Args:
            tables: of this PE.
            states: of each table; none under SGD.
            order: numbers of the sets, in the order of the passes.
            looked_at: numbers of the tables that are compared; None for all.
        """
        worst, where = 0.0, ""
        for table in range(len(tables)) if looked_at is None else looked_at:
            found = self._differences(table, tables[table], states[table] if states else None, order)
            for name, share in found.items():
                if not share <= worst:
                    worst, where = (share if math.isfinite(share) else math.inf), f"{name} {table}"
        return worst, where

    def _differences(
        self, number: int, table: torch.Tensor, state: torch.Tensor | None, order: Sequence[int]
    ) -> dict[str, float]:
        config = self._config
        indices = [self._sets[each].indices.view(config.tables, -1)[number] for each in order]
        rows = torch.cat(indices).unique()
        first = first_table(config, self._rank, number, torch.empty_like(table))
        first_s = None if state is None else first_state(config, self._rank, number, torch.empty_like(state))
        expected = RowsReference(config, self._optimizer, first[rows], None if first_s is None else first_s[rows])
        for each, lookups in zip(order, indices, strict=True):
            columns = self._gradients[each].view(config.batch, config.tables, config.dim)[:, number]
            expected.step(*_sums(columns, torch.searchsorted(rows, lookups), rows.numel()))
        found = {"table": expected.share(table[rows], expected.rows, expected.rows_off)}
        if not _same_elsewhere(table, first, rows):
            found["an untouched row of table"] = math.inf
        if state is not None and first_s is not None and expected.state is not None:
            found["states of table"] = expected.share(state[rows].view(rows.numel(), -1), expected.state, expected.off)
            if not _same_elsewhere(state, first_s, rows):
                found["an untouched row's state of table"] = math.inf
        return found


def _sums(columns: torch.Tensor, slots: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp64 sums `[n, D]` of the gradients `[B, D]` of each slot's lookups, and how many they are `[n, 1]`."""
    samples = torch.arange(slots.numel(), device=slots.device) // (slots.numel() // columns.shape[0])
    sums = torch.zeros(count, columns.shape[1], dtype=torch.float64, device=slots.device)
    sums.index_add_(0, slots, columns.double()[samples])
    return sums, torch.bincount(slots, minlength=count).double()[:, None]


def _same_elsewhere(actual: torch.Tensor, first: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return whether all but some rows have the bits of `first`, which is overwritten."""
    first[rows] = actual[rows]
    return torch.equal(first.view(torch.uint8), actual.contiguous().view(torch.uint8))


class RowsReference:
    """The touched rows of a table, their states, and how far off either may be."""

    def __init__(self, config: Config, optimizer: str, rows: torch.Tensor, state: torch.Tensor | None) -> None:
        self._dtype = config.torch_dtype
        self._unit = UNIT[config.dtype]
        self._sum_unit = UNIT[config.wire or config.dtype]
        self._is_rowwise = optimizer == "rowwise_adagrad"
        self.rows = rows.double()
        self.rows_off = torch.zeros_like(self.rows)
        self.state = None if state is None else state.double().view(rows.shape[0], -1)
        self.off = torch.zeros(1) if self.state is None else torch.zeros_like(self.state)

    def step(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Update the rows with sums of gradients `[n, D]`; `counts` `[n, 1]`: gradients per row. Rows without stay."""
        fp32 = UNIT["fp32"]
        sums_off = 8 * fp32 * counts + (0 if self._sum_unit == fp32 else 2 * self._sum_unit * sums.abs())
        step, step_off = sums, sums_off
        if self.state is not None:
            squares, squares_off = sums.square(), (2 * sums.abs() + sums_off) * sums_off
            if self._is_rowwise:
                squares, squares_off = squares.mean(1, keepdim=True), squares_off.mean(1, keepdim=True)
            self.state = self.state + squares
            self.off = self.off + squares_off + 8 * fp32 * self.state * (counts > 0)
            root = self.state.sqrt()
            step = sums / (root + EPS)
            # d(g / sqrt(s)) = dg / sqrt(s) - g / (2 s) / sqrt(s) ds
            step_off = sums_off / root + step.abs() * (self.off / (2 * self.state) + 16 * fp32)
        updated = (self.rows - RATE * step).to(self._dtype).double()
        rounding = 4 * self._unit * (torch.maximum(self.rows.abs(), updated.abs()) + 1e-3)
        self.rows_off = self.rows_off + RATE * step_off + rounding * (counts > 0)
        self.rows = torch.where(counts > 0, updated, self.rows)

    @staticmethod
    def share(actual: torch.Tensor, expected: torch.Tensor, off: torch.Tensor) -> float:
        """Return the largest difference as a share of its bound."""
        if actual.numel() == 0:
            return 0.0
        return float(((actual.double() - expected).abs() / off.clamp(min=1e-300)).max())


def digest(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that other bits, or the same ones elsewhere, make another one."""
    factors: dict[int, torch.Tensor] = {}
    found = []
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(torch.int32)
        if words.numel() not in factors:
            generator = torch.Generator(words.device).manual_seed(17)
            drawn = torch.empty_like(words).random_(-(2**31), 2**31 - 1, generator=generator)
            factors[words.numel()] = drawn | 1
        found.append((words * factors[words.numel()]).sum(dtype=torch.int64))
    return [int(number) for number in torch.stack(found).tolist()]
