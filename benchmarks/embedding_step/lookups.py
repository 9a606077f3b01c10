"""A PE's input of a step: lookups of its own samples, and the gradient of its pooled rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from embedding.inputs import draw_rows

from persistent_ops.nn import balanced_splits

from .cases import Sizes

__all__ = ["NUM_SETS", "Batch", "draw_batch", "draw_step_gradient", "values_of"]

NUM_SETS = 2  # that take turns; each touches gigabytes of rows


class Batch(NamedTuple):
    """The lookups of a PE's samples, as a data loader makes them.

    Attributes:
        values: `[n]`, int64, feature by feature, in a feature sample by sample.
        lengths: `[F * B]`, int64, of the bags.
        split: samples of every PE.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    split: tuple[int, ...]


def draw_batch(
    sizes: Sizes, distribution: str, *, rank: int, world_size: int, number: int, device: torch.device
) -> Batch:
    """Return set `number` of a PE."""
    split = balanced_splits(sizes.batch, world_size)
    generator = torch.Generator(device).manual_seed(1_000_003 * rank + 101 * number + 7)
    samples = split[rank]
    values = torch.empty(samples * sum(sizes.hotness), dtype=torch.int64, device=device)
    parts = values.split([samples * hotness for hotness in sizes.hotness])
    for table, (part, rows) in enumerate(zip(parts, sizes.rows, strict=True)):
        draw_rows(part, rows, distribution, generator)
        if distribution == "zipf":
            part.add_(table * 7919).remainder_(rows)
    hotness = torch.tensor(sizes.hotness, device=device)
    return Batch(values, hotness.repeat_interleave(samples), split)


def values_of(sizes: Sizes, batch: Batch, rank: int) -> tuple[torch.Tensor, ...]:
    """Return the lookups of a PE's samples, by feature; collective.

    They are broadcast by torch.distributed: what a GPU draws by sums in any order may be another one's in the last bit.

    Args:
        sizes: of the tables.
        batch: this PE's.
        rank: the PE's.
    """
    counts = [batch.split[rank] * hotness for hotness in sizes.hotness]
    is_own = rank == dist.get_rank()
    values = batch.values.clone() if is_own else batch.values.new_empty(sum(counts))
    dist.broadcast(values, src=rank)
    parts: tuple[torch.Tensor, ...] = values.split(counts)
    return parts


def draw_step_gradient(
    sizes: Sizes, *, rank: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the gradient of a PE's pooled rows, `[B, F * D]`, uniform in [-1, 1); the same for every set."""
    shape = (balanced_splits(sizes.batch, world_size)[rank], len(sizes.rows) * sizes.dim)
    generator = torch.Generator(device).manual_seed(7_919 * rank + 3)
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-1, 1, generator=generator)
