"""The interface that the training needs of an embedding module, and a plain module for a single process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["EmbeddingModule", "PlainEmbedding"]


class EmbeddingModule(Protocol):
    """The interface of an embedding module, an `nn.Module` whose tables may be spread over the PEs.

    On every PE, once a step: `input_dist` sends the lookups of the PE's own samples, of which there may be none, to the
    tables; the forward pass, called with what that returned, pools them; autograd calls the backward pass. Between the
    two passes the next batch's lookups are sent, and DistributedDataParallel exchanges gradients of the dense part.

    Each PE's loss is the sum over its samples, times the number of PEs, divided by the samples of the *global* batch:
    DistributedDataParallel takes the mean over the PEs. A module that sums a row's gradients over the PEs must divide
    by the number of PEs too, or its updates are that many times too large.

    Attributes:
        optimizer: of the tables. A fused one updates rows in the backward pass: its `step` has next to nothing to do.
        training: of every `nn.Module`: false in an evaluation, which has no backward pass.
    """

    optimizer: torch.optim.Optimizer
    training: bool

    def input_dist(self, values: torch.Tensor, lengths: torch.Tensor, *, batch_per_rank: Sequence[int]) -> Any:
        """Send the lookups of this PE's B samples on their way.

        Args:
            values: `[n]`, int32 or int64, feature by feature, sample by sample.
            lengths: `[T * B]`, of the same dtype: lengths[t * B + b] lookups are feature t's in sample b.
            batch_per_rank: samples of every PE.

        Returns:
            What the module is called with, before the next call of this but one.
        """

    def __call__(self, features: Any) -> torch.Tensor:
        """Run `forward`: pool the lookups that `input_dist` has sent.

        Returns:
            `[B, sum of D]`, the features' pooled rows in the order of features, whatever the tables' placement.
        """

    def train(self, mode: bool = True) -> Any:
        """Set `training`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the tables, each under its name; a PE's part of one as torch.distributed.checkpoint takes it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take tables over."""


class PlainEmbedding(nn.Module):
    """Tables that one process holds whole, pooled by `embedding_bag` and updated by an optimizer of torch's.

    The reference for modules that spread them. Rows of a table of R rows begin uniformly between -1/sqrt(R) and
    1/sqrt(R), as in MLPerf's reference.

    Args:
        num_rows: of the tables, one for each feature.
        dims: widths of the tables.
        optimizer: makes the optimizer of the tables; their gradients are sparse.
        seed: of the first rows.
        device: of the tables.
    """

    def __init__(
        self,
        num_rows: Sequence[int],
        dims: Sequence[int],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.tables = nn.ParameterDict()
        for number, (rows, dim) in enumerate(zip(num_rows, dims, strict=True)):
            # A generator for each, so that a PE that has some of the tables can begin with the same rows.
            generator = torch.Generator().manual_seed(seed * 1_000_003 + 1 + number)
            bound = 1.0 / math.sqrt(rows)
            self.tables[str(number)] = nn.Parameter(torch.empty(rows, dim).uniform_(-bound, bound, generator=generator))
        self.to(device)
        self.optimizer = optimizer(self.parameters())

    def input_dist(
        self, values: torch.Tensor, lengths: torch.Tensor, *, batch_per_rank: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EmbeddingModule`; one process has all lookups."""
        return values, lengths

    def forward(self, features: Any) -> torch.Tensor:
        """See `EmbeddingModule`; reads lengths on the host."""
        values, lengths = features
        per_feature = lengths.unflatten(0, (len(self.tables), -1))
        counts = per_feature.sum(dim=1).tolist()
        pooled = []
        for table, own, each in zip(self.tables.values(), values.split(counts), per_feature, strict=True):
            offsets = F.pad(each.cumsum(0, dtype=values.dtype), (1, 0))
            pooled.append(F.embedding_bag(own, table, offsets, mode="sum", sparse=True, include_last_offset=True))
        return torch.cat(pooled, dim=1)
