"""A batch of the embedding, divided among the PEs that pass it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from embedding_backward_cases import Case, make_inputs
from embedding_cases import split_of
from serially import serially

import persistent_ops as po

__all__ = ["brought", "exchange", "make_exchange", "of_own_samples"]


def _slots_of(case: Case, world: int) -> list[list[tuple[int, int]]]:
    """Return the batch of every PE. Each table has a feature of its own."""
    slots, feature = [], 0
    for rank in range(world):
        num_tables = len(make_inputs(case, rank, world, 0).tables)
        slots.append([(feature + table, case.shape.rows) for table in range(num_tables)])
        feature += num_tables
    return slots


@serially
def brought(case: Case, iteration: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return this PE's part of the batch: values, offsets and weights."""
    rank, world = po.rank(), po.world_size()
    split = split_of(case.shape, world)
    batch, first = sum(split), sum(split[:rank])
    lengths = []
    for owner in range(world):
        inputs = make_inputs(case, owner, world, iteration)
        for table in range(len(inputs.tables)):
            begin = table * batch + first
            lengths.append(inputs.offsets[begin : begin + split[rank] + 1].long().diff())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0).to(case.shape.offset_dtype)
    values = of_own_samples(case, iteration, lambda owner: make_inputs(case, owner, world, iteration).indices)
    assert values is not None
    weights = of_own_samples(case, iteration, lambda owner: make_inputs(case, owner, world, iteration).factors)
    return values, offsets, weights


def of_own_samples(case: Case, iteration: int, of_lookups: Callable[[int], torch.Tensor | None]) -> torch.Tensor | None:
    """Return this PE's part of something that each owner has for all lookups of the global batch."""
    rank, world = po.rank(), po.world_size()
    split = split_of(case.shape, world)
    batch, first = sum(split), sum(split[:rank])
    found = []
    for owner in range(world):
        inputs, whole = make_inputs(case, owner, world, iteration), of_lookups(owner)
        if whole is None:
            return None
        for table in range(len(inputs.tables)):
            begin = table * batch + first
            ends = inputs.offsets[begin : begin + split[rank] + 1].long()
            found.append(whole[ends[0] : ends[-1]])
    return torch.cat(found)


def make_exchange(case: Case, **options: Any) -> po.EmbeddingInputs:
    """Return the exchange of a case's batches. Collective. `options`: of `po.EmbeddingInputs`."""
    world = po.world_size()
    slots = _slots_of(case, world)
    choices = {
        "lookups_per_sample": case.shape.max_pooling,
        "index_dtype": case.shape.index_dtype,
        "bounds": "ignore" if case.bad else "fatal",
        **options,
    }
    return po.EmbeddingInputs(
        slots,
        num_features=sum(map(len, slots)),
        max_batch=max(split_of(case.shape, world)),
        is_weighted=case.shape.is_weighted,
        **choices,
    )


def exchange(inputs: po.EmbeddingInputs, case: Case, iteration: int, *, gives_gradients: bool = False) -> po.Lookups:
    """Send this PE's part of a batch. `gives_gradients`: gradients of the weights come back. Collective."""
    values, offsets, weights = (
        None if each is None else each.to(po.device()) for each in brought(case, iteration)
    )  # fmt: skip
    assert values is not None
    if weights is not None and gives_gradients:
        weights = weights.clone().requires_grad_()
    split = split_of(case.shape, po.world_size())
    return inputs.exchange(values, offsets=offsets, per_sample_weights=weights, batch_per_rank=split)
