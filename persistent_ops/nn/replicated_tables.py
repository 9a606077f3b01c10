"""Embedding tables that every PE has: looked up alone, updated by the sum of all PEs' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import ops as _ops
from ..ops.embedding_all_to_all import pool_alone
from ..ops.embedding_backward import EmbeddingOptimizer
from ..ops.embedding_backward_plan import OPERATOR as _BACKWARD
from ..ops.embedding_gradients import dense_gradients, dense_size
from ..ops.embedding_inputs_lookups import Moment
from ..runtime import world as _world
from .embedding_features import Features
from .local_lookups import Counts, LocalLookups, SlotFeatures, check_features
from .table_layout import Group, Layout

__all__ = ["LocalBatch", "ReplicatedTables"]

_ALIGNMENT = 4  # of a group's sums, in floats
_PARTS = {torch.float32: 1, torch.bfloat16: 3}  # that hold a float32


class LocalBatch(NamedTuple):
    """This PE's lookups for replicated tables, on their way.

    Attributes:
        given: lookups of all features.
        lengths: of their bags, int64.
        offsets: of each group's bags.
        counts: how many lookups there are; None in a CUDA-graph capture.
        begun: where in a stream of the device that was launched; None on the host.
    """

    given: Features
    lengths: torch.Tensor
    offsets: list[torch.Tensor]
    counts: Counts | None
    begun: Moment | None = None

    def take_over(self) -> None:
        """Let the current stream read it, which may be another one than that of `ReplicatedTables.begin`."""
        if self.begun is None:
            return
        self.begun.order_behind()
        current = torch.cuda.current_stream(self.lengths.device)
        if current != self.begun.stream:
            for tensor in (*self.given, self.lengths, *self.offsets):
                if tensor is not None:
                    tensor.record_stream(current)


class ReplicatedTables:
    """The replicated tables of a collection.

    A forward pass looks up this PE's samples, and nothing travels. In a backward pass each PE adds up the gradients of
    every row that its samples have, in a fixed order; one all-reduce adds these sums of all tables in the order of the
    PEs, and the rows that some PE has touched are updated by the same launch on every PE. Replicas that began with the
    same bits therefore keep the same bits; which bits depends on the number of PEs.

    Args:
        world: of this PE.
        layout: of all tables.
        max_batch: the most samples that a PE passes.
        is_weighted: whether lookups have weights.
        bounds: "fatal" or "ignore", of bad lookups.
        algorithm, options: of `EmbeddingOptimizer`.
        scale: factor of the summed gradients.

    Attributes:
        optimizers: one for each of the layout's replicated groups.
    """

    def __init__(
        self,
        world: _world.World,
        layout: Layout,
        max_batch: int,
        *,
        is_weighted: bool,
        bounds: str,
        algorithm: str,
        options: Mapping[str, Any],
        scale: float,
    ) -> None:
        self._world = world
        self._num_features, self._max_batch, self._is_weighted = len(layout.features), max_batch, is_weighted
        self._is_fatal = bounds == "fatal"
        device = world.backend.device
        stacks = [_Stack(layout, group, device, algorithm, options) for group in layout.replicated]
        self._sums = torch.zeros(sum(stack.num_floats for stack in stacks), device=device)
        for stack, sums in zip(stacks, self._sums.split([stack.num_floats for stack in stacks]), strict=True):
            stack.take_sums(sums)
            stack.optimizer.gradient_scale = scale  # type: ignore[assignment]  # mypy knows one type for both
        self._stacks = stacks
        self.optimizers = [stack.optimizer for stack in stacks]
        tables = [table for stack in stacks for table in stack.tables.values()]
        states = [state for stack in stacks for number in stack.tables for state in stack.states(number)]
        self._changed = _BACKWARD.changed_inputs(tables=tables, states=states)
        self._changing = [*tables, *states]
        self._placeholder = torch.zeros(0, device=device, requires_grad=True)  # what autograd sees of the tables
        self._all_reduce()  # the PEs see to its room here, not in the first backward pass

    def table(self, number: int) -> torch.Tensor:
        """Return a table of the layout, `[R, D]`."""
        return self._stack_of(number).tables[number]

    def states(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return the optimizer's states of a table of the layout, as `EmbeddingOptimizer.state` does."""
        return self._stack_of(number).states(number)

    def _stack_of(self, number: int) -> _Stack:
        return next(stack for stack in self._stacks if number in stack.tables)

    def begin(self, given: Features) -> LocalBatch:
        """Have a batch's lookups counted, so that the host need not wait for that in `pool`.

        Raises:
            ValueError, TypeError: the lookups have another form.
        """
        device = self._world.backend.device
        check_features(given, self._num_features, self._max_batch, device, is_weighted=self._is_weighted)
        lengths = given.lengths.long()
        offsets = [stack.features.offsets(lengths) for stack in self._stacks]
        counts = None if self._world.workspace.is_capturing() else Counts(lengths, offsets)
        begun = Moment(device) if device.type == "cuda" else None
        return LocalBatch(given, lengths, offsets, counts, begun)

    def pool(self, batch: LocalBatch) -> list[torch.Tensor]:
        """Return the pooled rows of each group, `[B, sum of D]`; where gradients are recorded, backward is collective.

        Outside of CUDA graphs it waits until the batch has been counted. In them bad lookups are skipped.

        Raises:
            IndexError: a length or an index is bad, and bounds are "fatal"; an index on "cuda" with a later call.
        """
        batch.take_over()
        counts: list[int | None] = [None] * len(self._stacks)
        is_fatal = self._is_fatal and batch.counts is not None
        if batch.counts is not None:
            total, least, counts[:] = batch.counts.wait()
            if is_fatal and (least < 0 or total != batch.given.values.numel()):
                raise IndexError(
                    f"lengths: expected none below 0, and as many lookups as there are values, "
                    f"{batch.given.values.numel()}; got {least} as the least length and {total} lookups"
                )
        chosen = [
            stack.features.lookups(batch.given, batch.lengths, offsets, count)
            for stack, offsets, count in zip(self._stacks, batch.offsets, counts, strict=True)
        ]
        pooled: tuple[torch.Tensor, ...] = _Recorded.apply(  # type: ignore[no-untyped-call]
            self._placeholder, self, chosen, "fatal" if is_fatal else "ignore"
        )
        return list(pooled)

    def _pool(self, chosen: Sequence[LocalLookups], bounds: str) -> list[torch.Tensor]:
        return [
            pool_alone(stack.weights, *lookups, mode=stack.mode, bounds=bounds)
            for stack, lookups in zip(self._stacks, chosen, strict=True)
        ]

    def _all_reduce(self) -> None:
        with torch.no_grad():
            _ops.all_reduce(self._sums, out=self._sums)

    def _update(self, gradients: Sequence[torch.Tensor], chosen: Sequence[LocalLookups]) -> None:
        """Update all replicas; collective."""
        # Where the all-reduce is given up, another PE may have updated its replicas.
        _BACKWARD.begin_changes(_world.for_call(), self._changed, self._changing)
        for stack, gradient, lookups in zip(self._stacks, gradients, chosen, strict=True):
            stack.add_up(gradient, lookups)
        self._all_reduce()
        for stack in self._stacks:
            stack.update()


