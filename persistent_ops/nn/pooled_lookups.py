"""Copies of lookups from an input exchange, pooled for the PEs that sent them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..ops.embedding.lookups import Lookups

__all__ = ["pool_copies"]


def pool_copies(pool: Callable[..., torch.Tensor], lookups: Lookups) -> torch.Tensor:
    """Pool copies of the received lookups, as a global batch, so that the lookups may be released at once.

    Args:
        pool: `embedding_all_to_all` with this PE's tables and all choices.
        lookups: for them, after `Lookups.wait`.
    """
    indices, offsets, factors, batch_per_rank = _global_batch(lookups)
    # No other code has the copies. Hooks of others, such as torch.utils.checkpoint's, see nothing saved, as where
    # nothing is copied: a region that is made again may copy what it did not copy before.
    with _seen_by_nobody():
        return pool(indices, offsets, factors, batch_per_rank=batch_per_rank)


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
            weights += [] if source.per_sample_weights is None else [source.per_sample_weights[begin:end]]
    offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    is_weighted = first.per_sample_weights is not None
    factors = torch.cat([first.per_sample_weights[:0], *weights]) if is_weighted else None  # type: ignore[index]
    return torch.cat(indices), offsets, factors, [source.samples for source in sources]
