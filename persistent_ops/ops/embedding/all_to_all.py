"""Fused embedding pooling + All-to-All."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...runtime import world as _world
from ...runtime.plain_call import require_plain, require_plain_list
from ...runtime.plans import Plans
from ...runtime.team import Team
from ...runtime.torch_library import TorchOperator
from ...runtime.torch_private import num_dispatch_modes
from ...runtime.uncompiled import uncompiled
from .ahead import compile_backward
from .backward import EmbeddingOptimizer, record_update, refuse_half_updated, step_of
from .backward_plan import Step
from .checks import POOLINGS, SCHEDULES, check_types
from .gradients import record_sparse
from .lookups import Lookups
from .plan import OPERATOR, Choices, EmbeddingKey, EmbeddingPlan, LookupKind, OfBatch, OfSources
from .recorded_call import EmbeddingCall
from .split import completed, dims_at_compile_time, exchange_dims, table_sets

__all__ = ["embedding_all_to_all", "pool_alone", "reference"]

# Makes an OfBatch in a third of the time of its own constructor.
_new_of_batch: Callable[[tuple[Any, ...]], OfBatch] = functools.partial(tuple.__new__, OfBatch)
_NO_OUT = "out: cannot be given where gradients are recorded. Call under torch.no_grad()."
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
            come with them; `bounds` is the exchange's. The gradient of their per_sample_weights travels to the PE
            that passed them to `exchange`.
        offsets: `[T * B + 1]`, int32 or int64, feature-major: bag (t, b) of the global batch B is
            indices[offsets[t * B + b] : offsets[t * B + b + 1]]. An empty bag gives zeros.
        per_sample_weights: `[n]`, float32, one for each lookup's row; with pooling "sum" only.
        pooling: "sum", or "mean" (over the entries that are not skipped).
        out: `[batch_per_rank[rank], sum of dim_per_rank]` in the symmetric heap (`po.empty`) to write instead; it
            begins at a multiple of 16 bytes, and overlaps nothing that is read.
        batch_per_rank: samples that each PE receives, in rank order; None for B // world_size each and one more on the
            first B % world_size. A PE whose T is 0 must give it, since its `offsets` do not show the batch.
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
            torch.ops have called without `optimizer`; with `Lookups`, inside of torch.compile.
        RuntimeError: `Lookups` that have been released, here or by the backward pass, or not been waited for; a
            backward pass without `optimizer` in a CUDA-graph capture.

    Collective, on the current stream; may be captured in a CUDA graph after one eager call with the same shapes.
    Source: fused embedding + All-to-All of "Optimizing Distributed ML Communication with Fused Computation-Collective
    Operations" (SC24), sections III-A and III-B.
    """
    if isinstance(weights, torch.nn.ParameterList):
        weights = list(weights)
    arrived, differentiated = None, per_sample_weights
    lookups: OfBatch | OfSources
    required: tuple[torch.Tensor, ...]
    optional: tuple[torch.Tensor | None, ...] = (out,)
    if isinstance(indices, Lookups):
        indices.check_is_of(weights, offsets, per_sample_weights, batch_per_rank)
        arrived, batch_per_rank, differentiated = indices, indices.batch_per_rank, indices.per_sample_weights
        lookups, operator = indices.for_tables(), _from_sources
        required = (indices.sources,)
    elif offsets is None:
        raise TypeError(
            "offsets: expected [T * B + 1], int32 or int64, got None. offsets is required unless indices is a Lookups. "
            "For indices of shape [B, L] pass torch.arange(0, B * L + 1, L) and indices.flatten()."
        )
    else:
        lookups, operator = _new_of_batch((indices, offsets, per_sample_weights)), _of_batch
        required, optional = (indices, offsets), (per_sample_weights, out)
    if optimizer is not None and not isinstance(optimizer, EmbeddingOptimizer):
        raise TypeError(f"optimizer: expected a po.EmbeddingOptimizer, got {optimizer!r}")
    records = torch.is_grad_enabled()
    dims = tuple(dim_per_rank) if type(dim_per_rank) is list else dim_per_rank  # keys are found by tuples
    split = tuple(batch_per_rank) if type(batch_per_rank) is list else batch_per_rank
    choices = (dims, split, dtype, wire_dtype, pooling, bounds, schedule, columns)
    is_plain = not torch.compiler.is_compiling() and operator.is_plain(required, optional)
    if is_plain is not False:
        if out is not None and records and (optimizer or requires_grad or _require_gradients(weights, differentiated)):
            raise NotImplementedError(_NO_OUT)
        world = _world.for_call()
        plans, key, has_gradients = _prepared(world, world.team, weights, lookups, choices)
        is_required = requires_grad or has_gradients or (differentiated is not None and differentiated.requires_grad)
        if records and (is_required or optimizer is not None):
            call = EmbeddingCall(world, key, tuple(weights), arrived)
            launch = functools.partial(_launched, world, plans, key, weights, lookups, None, call, optimizer)
            return _recorded(call, launch, lookups, optimizer)
        if optimizer is not None:
            refuse_half_updated(optimizer, world)
        if is_plain:
            return _launched(world, plans, key, weights, lookups, out)
    dispatch = _dispatched if optimizer is None or not records else _dispatched_behind_a_break
    return dispatch(operator, weights, lookups, arrived, out, choices, optimizer, requires_grad, is_plain)


