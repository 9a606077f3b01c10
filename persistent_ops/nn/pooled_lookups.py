"""Lookups that an input exchange has brought to the owners of their tables, pooled for the PEs that brought them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import ops as _ops
from ..ops.embedding.backward import EmbeddingOptimizer
from ..ops.embedding.lookups import Lookups
from .table_layout import Group

__all__ = ["pool_arrived"]


def pool_arrived(
    group: Group,
    columns: Sequence[int],
    weights: Sequence[torch.Tensor],
    optimizer: EmbeddingOptimizer,
    lookups: Lookups,
    wire_dtype: torch.dtype | None,
    *,
    is_copied: bool,
) -> torch.Tensor:
    """Pool what has come: where it lies, or copied as a global batch.

    The host waits until it knows how many samples each PE has brought, unless that was passed. Bad lookups are skipped
    here, since the exchange has told.

    Args:
        group: of the tables.
        columns: where each slot's begin in the result.
        weights, optimizer: this PE's.
        lookups: for them, behind `Lookups.wait`.
        wire_dtype: of what float32 tables send; None for theirs.
        is_copied: whether the backward pass has a copy, so that lookups may be released at once.
    """
    pool = functools.partial(
        _ops.embedding_all_to_all,
        weights,
        mode=group.pooling,
        dim_per_rank=group.dim_per_rank,
        dtype=group.dtype,
        wire_dtype=wire_dtype if group.dtype == torch.float32 else None,
        bounds="ignore",
        columns=columns,
        optimizer=optimizer,
    )
    pooled: torch.Tensor
    if not is_copied:
        lookups.learn_split()
        pooled = pool(lookups)
        return pooled
    indices, offsets, factors, batch_per_rank = _global_batch(lookups)
    # The copies are nobody else's. Hooks of others, such as torch.utils.checkpoint's, see nothing saved, as where
    # nothing is copied: a region that is made anew may copy what it did not copy before.
    with _seen_by_nobody():
        pooled = pool(indices, offsets, factors, batch_per_rank=batch_per_rank)
    return pooled


def _seen_by_nobody() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda held: held[0])


def _global_batch(lookups: Lookups) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[int]]:
    """Return indices, offsets and weights of the global batch, and each PE's samples; waits on the host."""
    sources = [lookups.source(pe) for pe in range(len(lookups.sources))]
    first = sources[0]
    indices, weights, lengths = [first.indices[:0]], [], [first.offsets[:0]]
    for slot in range(lookups.num_slots):
        for source in sources:
            ends = source.offsets[slot * source.samples : (slot + 1) * source.samples + 1]
            begin, end = ends[[0, -1]].tolist()
            indices.append(source.indices[begin:end])
            lengths.append(ends.diff())
            weights += [] if source.weights is None else [source.weights[begin:end]]
    offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    is_weighted = first.weights is not None
    factors = torch.cat([first.weights[:0], *weights]) if is_weighted else None  # type: ignore[index]
    return torch.cat(indices), offsets, factors, [source.samples for source in sources]
