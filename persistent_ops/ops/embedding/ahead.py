"""Which kernels the calls on some tables will load, to be compiled side by side before that.

A guess that is wrong costs a compilation in the background: the calls say which kernels they load.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ...runtime.backend import KernelRequest
from ...runtime.operator import Operator
from ...runtime.team import Team
from ...runtime.world import World
from . import backward_plan, inputs_plan, inversion, plan, weight_gradients
from .backward_plan import BackwardKey, Step
from .columns import columns_of
from .inversion import Sorting
from .plan import Choices, EmbeddingKey, LookupKind
from .table_set import TableSet

__all__ = ["GLOBAL_BATCH", "compile_backward", "compile_passes", "describe_step"]

# What lookups most often are: int64, as torch makes them, and without weights.
GLOBAL_BATCH = LookupKind(torch.int64, torch.int64, 0, False, 1)


def describe_step(world: World) -> None:
    """Begin to compile the descriptions of a training step's kernels, which do not depend on tables."""

    def describe(operator: Operator) -> None:
        operator.description  # noqa: B018  # it is compiled at the first look

    operators = inputs_plan.OPERATOR, plan.OPERATOR, backward_plan.OPERATOR, inversion.OPERATOR
    world.compile_ahead([functools.partial(describe, each) for each in operators])


def compile_passes(
    world: World,
    team: Team,
    weights: Sequence[torch.Tensor],
    step: Step,
    lookups: LookupKind,
    num_lookups: int = 0,
    *,
    dim_per_rank: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    pooling: str = "sum",
    columns: Sequence[int] | None = None,
) -> None:
    """Begin to compile the kernels of both passes through some tables.

    Args:
        world: of this PE.
        team, weights, dim_per_rank, dtype, wire_dtype, pooling, columns: of `embedding_all_to_all`.
        step: of the backward pass.
        lookups, num_lookups: that are expected.
    """
    choices = Choices.of(weights, dim_per_rank, None, dtype, wire_dtype, pooling, "ignore", "", columns)
    key = EmbeddingKey(team, TableSet(weights), plan.OPERATOR.tuned(world), choices, lookups)
    dims = _dims(key, weights)
    world.compile_ahead([lambda: plan.request_for(world, key, weights, dims)], team)
    compile_backward(world, key, weights, dims, step, num_lookups)


def _dims(key: EmbeddingKey, weights: Sequence[torch.Tensor]) -> Sequence[int]:
    """Return every PE's sum of D; of other PEs 0, where they have not been asked."""
    own = sum(weight.shape[1] for weight in weights)
    return key.choices.dim_per_rank or [own if pe == key.team.rank else 0 for pe in range(key.team.size)]


def compile_backward(
    world: World,
    key: EmbeddingKey,
    weights: Sequence[torch.Tensor],
    dim_per_rank: Sequence[int],
    step: Step,
    num_lookups: int,
) -> None:
    """Begin to compile the kernels of the backward pass.

    Args:
        world: of this PE.
        key, weights, dim_per_rank: of the forward pass.
        step: of the backward pass.
        num_lookups: for which there is room.
    """
    team, lookups, choices = key.team, key.lookups, key.choices

    def backward() -> KernelRequest:
        assert choices.dtype is not None and choices.wire_dtype is not None  # as in all keys
        own = tuple(weight.shape[1] for weight in weights)
        widths = tuple(own if pe == team.rank else () for pe in range(team.size))
        if choices.columns is not None:
            widths = columns_of(tuple(choices.columns), tuple(dim_per_rank)).widths
        backward_key = BackwardKey(
            team,
            key.tables,
            None,
            backward_plan.OPERATOR.tuned(world),
            tuple(dim_per_rank),
            widths,
            (),
            choices.dtype,
            choices.wire_dtype,
            choices.pooling,
            lookups.is_weighted,
            lookups.from_sources,
        )
        return backward_plan.request_for(world, backward_key, weights, step)

    def sort() -> KernelRequest:
        num_keys = backward_plan.num_sort_keys(weights, from_sources=lookups.from_sources)
        dtypes = lookups.index_dtype, lookups.offset_dtype
        sorting = Sorting(*dtypes, choices.pooling == "mean", lookups.is_weighted, num_keys)
        return inversion.request_for(world, sorting, num_lookups)

    world.compile_ahead([backward], team)
    world.compile_ahead([sort], world.alone)
    if lookups.from_sources and lookups.is_weighted:
        world.compile_ahead([lambda: next(weight_gradients.sample_requests())])
