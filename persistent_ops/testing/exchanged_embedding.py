"""Baseline of tables spread over PEs: the same tables, exchanged through torch.distributed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import persistent_ops as po

from ..nn.table_layout import Layout, Slot

__all__ = ["Bags", "ExchangedEmbedding", "KnownCounts", "means_over_pes", "own_slots", "parts_of", "sums"]


class Bags(NamedTuple):
    """Lookups of some slots, on the PE that pools them.

    Attributes:
        values, lengths: of each slot; `[n]` and `[samples]`.
        whole: both of all slots, where they lie side by side.
    """

    values: list[torch.Tensor]
    lengths: list[torch.Tensor]
    whole: tuple[torch.Tensor, torch.Tensor] | None = None


class KnownCounts:
    """Copies numbers of lookups to the host once, and returns them from then on, also in a CUDA-graph capture.

    For batches that have as many lookups, each in the same bag. A step asks for numbers of one shape once.
    """

    def __init__(self) -> None:
        self._told: dict[torch.Size, Any] = {}

    def __call__(self, counts: torch.Tensor) -> Any:
        if counts.shape not in self._told:
            self._told[counts.shape] = counts.tolist()
        return self._told[counts.shape]


class _Arrived(NamedTuple):
    """A batch's lookups on this PE.

    Attributes:
        spread: of this PE's tables, for the global batch.
        replicated: of the tables that every PE has, for this PE's samples.
        batch_per_rank: samples of every PE.
    """

    spread: Bags
    replicated: Bags
    batch_per_rank: tuple[int, ...]


class ExchangedEmbedding(nn.Module):
    """Tables on the PEs that have them in another module, pooled by `embedding_bag`.

    Lengths, lookups, pooled rows and their gradients travel through `all_to_all_single`, as TorchRec has it: how many
    lookups come is read on the host, and what travels is copied once more, into order. Replicated tables are TorchRec's
    data_parallel ones: pooled where the samples are, with dense gradients that one `all_reduce` sums; they are float32
    whatever the others are, as sums of 16 bits stop growing.

    Args:
        collection: whose placement this takes, and whose rows and states it begins with.
        optimizer: makes the optimizer of this PE's tables. Gradients are sparse, and dense for replicated tables; its
            states are "sum", or none.
        wire_dtype: of the collection.
        shares_memory: whether the tables that the PEs share out are the collection's own, and not copies.

    Attributes:
        read: brings numbers of lookups to the host; `KnownCounts` may take its place.

    Raises:
        ValueError: tables are not of one dtype and pooling "sum", or have several features.
    """

    optimizer: Any
    read: Callable[[torch.Tensor], Any]

    def __init__(
        self,
        collection: po.nn.ShardedEmbeddingBagCollection,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        wire_dtype: torch.dtype | None = None,
        shares_memory: bool = False,
    ) -> None:
        super().__init__()
        self._place(collection, wire_dtype)
        spread, copied = ([rows for rows, *_ in parts_of(collection, each)] for each in (self._slots, self._copied))
        if not shares_memory:
            spread = [torch.empty_like(rows) for rows in spread]
        self.tables = nn.ParameterList(map(nn.Parameter, spread))
        self.replicas = nn.ParameterList(nn.Parameter(torch.empty_like(rows, dtype=torch.float32)) for rows in copied)
        # An optimizer needs a parameter, also where the PE has no table.
        self.optimizer = optimizer(
            [*self.tables, *self.replicas] or [nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))]
        )
        self.take_over(collection)

    def _place(self, collection: po.nn.ShardedEmbeddingBagCollection, wire_dtype: torch.dtype | None) -> None:
        """Note who has what."""
        layout = collection.layout
        kinds = {(config.pooling, config.data_type, len(config.feature_names)) for config in layout.configs}
        if len(kinds) != 1 or any((pooling, features) != ("sum", 1) for pooling, _, features in kinds):
            raise ValueError(
                f"collection: expected tables of one dtype and pooling 'sum' with one feature each, got {kinds}"
            )
        self.read = torch.Tensor.tolist
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._num_features = len(layout.features)
        slots = layout.groups[0].slots if layout.groups else ((),) * self._world_size
        self._slots, self._copied = own_slots(layout, self._rank)
        self._features = [[slot.feature for slot in of_pe] for of_pe in slots]
        self._widths = [slot.width for of_pe in slots for slot in of_pe]
        firsts = [0]
        for group in [*layout.groups, *layout.replicated]:
            firsts.append(firsts[-1] + len(group.columns))
        self._dtype = layout.configs[0].data_type
        self._columns = _Columns(
            widths=[*([slot.width for slot in of_pe] for of_pe in slots), [slot.width for slot in self._copied]],
            order=[firsts[group] + column for group, column in layout.outputs],
            rank=self._rank,
            wire_dtype=wire_dtype or self._dtype,
        )

    def take_over(self, collection: po.nn.ShardedEmbeddingBagCollection) -> None:
        """Take over the rows of a collection of the same placement, and its optimizer's states; rates stay."""
        with torch.no_grad():
            for own, given in zip(self.parts(), parts_of(collection, [*self._slots, *self._copied]), strict=True):
                for mine, other in zip(own, given, strict=True):
                    if mine.data_ptr() != other.data_ptr():
                        mine.copy_(other)

    def parts(self) -> list[list[torch.Tensor]]:
        """Return the rows of each slot, this PE's and then the replicated ones, and their states."""
        tables = [*self.tables, *self.replicas]
        return [[table.detach(), *sums(self.optimizer, table)] for table in tables]

    def input_dist(self, values: torch.Tensor, lengths: torch.Tensor, *, batch_per_rank: Sequence[int]) -> _Arrived:
        """Send the lookups of this PE's samples; waits on the host.

        Args:
            values: `[n]`, feature by feature, sample by sample.
            lengths: `[F * B]`, of the bags.
            batch_per_rank: samples of every PE.

        Returns:
            What `forward` takes.
        """
        split = tuple(batch_per_rank)
        per_feature = lengths.view(self._num_features, split[self._rank])
        of_feature = values.split(self.read(per_feature.sum(1)))
        copied = [slot.feature for slot in self._copied]
        replicated = Bags([of_feature[feature] for feature in copied], [per_feature[feature] for feature in copied])
        spread = self._sent(of_feature, per_feature, split) if self._widths else Bags([], [])
        return _Arrived(spread, replicated, split)

    def _sent(self, of_feature: Sequence[torch.Tensor], per_feature: torch.Tensor, split: tuple[int, ...]) -> Bags:
        """Send the lookups of this PE's samples to the tables, and return those that come to this PE's."""
        num_slots, sent = len(self._slots), [feature for of_pe in self._features for feature in of_pe]
        # Rows one by one: numbers in a list would be copied to the GPU, and no graph captures that.
        came = _exchanged(
            torch.cat([per_feature[feature] for feature in sent]),
            [len(of_pe) * split[self._rank] for of_pe in self._features],
            [num_slots * each for each in split],
        )
        of_source = [part.view(num_slots, samples) for part, samples in zip(came, split, strict=True)]
        counts = self.read(torch.stack([each.sum(1) for each in of_source]))
        came = _exchanged(
            torch.cat([of_feature[feature] for feature in sent]),
            [sum(of_feature[feature].numel() for feature in of_pe) for of_pe in self._features],
            [sum(of_pe) for of_pe in counts],
        )
        pieces = [part.split(own) for part, own in zip(came, counts, strict=True)]
        values = torch.cat([came[0][:0], *(of_pe[slot] for slot in range(num_slots) for of_pe in pieces)])
        lengths = torch.cat(of_source, dim=1)
        sizes = [sum(of_pe[slot] for of_pe in counts) for slot in range(num_slots)]
        return Bags(list(values.split(sizes)), list(lengths), whole=(values, lengths.view(-1)))

    def forward(self, features: _Arrived) -> torch.Tensor:
        """Return the pooled rows of this PE's samples, `[B, sum of D]`, in the order of features."""
        split = features.batch_per_rank
        pooled = self._pooled(features.spread, sum(split)) if self._widths else None
        copied = self._pooled_here(features.replicated) if self._copied else None
        rows: torch.Tensor = _RowsToSamples.apply(pooled, copied, split, self._columns)
        return rows

    def _pooled(self, bags: Bags, num_samples: int) -> torch.Tensor:
        """Return the pooled rows of the global batch, `[B, D here]`."""
        reference = self.tables[0] if len(self.tables) else torch.empty(0, dtype=torch.float32, device="cpu")
        nothing = reference.new_empty(num_samples, 0, requires_grad=torch.is_grad_enabled())
        return torch.cat([nothing, *_each_pooled(self.tables, bags, is_sparse=True)], dim=1)

    def _pooled_here(self, bags: Bags) -> torch.Tensor:
        """Return the pooled rows of this PE's samples in the replicated tables."""
        return torch.cat(_each_pooled(means_over_pes(*self.replicas), bags, is_sparse=False), dim=1)


