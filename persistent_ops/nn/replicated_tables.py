"""Replicated embedding tables: looked up locally, updated by the sum of all PEs' gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..ops.all_reduce import add_up_gradients, all_reduce
from ..ops.embedding.ahead import GLOBAL_BATCH
from ..ops.embedding.all_to_all import pool_alone
from ..ops.embedding.backward import ModuleOptimizer, compile_training, tables_named, update_alone
from ..ops.embedding.backward_plan import OPERATOR as _BACKWARD
from ..ops.embedding.gradients import dense_gradients, dense_size
from ..runtime import world as _world
from ..runtime.call_numbers import CallNumbers
from ..runtime.stream_order import Moment
from ..runtime.uncompiled import uncompiled
from .embedding_features import Features
from .local_lookups import Finding, Findings, LocalLookups, SlotFeatures, counted_lengths, value_begins
from .table_layout import Group, Layout
from .table_rounding import rounding_of

__all__ = ["LocalBatch", "ReplicatedTables"]

_ALIGNMENT = 4  # of a group's sums, in floats
_PARTS = {torch.float32: 1, torch.bfloat16: 3}  # that hold a float32


class LocalBatch(NamedTuple):
    """This PE's lookups for replicated tables, on their way.

    Attributes:
        given: lookups of all features.
        chosen: lookups of each group.
        findings: of the check of these lookups; None in a CUDA-graph capture.
        weights: the given weights, if a backward pass is to give them a gradient; else None.
        begun: the place in a stream of the device where the work was launched; None on the host.
    """

    given: Features
    chosen: list[LocalLookups]
    findings: Findings | None
    weights: torch.Tensor | None = None
    begun: Moment | None = None

    def take_over(self) -> None:
        """Let the current stream read the batch; `ReplicatedTables.begin` may have run on another stream."""
        if self.begun is None:
            return
        self.begun.order_behind()
        current = torch.cuda.current_stream(self.begun.stream.device)
        if current != self.begun.stream:
            for tensor in itertools.chain(self.given, *self.chosen):
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
        lookups_per_sample: of each feature, by name: estimates, of which room for lookups comes.
        bounds: "fatal" or "ignore", of bad lookups.
        optimizer, options, rounding: of `EmbeddingOptimizer`; the rounding is for tables of 16 bits.
        scale: factor of the summed gradients.
        is_weighted: whether lookups have weights.

    Attributes:
        optimizers: one for each of the layout's replicated groups.
    """

    def __init__(
        self,
        world: _world.World,
        layout: Layout,
        max_batch: int,
        lookups_per_sample: Mapping[str, float],
        *,
        bounds: str,
        optimizer: str,
        options: Mapping[str, Any],
        rounding: str,
        scale: float,
        is_weighted: bool,
    ) -> None:
        self._world = world
        self._num_features = len(layout.features)
        self._is_fatal = bounds == "fatal"
        device = world.backend.device
        stacks = [
            _Stack(
                layout,
                group,
                max_batch,
                lookups_per_sample,
                device,
                optimizer,
                {**options, "rounding": rounding_of(group, rounding)},
            )
            for group in layout.replicated
        ]
        self._sums = torch.zeros(sum(stack.num_floats for stack in stacks), dtype=torch.float32, device=device)
        for stack, sums in zip(stacks, self._sums.split([stack.num_floats for stack in stacks]), strict=True):
            stack.take_sums(sums)
            stack.optimizer.gradient_scale = scale  # type: ignore[assignment]  # mypy knows one type for both
        for stack in stacks:
            stack.compile_ahead(world, is_weighted=is_weighted)
        self._stacks = stacks
        self.optimizers = [stack.optimizer for stack in stacks]
        tables = [table for stack in stacks for table in stack.tables.values()]
        states = [state for stack in stacks for number in stack.tables for state in stack.states(number)]
        self._changed = _BACKWARD.changed_inputs(tables=tables, states=states)
        self._changing = [*tables, *states]
        # The tables as autograd sees them.
        self._placeholder = torch.zeros(0, dtype=torch.float32, device=device, requires_grad=True)
        names = [config.name for number, config in enumerate(layout.configs) if layout.is_replicated(number)]
        name = world.workspace.calls.next_of("ReplicatedTables")
        world.workspace.changes.know(name, self._changed)
        self._caller = _new_caller(world, f"replicated {tables_named(names)}, {name}")  # of its forward passes
        self._num_recorded = 0  # forward passes
        add_up_gradients(self._sums, 0)  # the PEs see to its room here, not in the first backward pass

    def table(self, number: int) -> torch.Tensor:
        """Return a table of the layout, `[R, D]`."""
        return self._stack_of(number).tables[number]

    def states(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return the optimizer's states of a table of the layout, as `EmbeddingOptimizer.state` does."""
        return self._stack_of(number).states(number)

    def _stack_of(self, number: int) -> _Stack:
        return next(stack for stack in self._stacks if number in stack.tables)

    def take_first(self) -> None:
        """Give every PE the rows that PE 0 has; collective."""
        for stack in self._stacks:
            stack.take_first(self._world.rank)

    def begin(self, given: Features) -> LocalBatch:
        """Pick the lookups out of a batch's and have them looked at, so that the host need not wait long in `pool`.

        Args:
            given: of `checked_lookups`.
        """
        device, stacks = self._world.backend.device, self._stacks
        weights = given.weights if _require_gradient(given.weights) else None
        given = given if given.weights is None else given._replace(weights=given.weights.detach())
        counted = counted_lengths(given)
        chosen = [stack.features.lookups(given, counted, stack.room) for stack in stacks]
        findings = None
        if not self._world.workspace.is_capturing():
            limits = [stack.limits if self._is_fatal else None for stack in stacks]
            findings = Findings(given.lengths.long(), chosen, limits)
        return LocalBatch(given, chosen, findings, weights, Moment(device) if device.type == "cuda" else None)

    def pool(self, batch: LocalBatch) -> list[torch.Tensor]:
        """Return the pooled rows of each group, `[B, sum of D]`; where gradients are recorded, backward is collective.

        Outside of CUDA graphs it waits until the host knows what the batch is like, and makes more room where that is
        needed. In them bad lookups are skipped, and the result of lookups that find no room is NaN; these change no
        table.

        Raises:
            IndexError: a length or an index is bad, and bounds are "fatal".
        """
        if torch.is_grad_enabled():
            self._num_recorded += 1  # ahead of what this PE alone may raise
        batch.take_over()
        chosen = batch.chosen if batch.findings is None else self._looked_at(batch, batch.findings)
        if torch.is_grad_enabled():
            chosen = [lookups.for_backward() for lookups in chosen]
        begins = None if batch.weights is None else value_begins(batch.given, self._num_features)
        short: list[torch.Tensor] = []
        if batch.findings is None:
            short = [lookups.is_short() for lookups in chosen]
            chosen = [lookups.without_bags_if(is_short) for lookups, is_short in zip(chosen, short, strict=True)]
        return list(
            _Recorded.apply(self._placeholder, batch.weights, self, chosen, begins, short)  # type: ignore[no-untyped-call]
        )

    def _looked_at(self, batch: LocalBatch, findings: Findings) -> list[LocalLookups]:
        """Return the lookups, with room for all; raise for bad ones."""
        total, least, of_stacks = findings.wait()
        num_values = batch.given.values.numel()
        if self._is_fatal and (least < 0 or total != num_values):
            raise IndexError(
                f"lengths: expected lengths of at least 0 that sum to {num_values}, the number of values; got a "
                f"least length of {least} and a sum of {total}"
            )
        has_room = True
        for stack, found in zip(self._stacks, of_stacks, strict=True):
            stack.raise_bad(found)
            has_room &= stack.make_room(found, num_values)
        if has_room:
            return batch.chosen
        again = self.begin(batch.given)
        assert again.findings is not None
        return self._looked_at(again, again.findings)

    def _pool(self, chosen: Sequence[LocalLookups]) -> list[torch.Tensor]:
        return [
            pool_alone(stack.weights, *lookups, pooling=stack.pooling, bounds="ignore")
            for stack, lookups in zip(self._stacks, chosen, strict=True)
        ]

    def _versions(self) -> list[int]:
        return [table._version for stack in self._stacks for table in stack.tables.values()]

    def _update(
        self,
        gradients: Sequence[torch.Tensor],
        chosen: Sequence[LocalLookups],
        begins: torch.Tensor | None,
        count: int,
        number: int,
    ) -> torch.Tensor | None:
        """Update all replicas; collective.

        Args:
            gradients: of the pooled rows of each group.
            chosen: of the forward pass.
            begins: where each feature's values begin, where their weights are to have a gradient.
            count: values.
            number: of the forward pass, on this PE.

        Returns:
            The weights' gradient, group after group added up; None where `begins` is.
        """
        # If the all-reduce is given up, another PE may have updated its replicas.
        _BACKWARD.begin_changes(_world.for_call(), self._changed, self._changing)
        of_weights: torch.Tensor | None = None
        for stack, gradient, lookups in zip(self._stacks, gradients, chosen, strict=True):
            of_lookups = stack.add_up(gradient, lookups, wants_factors=begins is not None)
            if begins is not None and of_lookups is not None:
                of_values = stack.features.to_values(of_lookups, lookups.offsets, begins, count)
                of_weights = of_values if of_weights is None else of_weights + of_values
        # Forward passes are each PE's own, so that PEs count them differently where one tries something alone.
        calls_behind = self._num_recorded - number
        add_up_gradients(self._sums, CallNumbers.of_caller(self._caller, calls_behind))
        for stack in self._stacks:
            stack.update()
        return of_weights


def _new_caller(world: _world.World, name: str) -> int:
    """Let there be a caller of `CallNumbers`, the same on all PEs; collective, where they have met."""
    calls = world.workspace.calls
    told = world.bootstrap.exchange("replicated-tables", str(calls.last_caller).encode())
    caller = max(map(int, told)) + 1
    calls.add_caller(caller, name)
    return caller


class _Stack:
    """The tables of a group, one above the other, so that one launch updates all as one table.

    Attributes:
        tables: by their numbers in the layout, over the same memory.
        weights, features, names, limits: of each slot: its table, its feature and the name of that, its table's rows.
        room: for lookups that are picked out of a batch's.
        pooling: of the tables.
        optimizer: of all tables.
        num_floats: of their rows' sums and flags.
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
        max_batch: int,
        lookups_per_sample: Mapping[str, float],
        device: torch.device,
        optimizer: str,
        options: Mapping[str, Any],
    ) -> None:
        self._slots = group.columns
        numbers = list(dict.fromkeys(slot.table for slot in self._slots))
        rows = [layout.configs[number].num_embeddings for number in numbers]
        self._memory = torch.empty(sum(rows), self._slots[0].width, dtype=group.dtype, device=device)
        self.tables: dict[int, torch.Tensor] = dict(zip(numbers, self._memory.split(rows), strict=True))
        self.weights = [self.tables[slot.table] for slot in self._slots]
        self.names = [layout.features[slot.feature] for slot in self._slots]
        self.features = SlotFeatures([slot.feature for slot in self._slots], len(layout.features), device)
        self.limits = torch.tensor([weight.shape[0] for weight in self.weights], dtype=torch.int64, device=device)
        self.room = max(1, math.ceil(max_batch * sum(lookups_per_sample[name] for name in self.names)))
        self.pooling = group.pooling
        self.optimizer = ModuleOptimizer([self._memory], optimizer, **options)
        self._states = [state.split(rows) for state in self.optimizer.state(self._memory)]
        self.num_floats = -(-dense_size(self.weights) // _ALIGNMENT) * _ALIGNMENT
        parts = _PARTS[group.dtype]
        self._rows = torch.arange(sum(rows), device=device)
        self._offsets = torch.arange(parts * sum(rows) + 1, device=device)

    def compile_ahead(self, world: _world.World, *, is_weighted: bool) -> None:
        """Begin to compile the kernels of `pool_alone`, `dense_gradients` and `update_alone`."""
        lookups = GLOBAL_BATCH._replace(is_weighted=is_weighted)
        compile_training(world, self.weights, None, lookups, self.room, team=world.alone, pooling=self.pooling)
        rows = len(self._offsets) - 1
        compile_training(world, [self._memory], self.optimizer, GLOBAL_BATCH, rows, team=world.alone)

    def take_first(self, rank: int) -> None:
        """Give every PE the rows that PE 0 has; collective."""
        if rank != 0:
            self._memory.fill_(-0.0)  # of all numbers the one that changes none that is added to it
        all_reduce(self._memory, out=self._memory)

    def take_sums(self, memory: torch.Tensor) -> None:
        """Take the memory of `num_floats` in which gradients are added up."""
        rows, width = self._memory.shape
        self._found = memory[: dense_size(self.weights)]
        self._sums = memory[: rows * width].view(rows, width)
        self._touched = memory[rows * width : rows * (width + 1)]

    def states(self, number: int) -> tuple[torch.Tensor, ...]:
        at = list(self.tables).index(number)
        return tuple(of_tables[at] for of_tables in self._states)

    def raise_bad(self, found: Finding) -> None:
        """Raise IndexError if there is a bad index."""
        if found.slot >= 0:
            rows = self.weights[found.slot].shape[0]
            raise IndexError(
                f"values: a lookup of feature {self.names[found.slot]!r} has index {found.row}, but the table has "
                f"{rows} rows (valid: 0 to {rows - 1})"
            )

    def make_room(self, found: Finding, num_values: int) -> bool:
        """Make room for so many lookups, of a batch with so many values; return whether there was room."""
        needed = min(found.lookups, num_values * self.features.most)
        has_room = self.features.is_all or needed <= self.room
        if not has_room:
            self.room = needed * 5 // 4
        return has_room

    def add_up(self, gradient: torch.Tensor, lookups: LocalLookups, *, wants_factors: bool) -> torch.Tensor | None:
        """Write this PE's sums; return the gradient of the lookups' weights, if it is wanted."""
        indices, offsets, weights = lookups
        return dense_gradients(
            gradient,
            self.weights,
            indices,
            offsets,
            weights,
            pooling=self.pooling,
            memory=self._found,
            wants_factors=wants_factors,
        ).factors

    def update(self) -> None:
        """Update the rows that have been touched by the sums of all PEs."""
        parts = _parts(self._sums, self._memory.dtype)
        indices = torch.where(self._touched > 0, self._rows, -1)
        update_alone(self.optimizer, torch.cat(parts), indices.repeat(len(parts)), self._offsets)


def _parts(sums: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors of a dtype whose sum, added up in float32, is `sums`."""
    if dtype == sums.dtype:
        return [sums]
    largest, is_finite = torch.finfo(dtype).max, sums.isfinite()
    parts = [sums.clamp(-largest, largest).where(is_finite, sums).to(dtype)]  # no finite sum becomes infinite
    rest = sums.where(is_finite, 0.0)
    while len(parts) < _PARTS[dtype]:
        rest = rest - parts[-1].float().where(is_finite, 0.0)
        parts.append(rest.to(dtype))
    return parts


class _Recorded(torch.autograd.Function):
    """A forward pass whose backward pass updates the tables."""

    @staticmethod
    def forward(
        context: Any,
        placeholder: torch.Tensor,
        weights: torch.Tensor | None,
        tables: ReplicatedTables,
        chosen: Sequence[LocalLookups],
        begins: torch.Tensor | None,
        short: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        context.tables, context.number, context.is_done = tables, tables._num_recorded, False
        context.begins, context.num_values = begins, 0 if weights is None else weights.numel()
        context.versions = tables._versions()
        context.save_for_backward(*(tensor for lookups in chosen for tensor in lookups))
        pooled = tables._pool(chosen)
        for each, is_short in zip(pooled, short, strict=False):
            each.masked_fill_(is_short, math.nan)
        # Detached: a view that is made in here could not be changed in place.
        return tuple(each.detach() for each in pooled)

    @staticmethod
    @uncompiled
    @once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if context.is_done:
            raise RuntimeError(
                "backward: a second backward pass of one forward pass would update the replicated tables twice; "
                "call the module again"
            )
        if _world.for_call() is not context.tables._world:
            raise RuntimeError(
                "the replicated tables: the forward pass of this backward pass ran before po.finalize(); run the "
                "forward pass again"
            )
        saved = context.saved_tensors
        if context.begins is not None and context.versions != context.tables._versions():
            raise RuntimeError(
                "the replicated tables have changed since the forward pass, so the gradient of per_sample_weights "
                "cannot be computed; make the backward pass first, one for each call"
            )
        context.is_done = True
        chosen = [LocalLookups(*saved[first : first + 3]) for first in range(0, len(saved), 3)]
        of_weights = context.tables._update(gradients, chosen, context.begins, context.num_values, context.number)
        return None, of_weights, None, None, None, None


def _require_gradient(weights: torch.Tensor | None) -> bool:
    return weights is not None and weights.requires_grad and torch.is_grad_enabled()
