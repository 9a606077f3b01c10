"""Tables and states of a step, in memory that all methods and cases of a run share, with first values made in place.

MLPerf's tables and Adagrad's states have 209 GB, so a copy does not fit. Every method writes to the same memory, and
the tables are made again before each check. An element's first value is a hash of its table, row and column, so any row
of any placement can be computed without the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from embedding.backward_inputs import EPS, RATE

import persistent_ops as po
from persistent_ops.nn.automatic_placement import layout_of
from persistent_ops.nn.sharded_table import ShardedTable
from persistent_ops.nn.table_layout import Layout, Slot
from persistent_ops.nn.table_placements import placements_of
from persistent_ops.ops.embedding.backward import EmbeddingOptimizer
from persistent_ops.runtime.world import World
from persistent_ops.testing.exchanged_embedding import own_slots, parts_of

from .cases import Case, Sizes

__all__ = ["Memory", "StepTables", "first_rows", "first_states", "layout_for", "room_of"]

_DRAWN_AT_ONCE = 1 << 22  # elements: what the hash works on stays in the L2 cache
_MASK = 0xFFFFFFFF
_STATE_SALT = 1 << 20


def layout_for(world: World, case: Case, sizes: Sizes, placement: Mapping[str, Any]) -> Layout:
    """Return where tables lie; collective where costs are measured."""
    tables = case.tables(sizes)
    return layout_of(
        world,
        tables,
        placements_of(tables, placement),
        {f"f{number}": float(hotness) for number, hotness in enumerate(sizes.hotness)},
        -(-sizes.batch // world.size),
        case.optimizer,
        None if case.wire is None else case.wire_dtype(),
        "nearest",
    )


def room_of(layout: Layout, case: Case, rank: int) -> tuple[int, int]:
    """Return the bytes of a PE's tables, without those that all PEs have, and of their states."""
    spread, _ = own_slots(layout, rank)
    elements = sum(layout.configs[slot.table].num_embeddings * slot.width for slot in spread)
    rows = sum(layout.configs[slot.table].num_embeddings for slot in spread)
    return elements * case.torch_dtype().itemsize, 4 * (rows if case.optimizer == "rowwise_adagrad" else elements)