def _dispatched(
    operator: TorchOperator,
    weights: Sequence[torch.Tensor],
    lookups: OfBatch | OfSources,
    arrived: Lookups | None,
    out: torch.Tensor | None,
    choices: tuple[Any, ...],
    optimizer: EmbeddingOptimizer | None,
    requires_grad: bool,
    is_plain: bool | None,
) -> torch.Tensor:
    """Make a call that a mode, a transform or a compiler is to see, or that the gate refuses."""
    tensors = (*(each for each in lookups if isinstance(each, torch.Tensor)), out)
    launch = functools.partial(
        operator.dispatch, (weights, *lookups, *choices), {"out": out}, tensors, weights, is_plain=is_plain
    )
    named = {"per_sample_weights": arrived.per_sample_weights} if arrived is not None else lookups._asdict()
    records, is_compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    # The backward pass may be the package's where no compiler or mode stands between.
    is_own = requires_grad or _require_gradients(weights, named["per_sample_weights"])
    if records and (optimizer is not None or (is_own and not (is_compiling or num_dispatch_modes()))):
        require_plain_list("weights", weights)
        require_plain({name: each for name, each in named.items() if each is not None}, may_be_fake=True)
        if out is not None:
            raise NotImplementedError(_NO_OUT)
        world = _world.for_call()
        _, key, _ = _prepared(world, world.team, weights, lookups, choices)
        return _recorded(EmbeddingCall(world, key, tuple(weights), arrived), launch, lookups, optimizer)
    if optimizer is not None and not is_compiling:
        refuse_half_updated(optimizer, _world.current())
    return launch()  # type: ignore[no-any-return]


_dispatched_behind_a_break = uncompiled(_dispatched)


def _recorded(
    call: EmbeddingCall,
    launch: Callable[[], torch.Tensor],
    lookups: OfBatch | OfSources,
    optimizer: EmbeddingOptimizer | None,
) -> torch.Tensor:
    """Make a call that has a backward pass."""
    if optimizer is not None and not torch.compiler.is_compiling():
        refuse_half_updated(optimizer, call.world)
    given = lookups if isinstance(lookups, OfBatch) else ()
    return record_sparse(call, launch, *given) if optimizer is None else record_update(optimizer, call, launch, *given)


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
    dims, batch = sum(weight.shape[1] for weight in weights), (offsets.numel() - 1) // len(weights)
    choices = ((dims,), (batch,), None, None, pooling, bounds, SCHEDULES[0])
    lookups = OfBatch(indices, offsets, per_sample_weights)
    plans, key, _ = _prepared(world, world.alone, weights, lookups, choices)
    return _launched(world, plans, key, weights, lookups)


# ---- launch --------------------------------------------------------------------------------------------------------


def _prepared(
    world: _world.World,
    team: Team,
    weights: Sequence[torch.Tensor],
    lookups: OfBatch | OfSources,
    choices: tuple[Any, ...],
) -> tuple[Plans[EmbeddingPlan], EmbeddingKey, bool]:
    """Return the plans, a call's key among them, and whether a table requires a gradient; `choices`: of `Choices.of`.

    Most calls differ from an earlier one in their lookups alone: their keys are found by what the caller has passed.
    """
    state = OPERATOR.state(world)
    seen = (state.own or table_sets(world)).see(weights)
    tables, kind = seen.tables, lookups.kind(weights, choices[1])
    call: Any = (team, state.tuning, kind, choices)
    try:
        key = tables.keys.get(call)
    except TypeError:  # lists of numbers, or what has no place here
        call = key = None
    if key is None:
        key = EmbeddingKey(team, tables, state.tuning, Choices.of(weights, *choices), LookupKind(*kind))
        if call is not None:
            tables.keep_key(call, key)
    return state.plans, key, seen.requires_grad


def _launched(
    world: _world.World,
    plans: Plans[EmbeddingPlan],
    key: EmbeddingKey,
    weights: Sequence[torch.Tensor],
    lookups: OfBatch | OfSources,
    out: torch.Tensor | None = None,
    recorded: EmbeddingCall | None = None,
    optimizer: EmbeddingOptimizer | None = None,
) -> torch.Tensor:
    """Find or make the plan, launch it, return the result; `recorded`: the call, if it has a backward pass."""
    plan = plans.get(key, functools.partial(_new_plan, world, key, weights, lookups, recorded, optimizer))
    world.workspace.changes.check("weights", weights)
    if out is not None:
        plan.check_output(out, weights, lookups._asdict() if isinstance(lookups, OfBatch) else {})
        offset = world.heap.offset_of(out, "out")
        increment_version(out)
        plan.launch(lookups, offset)
        return out
    slot = world.outputs.take(plan.output_bytes, world.backend.stream(), is_captured=world.workspace.is_capturing())
    plan.launch(lookups, slot.offset)
    return slot.tensor(plan.dtype, plan.output_shape)


