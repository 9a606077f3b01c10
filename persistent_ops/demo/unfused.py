"""The demo's baseline: one embedding_bag per table, then all_to_all_single, then a reorder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["UnfusedExchange", "split_features"]


def split_features(
    indices: torch.Tensor, offsets: torch.Tensor, num_tables: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut feature-major lookups into the (indices, offsets) pairs that one embedding_bag call per table takes.

    Args:
        indices: `[n]`.
        offsets: `[T*B+1]`.
        num_tables: T.

    Returns:
        T pairs; offsets `[B+1]` begin at 0.
    """
    if num_tables == 0:
        return []
    batch_size = (offsets.numel() - 1) // num_tables
    bounds = offsets[::batch_size].tolist()
    features = []
    for table in range(num_tables):
        first, last = bounds[table], bounds[table + 1]
        own = offsets[table * batch_size : (table + 1) * batch_size + 1] - first
        features.append((indices[first:last], own))
    return features


class UnfusedExchange:
    """Embedding pooling and All-to-All as separate steps of torch.

    Args:
        weights: this PE's tables, `[R_t, D_t]`, all of one dtype.
        dim_per_rank: sum of D over the tables of each PE.
        batch_per_rank: samples that each PE receives; they sum to the global batch.
        rank: of this PE.
        device: of the tables.
        dtype: of the tables, needed where this PE has none.
        staged: exchange through host memory, for PEs that share a GPU (NCCL refuses them).
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        *,
        dim_per_rank: Sequence[int],
        batch_per_rank: Sequence[int],
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        staged: bool = False,
    ) -> None:
        self._weights = list(weights)
        self._dim_per_rank = list(dim_per_rank)
        self._batch_per_rank = list(batch_per_rank)
        self._rank = rank
        self._device = device
        self._dtype = dtype
        self._staged = staged

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this PE sends to the others in one exchange."""
        others = sum(self._batch_per_rank) - self._batch_per_rank[self._rank]
        return others * self._dim_per_rank[self._rank] * self._dtype.itemsize

    def pool(self, features: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Pool the global batch from this PE's tables.

        Args:
            features: (indices, offsets `[B+1]`) of each table.

        Returns:
            `[B, sum of own D]`: the samples of rank 0 first, so it is also the send buffer.
        """
        if not self._weights:
            return torch.empty((sum(self._batch_per_rank), 0), device=self._device, dtype=self._dtype)
        pooled = [
            torch.nn.functional.embedding_bag(indices, weight, offsets, mode="sum", include_last_offset=True)
            for weight, (indices, offsets) in zip(self._weights, features, strict=True)
        ]
        return torch.cat(pooled, dim=1)

    def exchange(self, pooled: torch.Tensor) -> torch.Tensor:
        """Send to each PE its samples; returns what arrived, `[B_local * sum of all D]`, one block per sender."""
        own_batch = self._batch_per_rank[self._rank]
        own_dim = self._dim_per_rank[self._rank]
        send = pooled.reshape(-1)
        if self._staged:
            send = send.cpu()
        received = torch.empty(own_batch * sum(self._dim_per_rank), device=send.device, dtype=self._dtype)
        # Splits are counted in elements, but the wire carries bytes: gloo does not know every dtype.
        element_bytes = self._dtype.itemsize
        dist.all_to_all_single(
            received.view(torch.uint8),
            send.view(torch.uint8),
            output_split_sizes=[own_batch * dim * element_bytes for dim in self._dim_per_rank],
            input_split_sizes=[batch * own_dim * element_bytes for batch in self._batch_per_rank],
        )
        return received.to(self._device) if self._staged else received

    def reorder(self, received: torch.Tensor) -> torch.Tensor:
        """Turn the senders' blocks into `[B_local, sum of all D]`, columns by owning rank."""
        own_batch = self._batch_per_rank[self._rank]
        blocks = received.split([own_batch * dim for dim in self._dim_per_rank])
        return torch.cat(
            [block.view(own_batch, dim) for block, dim in zip(blocks, self._dim_per_rank, strict=True)], dim=1
        )

    def __call__(self, features: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Run all three steps."""
        return self.reorder(self.exchange(self.pool(features)))
