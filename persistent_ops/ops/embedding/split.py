"""Default split of samples and columns over the PEs for embedding_all_to_all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...runtime import world as _world
from ...runtime.errors import BootstrapError
from ...runtime.operator import Operator
from ...runtime.torch_private import without_dispatch_modes
from .plan import OPERATOR
from .table_set import TableSet, TableSets

__all__ = ["completed", "dims_at_compile_time", "exchange_dims", "table_set", "table_sets"]

_WIDTHS = Operator("agreement on the widths of embedding_all_to_all's tables", (), has_kernel=False)


def completed(
    world: _world.World,
    weights: Sequence[torch.Tensor],
    num_offsets: int,
    dim_per_rank: Sequence[int] | None,
    batch_per_rank: Sequence[int] | None,
) -> tuple[Sequence[int], Sequence[int]]:
    """Fill in what the caller left to the operator. Collective where `dim_per_rank` is None and the tables are new."""
    if dim_per_rank is None:
        dim_per_rank = _agree_on_dims(world, table_sets(world).find(weights), weights)
    if batch_per_rank is None:
        batch_per_rank = _even_split(len(weights), num_offsets, world.size)
    return dim_per_rank, batch_per_rank


def table_set(world: _world.World, weights: Sequence[torch.Tensor]) -> TableSet:
    """Return the set by which plans know these tables."""
    return table_sets(world).find(weights)


def _even_split(num_tables: int, num_offsets: int, world_size: int) -> tuple[int, ...]:
    if num_tables == 0:
        raise ValueError(
            "batch_per_rank: a PE without tables cannot derive the batch from offsets; pass batch_per_rank"
        )
    batch = (num_offsets - 1) // num_tables
    if num_offsets != batch * num_tables + 1 or num_offsets < 1:
        raise ValueError(
            f"offsets: expected T * B + 1 elements for T = {num_tables} tables, got {num_offsets}, and "
            f"{num_offsets - 1} is not a multiple of {num_tables}"
        )
    return tuple((batch + world_size - 1 - rank) // world_size for rank in range(world_size))


def table_sets(world: _world.World) -> TableSets:
    state = OPERATOR.state(world)
    if state.own is None:
        plans = state.plans
        state.own = TableSets(world.make_room, lambda kept: plans.drop(lambda key: key.tables not in kept))
    return state.own  # type: ignore[no-any-return]


def _agree_on_dims(world: _world.World, tables: TableSet, weights: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return every PE's sum of D. Collective the first time that the PEs meet their tables."""
    own = sum(weight.shape[1] for weight in weights)
    if not len(weights) and world.size > 1:
        raise ValueError(
            "dim_per_rank: a PE without tables cannot notice that the other PEs' tables change; if any PE has "
            "no tables, pass dim_per_rank on all PEs"
        )
    if tables.dim_per_rank is None:
        tables.dim_per_rank = exchange_dims(world, own)
    return tables.dim_per_rank


def dims_at_compile_time(*weights: torch.Tensor) -> tuple[int, ...]:
    """Return every PE's sum of D; the compiler passes the tables themselves, so an agreement is found again."""
    world = _world.current()
    return _agree_on_dims(world, table_sets(world).find(weights), weights)


# The same as torch.compiler.assume_constant_result, without the import of the compiler at `import persistent_ops`.
dims_at_compile_time._dynamo_marked_constant = True  # type: ignore[attr-defined]


def exchange_dims(world: _world.World, own: int) -> tuple[int, ...]:
    if world.size == 1:
        return (own,)
    with without_dispatch_modes():  # of fake tensors: the PEs still meet
        world.meet(_WIDTHS.contract(world.team))
    try:
        return tuple(int(raw) for raw in world.bootstrap.exchange("embedding-dims", str(own).encode()))
    except BootstrapError as error:
        raise BootstrapError(
            f"the PEs could not agree on the widths of their tables: {error}. Where tables are new on some PEs only, "
            "pass dim_per_rank on all."
        ) from error