def _new_plan(
    world: _world.World,
    key: EmbeddingKey,
    weights: Sequence[torch.Tensor],
    lookups: OfBatch | OfSources,
    recorded: EmbeddingCall | None,
    optimizer: EmbeddingOptimizer | None,
) -> EmbeddingPlan:
    check_types(weights, lookups._asdict(), *key.choices)
    split = completed(world, weights, key.lookups.num_offsets, *key.choices[:2])
    if recorded is not None:  # its backward pass will come
        arrived = recorded.arrived
        num_lookups = lookups.indices.numel() if isinstance(lookups, OfBatch) else arrived.capacity if arrived else 0
        compile_backward(
            world, key, weights, split[0], Step() if optimizer is None else step_of(optimizer), num_lookups
        )
    return EmbeddingPlan(world, key, weights, *split)


# ---- torch operators -----------------------------------------------------------------------------------------------


def _operator_of(name: str, of: type[OfBatch] | type[OfSources], lookups: str) -> TorchOperator:
    """Return one of the two, whose lookups are given as `lookups` in torch's schema language, a field of `of` each."""
    count = len(of._fields)

    def run(weights: Sequence[torch.Tensor], *arguments: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        world, choices = _world.for_call(), arguments[count : count + _NUM_CHOICES]
        lookups = of(*arguments[:count])
        plans, key, _ = _prepared(world, world.team, weights, lookups, choices)
        return _launched(world, plans, key, weights, lookups, out)

    def check(weights: Sequence[torch.Tensor], *arguments: Any, **_: object) -> None:
        check_types(weights, of(*arguments[:count])._asdict(), *arguments[count:])

    def complete(weights: Sequence[torch.Tensor], *arguments: Any) -> tuple[Any, ...]:
        """Fill in what the dispatcher is to see."""
        world, (dims, batches, *_) = _world.current(), arguments[count:]
        if dims is None and torch.compiler.is_compiling():
            dims = dims_at_compile_time(*weights)
        elif dims is None and num_dispatch_modes():
            dims = exchange_dims(world, sum(weight.shape[1] for weight in weights))  # fake tables
        num_offsets = arguments[1].numel() if of is OfBatch else 0  # the split comes with the lookups
        dims, batches = completed(world, weights, num_offsets, dims, batches)
        choices = Choices.of(weights, dims, batches, *arguments[count + 2 :])
        return (weights, *arguments[:count], *choices, world.rank)

    def fake(weights: Sequence[torch.Tensor], *arguments: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        dims, batches, _, wire_dtype, pooling, _, schedule, *others = arguments[count:]
        if pooling not in POOLINGS or schedule not in SCHEDULES:
            raise ValueError(
                f"pooling: expected one of {POOLINGS}, got {pooling!r}; schedule: one of {SCHEDULES}, got {schedule!r}"
            )
        rank = others[1] if len(others) > 1 else None  # after the columns
        rows = batches[_world.current().rank if rank is None else rank]
        result: torch.Tensor = arguments[0].new_empty((rows, sum(dims)), dtype=wire_dtype)
        return result

    return TorchOperator(
        name,
        f"Tensor[] weights, {lookups}, {_SPLIT_AND_CHOICES}",
        run,
        check,
        complete=complete,
        fake=fake,
        outputs=("out",),
        no_gradient=_NO_GRADIENT,
        result_in_heap=True,
    )


_NO_GRADIENT = (
    "embedding_all_to_all has a backward pass as a plain call of po.embedding_all_to_all alone, not inside of "
    "torch.compile or through torch.ops: call it outside, with or without "
    "optimizer=po.EmbeddingOptimizer(...), or under torch.no_grad(), or use embedding_bag + all_to_all_single"
)
# The rank is there for compilers, which keep graphs on disk: a PE must not take another PE's graph.
_SPLIT_AND_CHOICES = (
    "SymInt[] dim_per_rank, SymInt[] batch_per_rank, ScalarType dtype, ScalarType wire_dtype, str pooling, str bounds, "
    "str schedule, SymInt[]? columns=None, int? rank=None"
)
_of_batch = _operator_of("embedding_all_to_all", OfBatch, "Tensor indices, Tensor offsets, Tensor? per_sample_weights")
_from_sources = _operator_of(
    "embedding_all_to_all_from_sources",
    OfSources,
    "Tensor sources, ScalarType index_dtype, bool is_weighted, SymInt lookups_per_bag, SymInt num_beside",
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
