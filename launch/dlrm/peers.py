"""What the tables are compared with: the same tables, exchanged through torch.distributed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import persistent_ops as po

from .embedding import EmbeddingOptimizer
from .way import EPS

__all__ = ["ExchangedEmbedding", "FbgemmEmbedding", "why_no_fbgemm"]

_FBGEMM_MODULES = ("split_table_batched_embeddings_ops_training", "split_table_batched_embeddings_ops_common")


class _Arrived(NamedTuple):
    """The global batch's lookups of this PE's slots.

    Attributes:
        values, lengths: of each slot; `[n]` and `[B]`.
        batch_per_rank: samples of every PE.
    """

    values: list[torch.Tensor]
    lengths: list[torch.Tensor]
    batch_per_rank: tuple[int, ...]


class ExchangedEmbedding(nn.Module):
    """Tables on the PEs that have them in another module, pooled by `embedding_bag`; an `EmbeddingModule`.

    Lengths, lookups, pooled rows and their gradients travel through `all_to_all_single`, as TorchRec has it: how many
    lookups come is read on the host.

    Args:
        collection: whose placement this takes, and whose rows it begins with, in memory of its own; with one group of
            tables.
        optimizer: makes the optimizer of this PE's tables; their gradients are sparse.
    """

    optimizer: EmbeddingOptimizer

    def __init__(
        self,
        collection: po.nn.ShardedEmbeddingBagCollection,
        optimizer: Callable[[Iterable[nn.Parameter]], EmbeddingOptimizer],
    ) -> None:
        super().__init__()
        self._place(collection)
        self.tables = nn.ParameterList(nn.Parameter(block.clone()) for block in self._blocks(collection))
        # An optimizer needs a parameter, also where the PE has no table.
        self.optimizer = optimizer(list(self.tables) or [nn.Parameter(torch.empty(0))])

    def _place(self, collection: po.nn.ShardedEmbeddingBagCollection) -> None:
        """Note who has what."""
        layout = collection.layout
        (group,) = layout.groups
        self._rank, self._num_pes = dist.get_rank(), dist.get_world_size()
        self._num_features = len(layout.features)
        self._features = [[slot.feature for slot in of_pe] for of_pe in group.slots]
        self._widths = [slot.width for slot in group.columns]
        self._dims = group.dim_per_rank
        self._order = [column for _, column in layout.outputs]
        self._slots = group.slots[self._rank]

    def _blocks(self, collection: po.nn.ShardedEmbeddingBagCollection) -> list[torch.Tensor]:
        """Return the rows of this PE's slots, in the collection's memory."""
        state = collection.state_dict()
        found = []
        for slot in self._slots:
            shards = dict(state[f"embedding_bags.{collection.layout.configs[slot.table].name}.weight"].shards)
            found.append(shards[torch.Size((0, slot.slice * slot.width))])
        return found

    def input_dist(self, values: torch.Tensor, lengths: torch.Tensor, *, batch_per_rank: Sequence[int]) -> _Arrived:
        """See `EmbeddingModule`; waits on the host."""
        split = tuple(batch_per_rank)
        per_feature = lengths.view(self._num_features, split[self._rank])
        of_feature = values.split(per_feature.sum(1).tolist())
        num_slots = len(self._slots)
        came = _exchanged(
            [per_feature[features].flatten() for features in self._features], [num_slots * each for each in split]
        )
        of_source = [part.view(num_slots, samples) for part, samples in zip(came, split, strict=True)]
        counts = torch.stack([each.sum(1) for each in of_source]).tolist()
        nothing = values[:0]
        came = _exchanged(
            [torch.cat([nothing, *(of_feature[feature] for feature in of_pe)]) for of_pe in self._features],
            [sum(of_pe) for of_pe in counts],
        )
        pieces = [part.split(own) for part, own in zip(came, counts, strict=True)]
        return _Arrived(
            [torch.cat([of_pe[slot] for of_pe in pieces]) for slot in range(num_slots)],
            list(torch.cat(of_source, dim=1)),
            split,
        )

    def forward(self, features: _Arrived) -> torch.Tensor:
        """See `EmbeddingModule`."""
        pooled = self._pooled(features)
        samples = features.batch_per_rank[self._rank]
        rows: torch.Tensor = _RowsToSamples.apply(pooled, features.batch_per_rank, self._dims, self._rank)
        of_pes = rows.split([samples * dim for dim in self._dims])
        columns = torch.cat([part.view(samples, dim) for part, dim in zip(of_pes, self._dims, strict=True)], dim=1)
        blocks = columns.split(self._widths, dim=1)
        return torch.cat([blocks[column] for column in self._order], dim=1)

    def _pooled(self, features: _Arrived) -> torch.Tensor:
        """Return the pooled rows of the global batch, `[B, D here]`."""
        reference = self.tables[0] if len(self.tables) else torch.empty(0)
        pooled = [reference.new_empty(sum(features.batch_per_rank), 0, requires_grad=torch.is_grad_enabled())]
        for table, values, lengths in zip(self.tables, features.values, features.lengths, strict=True):
            offsets = F.pad(lengths.cumsum(0, dtype=values.dtype), (1, 0))
            pooled.append(F.embedding_bag(values, table, offsets, mode="sum", sparse=True, include_last_offset=True))
        return torch.cat(pooled, dim=1)


class FbgemmEmbedding(ExchangedEmbedding):
    """The same with FBGEMM's table-batched embeddings, which update rows in their backward pass.

    Exact, without stochastic rounding, all memory on the GPU.

    Args:
        collection: see `ExchangedEmbedding`.
        algorithm: of the optimizer.
        rate: learning rate.

    Raises:
        Exception: of any type; it cannot be made here.
    """

    def __init__(self, collection: po.nn.ShardedEmbeddingBagCollection, algorithm: str, rate: float) -> None:
        nn.Module.__init__(self)
        self._place(collection)
        blocks = self._blocks(collection)
        if not blocks:
            raise ValueError("FBGEMM makes no module without tables")
        training, common = (importlib.import_module(f"fbgemm_gpu.{name}") for name in _FBGEMM_MODULES)
        configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        is_gpu = blocks[0].is_cuda
        location = common.EmbeddingLocation.DEVICE if is_gpu else common.EmbeddingLocation.HOST
        device = training.ComputeDevice.CUDA if is_gpu else training.ComputeDevice.CPU
        self._fused: Any = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(*block.shape, location, device) for block in blocks],
            optimizer=getattr(configs.EmbOptimType, f"EXACT_{algorithm.upper()}"),
            learning_rate=rate,
            eps=EPS,
            weights_precision=configs.SparseType.FP32,
            output_dtype=configs.SparseType.FP32,
            stochastic_rounding=False,
            device=blocks[0].device,
        )
        for own, block in zip(self._fused.split_embedding_weights(), blocks, strict=True):
            own.copy_(block)
        self.optimizer = _FusedRate(self._fused, rate)

    def _pooled(self, features: _Arrived) -> torch.Tensor:
        lengths = torch.cat(features.lengths)
        pooled: torch.Tensor = self._fused(torch.cat(features.values).long(), F.pad(lengths.long().cumsum(0), (1, 0)))
        return pooled


class _FusedRate:
    """The learning rate of FBGEMM's optimizer; see `EmbeddingOptimizer`."""

    def __init__(self, fused: Any, rate: float) -> None:
        self._fused = fused
        self._pushed = rate
        self.param_groups: list[dict[str, Any]] = [{"lr": rate}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        rate = self.param_groups[0]["lr"]
        if rate != self._pushed:
            self._fused.set_learning_rate(rate)
            self._pushed = rate

    def step(self) -> None:
        pass  # the backward pass has updated the rows

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._fused.split_optimizer_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("FBGEMM's states are not loaded")


def why_no_fbgemm() -> str | None:
    """Return why FBGEMM cannot be imported, or None where it can."""
    try:
        for name in _FBGEMM_MODULES:
            importlib.import_module(f"fbgemm_gpu.{name}")
    except Exception as error:  # another library's, of any version
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


class _RowsToSamples(torch.autograd.Function):
    """Sends pooled rows `[B, D here]` to the PEs that have the samples; gradients come back as the mean over the PEs.

    Returns what this PE gets, PE by PE, `[samples here * sum of D]`.
    """

    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, split: Sequence[int], dims: Sequence[int], rank: int) -> torch.Tensor:
        ctx.split, ctx.width, ctx.counts = split, dims[rank], [split[rank] * dim for dim in dims]
        sent = pooled.contiguous().view(-1).split([samples * dims[rank] for samples in split])
        return torch.cat(_exchanged(sent, ctx.counts))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sent = gradient.contiguous().split(ctx.counts)
        came = torch.cat(_exchanged(sent, [samples * ctx.width for samples in ctx.split]))
        return came.view(sum(ctx.split), ctx.width).div_(len(ctx.split)), None, None, None


def _exchanged(sent: Sequence[torch.Tensor], counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Send a vector to each PE; return what comes, so many elements from each."""
    whole = torch.cat(list(sent))
    came = whole.new_empty(sum(counts))
    dist.all_to_all_single(came, whole, list(counts), [part.numel() for part in sent])
    return came.split(list(counts))
