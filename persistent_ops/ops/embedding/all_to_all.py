"""Fused embedding pooling + All-to-All."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...runtime import world as _world
from ...runtime.plain_call import is_watched, require_plain, require_plain_list
from ...runtime.plans import Plans
from ...runtime.team import Team
from ...runtime.torch_library import TorchOperator
from ...runtime.torch_private import num_dispatch_modes
from ...runtime.uncompiled import uncompiled
from .backward import EmbeddingOptimizer, record_update, refuse_half_updated
from .checks import POOLINGS, SCHEDULES, check_tables_and_split, check_types
from .gradients import record_sparse
from .lookups import Lookups
from .plan import OPERATOR, Choices, EmbeddingKey, EmbeddingPlan, LookupKind, average_lookups_per_bag
from .recorded_call import EmbeddingCall
from .split import completed, dims_at_compile_time, exchange_dims, table_sets

__all__ = ["embedding_all_to_all", "pool_alone", "reference"]

_NUM_CHOICES = 8  # from dim_per_rank to columns


def embedding_all_to_all(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor | Lookups,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
    *,
    pooling: str = "sum",
    out: torch.Tensor | None = None,
    batch_per_rank: Sequence[int] | None = None,
    dim_per_rank: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    bounds: str = "fatal",
    schedule: str = "communication_aware",
    columns: Sequence[int] | None = None,
    optimizer: EmbeddingOptimizer | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Pool the bags of this PE's tables and send every PE the rows of its part of the batch, in one kernel.

    Row b of PE r's result is ``cat over all PEs, over their tables t, of pool(weights_t[bag (t, start_r + b)])``, where
    start_r is the first sample of PE r, or has these columns in the order of `columns`: ready for an interaction layer,
    with no reorder. Sums are in fp32, in the order of the indices, and rounded once, to nearest: the same bits on every
    run, world size and schedule. A mean is the fp32 sum times fp32's nearest number to 1 / n, rounded to fp32, and then
    to the result's dtype.

    Args:
        weights: this PE's T tables, each `[R_t, D_t]`, contiguous, all of one dtype (float32, float16 or bfloat16), the
            same on every PE; in a list, tuple or `nn.ParameterList`. T may be 0, and differ from PE to PE as R and D
            may; a tensor may occur twice.
        indices: `[n]`, int32 or int64: the lookups of the *global* batch in this PE's tables, bag after bag. Or the
            `Lookups` that `EmbeddingInputs.exchange` has returned, after `wait` and before `release`, from slots that
            are these tables: they are read where they have arrived, and offsets, per_sample_weights and batch_per_rank
            come with them; `bounds` is that of the exchange. The gradient of their per_sample_weights travels to the PE
            that passed them to `exchange`.
        offsets: `[T * B + 1]`, int32 or int64, feature-major: bag (t, b) of the global batch B is
            indices[offsets[t * B + b] : offsets[t * B + b + 1]]. An empty bag gives zeros.
        per_sample_weights: `[n]`, float32, one for each lookup's row; with pooling "sum" only.
        pooling: "sum", or "mean" (over the entries that are not skipped).
        out: `[batch_per_rank[rank], sum of dim_per_rank]` in the symmetric heap (`po.empty`) to write instead; it
            begins at a multiple of 16 bytes, and overlaps nothing that is read.
        batch_per_rank: samples that each PE receives, in rank order; None for B // world_size each and one more on the
            first B % world_size. A PE whose T is 0 must give it, since it cannot tell the batch from `offsets`.
        dim_per_rank: sum of D over each PE's tables, in rank order. None: the PEs agree on it, through an exchange on
            the host, the first time that they meet these tables; every PE must then pass None, new tables must be new
            on all PEs, and none may have T = 0.
        dtype: of the tables; None takes it from them, or float32 where T is 0.
        wire_dtype: of pooled rows on their way and in the result, and of the gradients that come back: the tables' (as
            None says), or bfloat16 where that is float32. That halves the bytes between PEs; each element, this PE's
            own samples included, differs from the fp32 sum by at most 2^-8 of it. Gradients are added up, and tables
            and states updated, in fp32. The same on every PE.
        bounds: "fatal" raises IndexError for an index outside its table, or offsets that do not begin at 0, fall, or do
            not end at n, on the PE that passed it, while the exchange completes (such entries are skipped); "ignore"
            skips silently. Which entries the bags around an offset that falls have is not defined, and may differ
            between result, gradient and worlds; nothing outside of the tables is read or written.
        schedule: "communication_aware", or "oblivious", the order of the logical grid, for comparison.
        columns: where the columns of each table begin in the result, of all PEs' tables, PE by PE, each one's in its
            order; the same on every PE. Together they fill a row, so that a table's columns end where the next ones
            begin. Rows are written there, and gradients read. None: side by side in this very order.
        optimizer: of these tables: the backward pass through the result updates them (`EmbeddingOptimizer`), and gives
            per_sample_weights their gradient where they require one; torch.compile breaks its graph around such a call.
            Ignored where gradients are not recorded. None: tables that require a gradient get a sparse one, see below.
        requires_grad: without optimizer, whether the result requires a gradient though no table and no
            per_sample_weights of this PE do. All PEs take part in a backward pass, or none: one whose T is 0, or whose
            tables require no gradient, must say so here where others' do.

    Returns:
        `[batch_per_rank[rank], sum of dim_per_rank]` on this PE's device, of the wire's dtype. Without `out` it is a
        buffer of a pool in the symmetric heap: it stays unchanged while any tensor shares it, and its memory is used
        again afterwards; there is no copy. Results that are held therefore count against `heap_size`. A buffer handed
        out during a CUDA-graph capture is written by every replay and stays with the graph until `po.finalize()`.

    Without an optimizer, a table's gradient is coalesced COO, `[R, D]`, of its dtype: the sorted rows that bags have
    and their summed gradients over the global batch, in fp32 in the fixed order of `EmbeddingOptimizer`'s, rounded
    once. Of a tensor that occurs twice there is one, the sum of both. Any optimizer of torch's takes it (SGD,
    SparseAdam, Adagrad). This backward pass waits on the host; it is collective, the same as with an optimizer, and the
    first one for new tables, or every one where T is 0 on some PE, lets the PEs agree on the host: tables must be new
    on all PEs that have some. A second backward pass of one forward pass changes nothing of tables, so it is allowed as
    torch allows it: under `retain_graph=True`, on all PEs.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device, layout or overlap; before anything is launched.
        NotSymmetricError: `out` is not in this PE's symmetric heap.
        SymmetricHeapError: no room for the result.
        IndexError: see `bounds`. On "cuda" it comes with the next operator or `po.check()`, since the launch is
            asynchronous.
        PeerTimeoutError, ContractMismatchError: a peer did not answer, or launched something else, or makes the
            backward passes of several calls in another order; the same.
        NotImplementedError: `out` where gradients are recorded; in a backward pass of what torch.compile or
            torch.ops have called without `optimizer`; with `Lookups`, inside of torch.compile without `optimizer`.
        RuntimeError: `Lookups` that have been released, here or by the backward pass, or not been waited for; a
            backward pass without `optimizer` in a CUDA-graph capture.

    Collective, on the current stream; may be captured in a CUDA graph after one eager call with the same shapes.
    Source: fused embedding + All-to-All of "Optimizing Distributed ML Communication with Fused Computation-Collective
    Operations" (SC24), sections III-A and III-B.
    """
    if offsets is not None and optimizer is None and not (requires_grad or torch.compiler.is_compiling()):
        choices_of_call: tuple[Any, ...]
        choices_of_call = (dim_per_rank, batch_per_rank, dtype, wire_dtype, pooling, bounds, schedule, columns)
        pooled = _as_before(weights, indices, offsets, per_sample_weights, out, choices_of_call)
        if pooled is not None:
            return pooled
    if isinstance(weights, torch.nn.ParameterList):
        weights = list(weights)
    if isinstance(indices, Lookups):
        indices.check_is_of(weights, offsets, per_sample_weights, batch_per_rank)
        batch_per_rank = indices.batch_per_rank
    elif offsets is None:
        raise TypeError(
            "offsets: expected [T * B + 1], int32 or int64, got None, which goes with Lookups of po.EmbeddingInputs "
            "alone; of indices [B, L] of a table they are torch.arange(0, B * L + 1, L), beside indices.flatten()"
        )
    differentiated = indices.per_sample_weights if isinstance(indices, Lookups) else per_sample_weights
    if optimizer is not None and not isinstance(optimizer, EmbeddingOptimizer):
        raise TypeError(f"optimizer: expected a po.EmbeddingOptimizer, got {optimizer!r}")
    records = torch.is_grad_enabled()
    may_record = records and _may_record()
    is_required = _require_gradients(weights, differentiated) if may_record else None
    choices_of_call = (dim_per_rank, batch_per_rank, dtype, wire_dtype, pooling, bounds, schedule, columns)
    if (may_record and (is_required or requires_grad)) or (records and optimizer is not None):
        record = _recorded if may_record or not torch.compiler.is_compiling() else _recorded_behind_a_break
        return record(weights, indices, offsets, per_sample_weights, out, choices_of_call, optimizer)
    if optimizer is not None and not torch.compiler.is_compiling():
        refuse_half_updated(optimizer, _world.current())
    tables = () if is_required is False else weights  # whose gradients are asked for
    return _unrecorded(weights, indices, offsets, per_sample_weights, out=out, choices=choices_of_call, tables=tables)