class _Stack:
    """The tables of a group, one above the other, so that one launch updates all as one table.

    Attributes:
        tables: by their numbers in the layout, over the same memory.
        weights, features: of each slot.
        mode: of pooling.
        optimizer: of all tables.
        num_floats: of their rows' sums and flags.
    """

    def __init__(
        self, layout: Layout, group: Group, device: torch.device, algorithm: str, options: Mapping[str, Any]
    ) -> None:
        self._slots = group.columns
        numbers = list(dict.fromkeys(slot.table for slot in self._slots))
        rows = [layout.configs[number].num_embeddings for number in numbers]
        self._memory = torch.empty(sum(rows), self._slots[0].width, dtype=group.dtype, device=device)
        self.tables: dict[int, torch.Tensor] = dict(zip(numbers, self._memory.split(rows), strict=True))
        self.weights = [self.tables[slot.table] for slot in self._slots]
        self.features = SlotFeatures([slot.feature for slot in self._slots], len(layout.features), device)
        self.mode = group.pooling
        self.optimizer = EmbeddingOptimizer([self._memory], algorithm, **options)
        self._states = [state.split(rows) for state in self.optimizer.state(self._memory)]
        self.num_floats = -(-dense_size(self.weights) // _ALIGNMENT) * _ALIGNMENT
        parts = _PARTS[group.dtype]
        self._rows = torch.arange(sum(rows), device=device)
        self._offsets = torch.arange(parts * sum(rows) + 1, device=device)

    def take_sums(self, memory: torch.Tensor) -> None:
        """Take the memory of `num_floats` in which gradients are added up."""
        rows, width = self._memory.shape
        self._found = memory[: dense_size(self.weights)]
        self._sums = memory[: rows * width].view(rows, width)
        self._touched = memory[rows * width : rows * (width + 1)]

    def states(self, number: int) -> tuple[torch.Tensor, ...]:
        at = list(self.tables).index(number)
        return tuple(of_tables[at] for of_tables in self._states)

    def add_up(self, gradient: torch.Tensor, lookups: LocalLookups) -> None:
        """Write this PE's sums."""
        indices, offsets, weights = lookups
        dense_gradients(gradient, self.weights, indices, offsets, weights, mode=self.mode, memory=self._found)

    def update(self) -> None:
        """Update the rows that have been touched by the sums of all PEs."""
        parts = _parts(self._sums, self._memory.dtype)
        indices = torch.where(self._touched > 0, self._rows, -1)
        self.optimizer.update_alone(torch.cat(parts), indices.repeat(len(parts)), self._offsets)


def _parts(sums: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors of a dtype whose sum, added up in float32, is `sums`."""
    parts = []
    for number in range(_PARTS[dtype]):
        parts.append(sums.to(dtype))
        if number + 1 < _PARTS[dtype]:
            sums = sums - parts[-1].float()
    return parts


class _Recorded(torch.autograd.Function):
    """A forward pass whose backward pass updates the tables."""

    @staticmethod
    def forward(
        context: Any, placeholder: torch.Tensor, tables: ReplicatedTables, chosen: Sequence[LocalLookups], bounds: str
    ) -> tuple[torch.Tensor, ...]:
        context.tables, context.is_done = tables, False
        context.save_for_backward(*(tensor for lookups in chosen for tensor in lookups))
        # Detached: a view that is made in here could not be changed in place.
        return tuple(each.detach() for each in tables._pool(chosen, bounds))

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        if context.is_done:
            raise RuntimeError(
                "a second backward pass of one forward pass would update the replicated tables twice; call the module "
                "again"
            )
        saved = context.saved_tensors
        context.is_done = True
        chosen = [LocalLookups(*saved[first : first + 3]) for first in range(0, len(saved), 3)]
        context.tables._update(gradients, chosen)
        return None, None, None, None
