"""A batch of the embedding, as the PEs have it that bring it."""

from __future__ import annotations

from typing import Any

import torch
from embedding_backward_cases import Case, make_inputs
from embedding_cases import split_of

import persistent_ops as po

__all__ = ["brought", "exchange", "make_exchange"]


def _slots_of(case: Case, world: int) -> list[list[tuple[int, int]]]:
    """Return every PE's; each table has a feature of its own."""
    slots, feature = [], 0
    for rank in range(world):
        num_tables = len(make_inputs(case, rank, world, 0).tables)
        slots.append([(feature + table, case.shape.rows) for table in range(num_tables)])
        feature += num_tables
    return slots


def brought(case: Case, iteration: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return what this PE brings of the batch: values, offsets and weights."""
    rank, world = po.rank(), po.world_size()
    split = split_of(case.shape, world)
    batch, first = sum(split), sum(split[:rank])
    values, lengths, weights = [], [], []
    for owner in range(world):
        inputs = make_inputs(case, owner, world, iteration)
        for table in range(len(inputs.tables)):
            begin = table * batch + first
            ends = inputs.offsets[begin : begin + split[rank] + 1].long()
            values.append(inputs.indices[ends[0] : ends[-1]])
            lengths.append(ends.diff())
            weights += [] if inputs.factors is None else [inputs.factors[ends[0] : ends[-1]]]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0).to(case.shape.offset_dtype)
    return torch.cat(values), offsets, torch.cat(weights) if weights else None


def make_exchange(case: Case, **options: Any) -> po.EmbeddingInputs:
    """Return the exchange of a case's batches. Collective; `options`: of `po.EmbeddingInputs`."""
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


def exchange(inputs: po.EmbeddingInputs, case: Case, iteration: int) -> po.Lookups:
    """Let this PE's part of a batch travel. Collective."""
    values, offsets, weights = (
        None if each is None else each.to(po.device()) for each in brought(case, iteration)
    )  # fmt: skip
    assert values is not None
    split = split_of(case.shape, po.world_size())
    return inputs.exchange(values, offsets=offsets, per_sample_weights=weights, batch_per_rank=split)