class Memory:
    """Room for the largest case's tables and states; CUDA graphs hold on to what they update to the run's end.

    Args:
        tables, states: bytes of each.
        device: of both.
    """

    def __init__(self, tables: int, states: int, device: torch.device) -> None:
        self._tables, self._states = (
            torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in (tables, states)
        )

    def vectors(self, layout: Layout, case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a PE's tables, one after the other, and their states."""
        tables, states = room_of(layout, case, rank)
        return self._tables[:tables].view(case.torch_dtype()), self._states[:states].view(torch.float32)


class _CollectionInMemory(po.nn.ShardedEmbeddingBagCollection):
    """A collection whose tables lie in given memory, and are drawn by who made it.

    Args:
        memory: of the tables that this PE has of those that the PEs share out, by number.
        states: of their slices, by address of the slice.
    """

    def __init__(
        self, memory: Mapping[int, torch.Tensor], states: Mapping[int, torch.Tensor], tables: Any, **options: Any
    ) -> None:
        self._given = memory
        with _states_from(states):
            super().__init__(tables, **options)

    def _make_table(self, number: int) -> ShardedTable:
        if number in self._given:
            return ShardedTable(self.layout, number, self._world, self._given[number])
        return super()._make_table(number)

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw nothing."""


@contextmanager
def _states_from(given: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Let optimizers that are made meanwhile take states of tables by their addresses."""
    allocate = EmbeddingOptimizer._state_of

    def state_of(self: EmbeddingOptimizer, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = given.get(table.data_ptr())
        return allocate(self, table) if found is None else (found,)

    EmbeddingOptimizer._state_of = state_of  # type: ignore[method-assign]
    try:
        yield
    finally:
        EmbeddingOptimizer._state_of = allocate  # type: ignore[method-assign]


class StepTables:
    """The package's collection over a run's memory; collective.

    Args:
        world: of this PE.
        case, sizes: what is made.
        layout: of `layout_for`.
        memory: of this run.

    Attributes:
        collection: see above; its gradients are means over the PEs.
        layout: of it.
        slots: this PE's; slots that all PEs have come last.
        vectors: memory of the tables that the PEs share out, and of their states.
    """

    def __init__(self, world: World, case: Case, sizes: Sizes, layout: Layout, memory: Memory) -> None:
        self.layout, self._case = layout, case
        spread, copied = own_slots(layout, world.rank)
        self.slots = [*spread, *copied]
        self.vectors = memory.vectors(layout, case, world.rank)
        tables, states = self._laid_out(spread)
        self.collection = _CollectionInMemory(
            tables,
            states,
            case.tables(sizes),
            max_batch=-(-sizes.batch // world.size),
            lookups_per_sample={f"f{number}": float(hotness) for number, hotness in enumerate(sizes.hotness)},
            placement={
                config.name: po.nn.TablePlacement(placement.kind, placement.num_slices, layout.owners[number] or None)
                for number, (config, placement) in enumerate(zip(layout.configs, layout.placements, strict=True))
            },
            optimizer=case.optimizer,
            lr=RATE,
            eps=EPS,
            wire_dtype=None if case.wire is None else case.wire_dtype(),
        )

    def _laid_out(self, spread: Sequence[Slot]) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return memory of each table, whose slices here are neighbors, and states by the address of a slice."""
        tables, states = self.vectors
        memory: dict[int, torch.Tensor] = {}
        of_slices: dict[int, torch.Tensor] = {}
        for slot in spread:
            rows = self.layout.configs[slot.table].num_embeddings
            count = sum(other.table == slot.table for other in spread)
            if slot.table not in memory:
                whole = tables[: count * rows * slot.width].view(count * rows, slot.width)
                is_sliced = self.layout.placements[slot.table].kind == "column_wise"
                memory[slot.table] = whole.view(count, rows, slot.width) if is_sliced else whole
            shape = (rows,) if self._case.optimizer == "rowwise_adagrad" else (rows, slot.width)
            size = rows if len(shape) == 1 else rows * slot.width
            of_slices[tables.data_ptr()] = states[:size].view(shape)
            tables, states = tables[rows * slot.width :], states[size:]
        return memory, of_slices

    def parts(self) -> list[list[torch.Tensor]]:
        """Return the rows of each slot, and their states."""
        return parts_of(self.collection, self.slots)

    def states_by_address(self) -> dict[int, torch.Tensor]:
        """Return the states of rows by the rows' address."""
        return {rows.data_ptr(): states[0] for rows, *states in self.parts()}

    def reset(self) -> None:
        """Make all rows and states what they are at first."""
        for slot, (rows, state) in zip(self.slots, self.parts(), strict=True):
            _fill(rows, lambda some, slot=slot: first_rows(slot, some))  # type: ignore[misc]
            is_rowwise = state.dim() == 1
            _fill(
                state[:, None] if is_rowwise else state,
                lambda some, slot=slot, is_rowwise=is_rowwise: first_states(slot, some, is_rowwise=is_rowwise),  # type: ignore[misc]
            )


def first_rows(slot: Slot, rows: torch.Tensor) -> torch.Tensor:
    """Return rows `[n]` of a slot as they are at first, `[n, D]`, float32, uniform in [-1, 1)."""
    return _uniform(rows, _columns(slot, rows.device), slot.table).mul_(2).sub_(1)


def first_states(slot: Slot, rows: torch.Tensor, *, is_rowwise: bool) -> torch.Tensor:
    """Return the states of rows as they are at first, `[n, D]`, or `[n, 1]`, uniform in [0.5, 1.5).

    A root of what is near zero would make much of the rounding of a gradient.
    """
    columns = _columns(slot, rows.device)[:1] if is_rowwise else _columns(slot, rows.device)
    return _uniform(rows, columns, slot.table + _STATE_SALT).add_(0.5)


def _columns(slot: Slot, device: torch.device) -> torch.Tensor:
    return torch.arange(slot.slice * slot.width, (slot.slice + 1) * slot.width, device=device)


def _uniform(rows: torch.Tensor, columns: torch.Tensor, salt: int) -> torch.Tensor:
    """Return numbers of [0, 1) that a hash makes of rows, columns and salt, float32; in int32, which wraps."""
    of_rows = _mixed(rows + salt * 0x9E3779B1).bitwise_and_(0x7FFFFFFF).int()
    of_columns = _mixed(columns + 0x51ED27).bitwise_and_(0x7FFFFFFF).int()
    bits = torch.bitwise_xor(of_rows[:, None], of_columns[None])
    bits.mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x2C1B3C6D)
    return (bits >> 8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Return 32 random-looking bits of each word: "lowbias32" of Wellons's hash prospector."""
    words = words & _MASK
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & _MASK
    words = ((words ^ (words >> 15)) * 0x846CA68B) & _MASK
    return words ^ (words >> 16)


def _fill(out: torch.Tensor, first: Any) -> None:
    """Write what `first` gives for rows, `[R, D]`, some rows at a time."""
    at_once = max(1, _DRAWN_AT_ONCE // out.shape[1])
    for begin in range(0, len(out), at_once):
        part = out[begin : begin + at_once]
        part.copy_(first(torch.arange(begin, begin + len(part), device=out.device)))