def _recorded(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor | Lookups,
    offsets: torch.Tensor | None,
    per_sample_weights: torch.Tensor | None,
    out: torch.Tensor | None,
    choices: tuple[Any, ...],
    optimizer: EmbeddingOptimizer | None,
) -> torch.Tensor:
    """Make a call that has a backward pass."""
    if optimizer is not None and not torch.compiler.is_compiling():
        refuse_half_updated(optimizer, _world.current())
    is_direct = _may_record() and not is_watched()
    given: tuple[Any, ...] = ()
    if isinstance(indices, Lookups):
        arrived, named = indices, {"per_sample_weights": indices.per_sample_weights}
    else:
        arrived, given = None, (indices, offsets, per_sample_weights)
        named = {"indices": indices, "offsets": offsets, "per_sample_weights": per_sample_weights}
        is_direct = is_direct and bool(_operator.is_plain((indices, offsets), (per_sample_weights,)))
    if not is_direct:
        require_plain_list("weights", weights)
        require_plain({name: each for name, each in named.items() if each is not None}, may_be_fake=True)
    if out is not None:
        raise NotImplementedError("out: cannot be given where gradients are recorded")
    world = _world.for_call()
    kind = LookupKind.of_batch(*given) if arrived is None else _kind_of_arrived(weights, arrived)
    key = _key(world, world.team, weights, kind, *choices)
    # The backward pass reads what it was called with, also where the caller's lists are filled again meanwhile.
    weights = tuple(weights)
    launch: Callable[..., torch.Tensor]
    if not is_direct:  # what a mode or a compiler is to see
        first = () if arrived is None else (arrived, None, None)
        launch = functools.partial(_unrecorded, weights, *first, out=None, choices=choices, tables=weights)
    elif arrived is None:
        launch = functools.partial(_launched, world, _plans(world), key, weights)
    else:
        launch = functools.partial(_launched_from, world, key, weights, arrived.sources)
    call = EmbeddingCall(world, key, weights, arrived)
    return record_sparse(call, launch, *given) if optimizer is None else record_update(optimizer, call, launch, *given)