def own_slots(layout: Layout, rank: int) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Return a PE's slots of tables that the PEs share out, and the slots of tables that all PEs have."""
    spread = layout.groups[0].slots[rank] if layout.groups else ()
    return spread, tuple(slot for group in layout.replicated for slot in group.columns)


def parts_of(collection: po.nn.ShardedEmbeddingBagCollection, slots: Iterable[Slot]) -> list[list[torch.Tensor]]:
    """Return the rows of slots that this PE has, and the states of their optimizer, in the collection's memory."""
    layout, tables = collection.layout, collection.state_dict()
    states = collection.optimizer.state_dict()["state"]
    found = []
    for slot in slots:
        name = f"embedding_bags.{layout.configs[slot.table].name}.weight"
        number = layout.slices_of(slot.table, dist.get_rank()).index(slot.slice)
        found.append([shards.shards[number][1] for shards in (tables[name], *states[name].values())])
    return found


def sums(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[torch.Tensor]:
    """Return the state of a parameter that torch's Adagrad has, and SGD has not."""
    state = optimizer.state[parameter]
    return [state["sum"]] if "sum" in state else []


def _each_pooled(tables: Iterable[torch.Tensor], bags: Bags, *, is_sparse: bool) -> list[torch.Tensor]:
    pooled = []
    for table, values, lengths in zip(tables, bags.values, bags.lengths, strict=True):
        offsets = F.pad(lengths.cumsum(0, dtype=values.dtype), (1, 0))
        pooled.append(F.embedding_bag(values, table, offsets, mode="sum", sparse=is_sparse, include_last_offset=True))
    return pooled


class _MeansOverPes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(table.view_as(table) for table in tables)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(whole)
        parts = whole.div_(dist.get_world_size()).split([each.numel() for each in gradients])
        return tuple(part.view_as(each) for part, each in zip(parts, gradients, strict=True))


def means_over_pes(*tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return replicated tables whose gradients become the means over the PEs; the backward pass is collective."""
    found: tuple[torch.Tensor, ...] = _MeansOverPes.apply(*tables)
    return found


class _Columns:
    """The columns of pooled rows: PE by PE where they come from owners, and as the result has them.

    Args:
        widths: of the columns of each PE's slots, and last of the replicated tables' slots.
        order: of the result's columns: numbers among all these columns.
        rank: of this PE.
        wire_dtype: in which rows and gradients travel.
    """

    def __init__(self, widths: list[list[int]], order: list[int], rank: int, wire_dtype: torch.dtype) -> None:
        self.dims = [sum(each) for each in widths[:-1]]
        self.own_dim, self.wire_dtype = self.dims[rank], wire_dtype
        self._widths, self._order = widths, order

    def views(self, flat: torch.Tensor, samples: int) -> list[torch.Tensor]:
        """Return what comes from each PE, or goes there, `[samples, D there]`."""
        parts = flat.split([samples * dim for dim in self.dims])
        return [part.view(samples, dim) for part, dim in zip(parts, self.dims, strict=True)]

    def joined(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the rows of all PEs and of replicated tables, where there are any, in the result's order."""
        columns = [
            column
            for part, widths in zip(parts, self._widths, strict=True)
            if part is not None
            for column in part.split(widths, dim=1)
        ]
        return torch.cat([columns[column] for column in self._order], dim=1)

    def write_parts(self, result: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> None:
        """Write the columns of a result to the parts that `joined` takes."""
        widths = [width for of_part in self._widths for width in of_part]
        pieces = result.split([widths[column] for column in self._order], dim=1)
        columns = iter([piece for _, piece in sorted(zip(self._order, pieces, strict=True), key=lambda each: each[0])])
        for part, of_part in zip(parts, self._widths, strict=True):
            own = list(itertools.islice(columns, len(of_part)))
            if part is not None and own:
                torch.cat(own, dim=1, out=part)


class _RowsToSamples(torch.autograd.Function):
    """Sends pooled rows `[B, D here]` to the PEs that have the samples; gradients come back as the mean.

    Returns what this PE gets, and its own rows of replicated tables, in the result's order and the wire's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, pooled: torch.Tensor | None, copied: torch.Tensor | None, split: Sequence[int], columns: _Columns
    ) -> torch.Tensor:
        ctx.split, ctx.columns = split, columns
        ctx.dtypes = [None if rows is None else rows.dtype for rows in (pooled, copied)]
        samples = split[dist.get_rank()]
        came: list[torch.Tensor | None] = [None] * len(split)
        if pooled is not None:
            sent = pooled.to(columns.wire_dtype).contiguous().view(-1)
            sizes = [each * columns.own_dim for each in split]
            flat = _flat_exchanged(sent, sizes, [samples * dim for dim in columns.dims])
            came[:] = columns.views(flat, samples)
        return columns.joined([*came, None if copied is None else copied.to(columns.wire_dtype)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        columns, split = ctx.columns, ctx.split
        samples, (dtype, copied_dtype) = split[dist.get_rank()], ctx.dtypes
        flat = gradient.new_empty(samples * sum(columns.dims))
        copied = None if copied_dtype is None else gradient.new_empty(samples, gradient.shape[1] - sum(columns.dims))
        columns.write_parts(gradient, [*columns.views(flat, samples), copied])
        own = None
        if dtype is not None:
            sizes = [each * columns.own_dim for each in split]
            came = _flat_exchanged(flat, [samples * dim for dim in columns.dims], sizes).to(dtype)
            own = came.view(sum(split), columns.own_dim).div_(len(split))
        return own, None if copied is None else copied.to(copied_dtype), None, None


def _exchanged(sent: torch.Tensor, sizes: Sequence[int], counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Send a number of elements of a vector to each PE; return the received ones, a number from each."""
    parts: tuple[torch.Tensor, ...] = _flat_exchanged(sent, sizes, counts).split(list(counts))
    return parts


def _flat_exchanged(sent: torch.Tensor, sizes: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    came = sent.new_empty(sum(counts))
    dist.all_to_all_single(came, sent, list(counts), list(sizes))
    return came