_recorded_behind_a_break = uncompiled(_recorded)


def _unrecorded(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor | Lookups,
    offsets: torch.Tensor | None,
    per_sample_weights: torch.Tensor | None,
    *,
    out: torch.Tensor | None,
    choices: tuple[Any, ...],
    tables: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Make a call without a backward pass; `tables`: whose gradients are asked for."""
    result: torch.Tensor
    if isinstance(indices, Lookups):
        kind = _kind_of_arrived(weights, indices)
        of_kind = (kind.index_dtype, kind.is_weighted, kind.lookups_per_bag, kind.num_beside)
        arguments = (weights, indices.sources, *of_kind, *choices)
        result = _operator_from_sources(arguments, {"out": out}, (indices.sources,), (out,), tables)
    else:
        assert offsets is not None
        arguments = (weights, indices, offsets, per_sample_weights, *choices)
        result = _operator(arguments, {"out": out}, (indices, offsets), (per_sample_weights, out), tables)
    return result


def _kind_of_arrived(weights: Sequence[torch.Tensor], lookups: Lookups) -> LookupKind:
    num_bags = len(weights) * sum(lookups.batch_per_rank or ())
    lookups_per_bag = average_lookups_per_bag(lookups.capacity, num_bags)
    return LookupKind(
        lookups.index_dtype, torch.int32, num_bags + 1, lookups.is_weighted, lookups_per_bag, True, lookups.num_beside
    )


def _as_before(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor | Lookups,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    out: torch.Tensor | None,
    choices: tuple[Any, ...],
) -> torch.Tensor | None:
    """Make a call that only the kernel wants to see, where one like it has been made; return None elsewhere.

    It is a shorter way to the same plan: most calls are of known tables for which no gradient is recorded, and differ
    from an earlier one in their lookups alone.
    """
    if not (isinstance(weights, (list, tuple)) and _operator.is_plain((indices, offsets), (per_sample_weights, out))):
        return None
    assert isinstance(indices, torch.Tensor)  # as are all of a plain call
    world = _world.admitted()
    if world is None:
        return None
    state = OPERATOR.state(world)
    tables = None if state.own is None else state.own.find_unchanged(weights)
    if tables is None:
        return None
    dims, batches, columns = choices[0], choices[1], choices[-1]
    if not (dims is None and batches is None and columns is None):
        numbers = dims, batches, columns
        if not all(each is None or isinstance(each, (list, tuple)) for each in numbers):
            return None
        dims, batches, columns = (None if each is None else tuple(each) for each in numbers)
        choices = dims, batches, *choices[2:-1], columns
    num_offsets = offsets.numel()
    lookups_per_bag = average_lookups_per_bag(indices.numel(), num_offsets - 1)
    call = indices.dtype, offsets.dtype, num_offsets, per_sample_weights is None, lookups_per_bag, choices
    try:
        known = tables.calls.get(call)
    except TypeError:  # of what is not what it should be
        return None
    if known is None:
        kind = LookupKind.of_batch(indices, offsets, per_sample_weights)
        known = tables.keep_call(call, (Choices.of(weights, *choices), kind))
    key = EmbeddingKey(world.team, tables, state.tuning, *known)
    return _launched(world, state.plans, key, weights, indices, offsets, per_sample_weights, out)


def _may_record() -> bool:
    """Return whether a call's backward pass may be the package's: no compiler or mode stands between."""
    return not (torch.compiler.is_compiling() or num_dispatch_modes())


def _require_gradients(weights: Sequence[torch.Tensor], per_sample_weights: torch.Tensor | None) -> bool | None:
    """Return whether one of the tensors does; None where one is no tensor, which the operator refuses."""
    try:
        for table in weights:
            if table.requires_grad:
                return True
        return per_sample_weights is not None and per_sample_weights.requires_grad
    except (AttributeError, TypeError):
        return None


def pool_alone(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None = None,
    *,
    pooling: str = "sum",
    bounds: str = "fatal",
) -> torch.Tensor:
    """Pool the bags of samples that are all this PE's own, on this PE alone.

    Row b is ``cat over t of pool(weights_t[bag (t, b)])``. No gradient is recorded.

    Args:
        weights: T tables `[R_t, D_t]`, at least one, as for `embedding_all_to_all`.
        indices: `[n]`, int32 or int64.
        offsets: `[T * B + 1]`, int32 or int64, feature-major.
        per_sample_weights: `[n]`, float32, one for each lookup's row; with pooling "sum" only.
        pooling: "sum" or "mean".
        bounds: as of `embedding_all_to_all`; with "ignore" the last offset may come before the last index.

    Returns:
        `[B, sum of D]`, as of `embedding_all_to_all`.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or layout.
        SymmetricHeapError: no room for the result.
        IndexError: see `bounds`.

    Not collective, on the current stream; may be captured in a CUDA graph after one eager call with the same shapes.
    """
    world = _world.for_call()
    kind = LookupKind.of_batch(indices, offsets, per_sample_weights)
    dims, batch = sum(weight.shape[1] for weight in weights), (offsets.numel() - 1) // len(weights)
    key = _key(world, world.alone, weights, kind, (dims,), (batch,), None, None, pooling, bounds, SCHEDULES[0])
    return _launched(world, _plans(world), key, weights, indices, offsets, per_sample_weights)


def _complete(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    dim_per_rank: Sequence[int] | None,
    batch_per_rank: Sequence[int] | None,
    dtype: torch.dtype | None,
    wire_dtype: torch.dtype | None,
    *choices: Any,
) -> tuple[Any, ...]:
    """Fill in what the dispatcher is to see."""
    world = _world.current()
    if dim_per_rank is None and torch.compiler.is_compiling():
        dim_per_rank = dims_at_compile_time(*weights)
    elif dim_per_rank is None and num_dispatch_modes():
        dim_per_rank = exchange_dims(world, sum(weight.shape[1] for weight in weights))  # fake tables
    of_call = completed(world, weights, offsets.numel(), dim_per_rank, batch_per_rank, dtype, wire_dtype)
    return (weights, indices, offsets, per_sample_weights, *of_call, *choices, world.rank)


# ---- launch --------------------------------------------------------------------------------------------------------


def _run(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    *choices: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Find or make the plan, launch it, return the result."""
    world = _world.for_call()
    kind = LookupKind.of_batch(indices, offsets, per_sample_weights)
    key = _key(world, world.team, weights, kind, *choices[:_NUM_CHOICES])
    return _launched(world, _plans(world), key, weights, indices, offsets, per_sample_weights, out)


def _launched(
    world: _world.World,
    plans: Plans[EmbeddingPlan],
    key: EmbeddingKey,
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Find or make the plan, check what may change from call to call, launch, return the result."""

    def build() -> EmbeddingPlan:
        check_types(weights, indices, offsets, per_sample_weights, *key.choices, out=out)
        return _new_plan(world, key, weights)

    plan = plans.get(key, build)
    world.workspace.changes.check("weights", weights)
    plan.check_lookups(indices, offsets, per_sample_weights)
    if out is not None:
        lookups = {"indices": indices, "offsets": offsets, "per_sample_weights": per_sample_weights}
        plan.check_output(out, weights, lookups)
        plan.launch(world, indices, offsets, per_sample_weights, _place_of(world, out))
        return out
    slot = world.outputs.take(plan.output_bytes, world.backend.stream(), is_captured=world.workspace.is_capturing())
    plan.launch(world, indices, offsets, per_sample_weights, slot.offset)
    return slot.tensor(plan.dtype, plan.output_shape)


def _run_from_sources(
    weights: Sequence[torch.Tensor],
    sources: torch.Tensor,
    index_dtype: torch.dtype,
    is_weighted: bool,
    lookups_per_bag: int,
    num_beside: int,
    dim_per_rank: Sequence[int] | None,
    batch_per_rank: Sequence[int],
    *choices: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same for lookups that are where an input exchange has left them, which has checked them."""
    world = _world.for_call()
    num_offsets = len(weights) * sum(batch_per_rank) + 1
    kind = LookupKind(index_dtype, torch.int32, num_offsets, is_weighted, lookups_per_bag, True, num_beside)
    key = _key(world, world.team, weights, kind, dim_per_rank, batch_per_rank, *choices[: _NUM_CHOICES - 2])
    return _launched_from(world, key, weights, sources, out)


def _launched_from(
    world: _world.World,
    key: EmbeddingKey,
    weights: Sequence[torch.Tensor],
    sources: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:

    def build() -> EmbeddingPlan:
        check_tables_and_split(weights, *key.choices, out=out)
        return _new_plan(world, key, weights)

    plan = _plans(world).get(key, build)
    world.workspace.changes.check("weights", weights)
    if out is not None:
        plan.check_output(out, weights, {})
        plan.launch_from(world, sources, _place_of(world, out))
        return out
    slot = world.outputs.take(plan.output_bytes, world.backend.stream(), is_captured=world.workspace.is_capturing())
    plan.launch_from(world, sources, slot.offset)
    return slot.tensor(plan.dtype, plan.output_shape)


def _key(
    world: _world.World, team: Team, weights: Sequence[torch.Tensor], lookups: LookupKind, *choices: Any
) -> EmbeddingKey:
    """Return the key of a call's plan; `choices`: see `Choices`."""
    state = OPERATOR.state(world)
    tables = (state.own or table_sets(world)).find(weights)
    return EmbeddingKey(team, tables, state.tuning, Choices.of(weights, *choices), lookups)


def _plans(world: _world.World) -> Plans[EmbeddingPlan]:
    plans: Plans[EmbeddingPlan] = OPERATOR.state(world).plans
    return plans


def _new_plan(world: _world.World, key: EmbeddingKey, weights: Sequence[torch.Tensor]) -> EmbeddingPlan:
    dim_per_rank, batch_per_rank, *_ = completed(world, weights, key.lookups.num_offsets, *key.choices[:4])
    return EmbeddingPlan(world, key, weights, dim_per_rank, batch_per_rank)


def _place_of(world: _world.World, out: torch.Tensor) -> int:
    """Return where in the heap a tensor is, which is written now."""
    offset = world.heap.offset_of(out, "out")
    increment_version(out)
    return offset


# ---- torch operator ------------------------------------------------------------------------------------------------


def _fake(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    dim_per_rank: Sequence[int],
    batch_per_rank: Sequence[int],
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    pooling: str,
    bounds: str,
    schedule: str,
    columns: Sequence[int] | None = None,
    rank: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if pooling not in POOLINGS or schedule not in SCHEDULES:
        raise ValueError(
            f"pooling: expected one of {POOLINGS}, got {pooling!r}; schedule: one of {SCHEDULES}, got {schedule!r}"
        )
    rows = batch_per_rank[_world.current().rank if rank is None else rank]
    return indices.new_empty((rows, sum(dim_per_rank)), dtype=wire_dtype)


def _fake_from_sources(
    weights: Sequence[torch.Tensor],
    sources: torch.Tensor,
    index_dtype: torch.dtype,
    is_weighted: bool,
    lookups_per_bag: int,
    num_beside: int,
    dim_per_rank: Sequence[int],
    batch_per_rank: Sequence[int],
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    pooling: str,
    bounds: str,
    schedule: str,
    columns: Sequence[int] | None = None,
    rank: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    split_and_choices = (dim_per_rank, batch_per_rank, dtype, wire_dtype, pooling, bounds, schedule, columns)
    return _fake(weights, sources, sources, None, *split_and_choices, rank, out)


def _check_from_sources(
    weights: Sequence[torch.Tensor],
    sources: torch.Tensor,
    index_dtype: torch.dtype,
    is_weighted: bool,
    lookups_per_bag: int,
    num_beside: int,
    dim_per_rank: Sequence[int] | None,
    batch_per_rank: Sequence[int] | None,
    *others: object,
    out: torch.Tensor | None,
) -> None:
    check_tables_and_split(weights, dim_per_rank, batch_per_rank, *others, out=out)


def _complete_from_sources(
    weights: Sequence[torch.Tensor],
    sources: torch.Tensor,
    index_dtype: torch.dtype,
    is_weighted: bool,
    lookups_per_bag: int,
    num_beside: int,
    *split_and_choices: Any,
) -> tuple[Any, ...]:
    completed = _complete(weights, sources, sources, None, *split_and_choices)
    return (weights, sources, index_dtype, is_weighted, lookups_per_bag, num_beside, *completed[4:])


_NO_GRADIENT = (
    "embedding_all_to_all has a backward pass as a plain call of po.embedding_all_to_all alone, not inside of "
    "torch.compile or through torch.ops: call it outside, with or without "
    "optimizer=po.EmbeddingOptimizer(...), or under torch.no_grad(), or use embedding_bag + all_to_all_single"
)
# The rank is there for compilers, which keep graphs on disk: a PE must not take the graph of one with other samples.
_SPLIT_AND_CHOICES = (
    "SymInt[] dim_per_rank, SymInt[] batch_per_rank, ScalarType dtype, ScalarType wire_dtype, str pooling, str bounds, "
    "str schedule, SymInt[]? columns=None, int? rank=None"
)
_operator = TorchOperator(
    "embedding_all_to_all",
    f"Tensor[] weights, Tensor indices, Tensor offsets, Tensor? per_sample_weights, {_SPLIT_AND_CHOICES}",
    _run,
    check_types,
    complete=_complete,
    fake=_fake,
    outputs=("out",),
    no_gradient=_NO_GRADIENT,
    result_in_heap=True,
)
_operator_from_sources = TorchOperator(
    "embedding_all_to_all_from_sources",
    "Tensor[] weights, Tensor sources, ScalarType index_dtype, bool is_weighted, SymInt lookups_per_bag, "
    f"SymInt num_beside, {_SPLIT_AND_CHOICES}",
    _run_from_sources,
    _check_from_sources,
    complete=_complete_from_sources,
    fake=_fake_from_sources,
    outputs=("out",),
    no_gradient=_NO_GRADIENT,
    result_in_heap=True,
)


# ---- reference -----------------------------------------------------------------------------------------------------


def reference(
    inputs: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor | None]],
    rank: int,
    batch_per_rank: Sequence[int],
    pooling: str = "sum",
) -> torch.Tensor:
    """Compute PE `rank`'s result in fp64 on the CPU, from every PE's (weights, indices, offsets, per_sample_weights).

    Returns:
        `[batch_per_rank[rank], sum of D]`, float64, not rounded.
    """
    batch = sum(batch_per_rank)
    first = sum(batch_per_rank[:rank])
    columns = []
    for weights, indices, offsets, per_sample_weights in inputs:
        for t, weight in enumerate(weights):
            table = weight.detach().cpu().double()
            bounds = offsets[t * batch + first : t * batch + first + batch_per_rank[rank] + 1].cpu().long()
            low, high = int(bounds[0]), int(bounds[-1])
            factors = None if per_sample_weights is None else per_sample_weights[low:high].cpu().double()
            columns.append(
                torch.nn.functional.embedding_bag(
                    indices[low:high].cpu().long(),
                    table,
                    bounds - low,
                    mode=pooling,
                    per_sample_weights=factors,
                    include_last_offset=True,
                )
            )
    if not columns:
        return torch.zeros(batch_per_rank[rank], 0, dtype=torch.float64, device="cpu")
    return torch.cat(columns, dim=1)
