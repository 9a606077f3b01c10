"""Gradients of embedding tables, for optimizers outside of this package."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...runtime import world as _world
from ...runtime.compile.literals import vector_bytes
from ...runtime.plans import Plans
from ...runtime.torch_private import queue_callback
from .backward import backward_key, num_tables
from .backward_kernel import GRADIENT
from .backward_plan import OPERATOR, BackwardKey, BackwardPlan, identity, rows_of
from .checks import POOLINGS, check_gradient
from .inversion import Inverted, invert
from .recorded_call import EmbeddingCall, Inputs, Recording, record
from .split import table_set

__all__ = ["DenseGradients", "dense_gradients", "dense_size", "record_sparse"]


# ---- of all rows -----------------------------------------------------------------------------------------------------


class DenseGradients(NamedTuple):
    """The result of `dense_gradients`; tables that are one tensor share sums and flags.

    Attributes:
        memory: `[dense_size(weights)]`, float32: all sums, then all flags, so that one all-reduce takes both.
        sums: of each table `[R, D]`, in memory: its rows' summed gradients, 0 where no bag has the row.
        touched: of each table `[R]`, in memory: 1 where a bag has the row, even if its gradient is 0; else 0.
        factors: `[n]`, float32: the gradient of per_sample_weights; None where not asked for.
    """

    memory: torch.Tensor
    sums: list[torch.Tensor]
    touched: list[torch.Tensor]
    factors: torch.Tensor | None


def dense_size(weights: Sequence[torch.Tensor]) -> int:
    """Return how many floats `dense_gradients` writes."""
    return sum(weight.numel() + weight.shape[0] for weight in _tensors(weights).values())


def dense_gradients(
    gradient: torch.Tensor,
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None = None,
    *,
    pooling: str = "sum",
    scale: torch.Tensor | None = None,
    memory: torch.Tensor | None = None,
    wants_factors: bool = False,
) -> DenseGradients:
    """Add up the gradients of every row of this PE's tables, over samples that are all this PE's own.

    ``sums_t[r] = scale * sum over lookups of row r in table t of factor * gradient[sample, columns of t]``, in fp32,
    with the bits of `embedding_all_to_all`'s backward pass in a world of one; the factor is the lookup's
    per_sample_weight, or the reciprocal of its bag's lookups under "mean". Tables are read for the factors' gradients
    alone, and nothing of them is written.

    Args:
        gradient: `[B, sum of D]`, of the tables' dtype: of ``cat over t of pool(weights_t)``.
        weights: T tables `[R_t, D_t]`, contiguous, of one dtype; a tensor may occur twice.
        indices: `[n]`, int32 or int64: the lookups of the B samples, bag after bag. Those outside of a table are
            skipped.
        offsets: `[T * B + 1]`, int32 or int64, feature-major.
        per_sample_weights: `[n]`, float32; with pooling "sum" only.
        pooling: "sum" or "mean".
        scale: `[1]`, float32, on the device; None for 1.
        memory: `[dense_size(weights)]`, float32, contiguous, at a multiple of 16 bytes, also of the symmetric heap;
            None: it is allocated.
        wants_factors: whether per_sample_weights have a gradient.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, layout or device.
        RuntimeError: a CUDA-graph capture meets shapes that were not called before, or more lookups.

    Not collective, on the current stream, no host synchronization; may be captured in a CUDA graph after a first call
    with the same shapes.
    """
    world = _world.for_call()
    widths = tuple(weight.shape[1] for weight in weights)
    _check(gradient, weights, pooling, per_sample_weights)
    if memory is None:
        memory = torch.empty(dense_size(weights), dtype=torch.float32, device=gradient.device)
    _check_memory(memory, dense_size(weights))
    key = BackwardKey(
        world.alone,
        table_set(world, weights),
        None,
        OPERATOR.state(world).tuning,
        (sum(widths),),
        (widths,),
        (gradient.shape[0],),
        gradient.dtype,
        gradient.dtype,
        pooling,
        per_sample_weights is not None,
    )
    plan = gradient_plan(world, key, weights, memory)
    inverted = invert(
        world, plan.rows, indices, offsets, counts=pooling == "mean", lookups=per_sample_weights is not None
    )
    memory.zero_()
    found = _views(memory, weights)
    factors = None
    if wants_factors and per_sample_weights is not None:
        factors = torch.zeros_like(per_sample_weights)
    flags = memory[memory.numel() - plan.rows.num_keys :]
    world.workspace.raise_failure()  # of earlier launches
    plan.launch(
        rows_of(gradient), inverted, per_sample_weights, factors, scale=scale, sums=memory, places=None, touched=flags
    )
    return DenseGradients(memory, *found, factors)


# ---- of the rows that lookups have -----------------------------------------------------------------------------------


def record_sparse(call: EmbeddingCall, launch: Callable[[], torch.Tensor], *lookups: Any) -> torch.Tensor:
    """Make a call of `embedding_all_to_all` whose backward pass gives tables sparse gradients; see `record`."""
    weights = call.weights
    _check_twins(weights)
    placeholder = torch.zeros(0, dtype=torch.float32, device=call.world.backend.device, requires_grad=True)
    name = functools.partial(_name_of, len(weights), weakref.ref(weights[0]) if weights else None)
    return record(Recording(_sparse_gradients, placeholder, name), call, launch, *lookups)


def _check_twins(weights: Sequence[torch.Tensor]) -> None:
    """Raise where two tensors have one memory: for torch each has a gradient of its own, but kernels add up both."""
    by_memory: dict[int, tuple[int, torch.Tensor]] = {}
    for number, weight in enumerate(weights):
        if weight.layout != torch.strided or not weight.numel():
            continue
        first, other = by_memory.setdefault(weight.data_ptr(), (number, weight))
        if other is not weight and (weight.requires_grad or other.requires_grad):
            raise NotImplementedError(
                f"weights: tables {first} and {number} share memory but are different tensors. Where gradients are "
                "recorded, pass one tensor twice, or copies."
            )


def _name_of(count: int, first: weakref.ref[torch.Tensor] | None) -> str:
    """Return the name of the forward pass of some tables in errors."""
    table = None if first is None else first()
    return num_tables(count) + ("" if table is None else f", the first one {list(table.shape)}")


def _sparse_gradients(
    call: EmbeddingCall, gradient: torch.Tensor, inputs: Inputs, *, wants_factors: bool, forward_pass: int
) -> tuple[Sequence[torch.Tensor | None], torch.Tensor | None]:
    """Return the tables' gradients, coalesced, and the per-sample weights'. Collective; waits on the host.

    Of tables that are one tensor, the first that requires a gradient has it, the sum for all of them.
    """
    world, weights = call.world, call.weights
    if world.workspace.is_capturing():
        raise RuntimeError(
            "embedding_all_to_all: a backward pass without optimizer waits on the host for the number of rows that "
            "lookups have, which a CUDA-graph capture cannot do; pass optimizer=po.EmbeddingOptimizer(...), or leave "
            "the backward pass out of the capture"
        )
    gradient = rows_of(gradient)
    key = backward_key(call, None, gradient.dtype, forward_pass)
    plan = gradient_plan(world, key, weights)
    inverted = inputs.invert(world, plan.rows, counts=key.pooling == "mean")
    factors = inputs.per_sample_weights
    factor_gradients = torch.zeros_like(factors) if wants_factors and factors is not None else None
    touched = _Touched.of(plan, inverted, weights)
    # On a GPU gradients are handed on before the launch has ended: where it is given up, they are no numbers.
    sums = torch.full((touched.num_elements,), math.nan, dtype=torch.float32, device=gradient.device)
    world.workspace.raise_failure()  # of earlier launches
    plan.launch(
        gradient,
        inverted,
        factors,
        factor_gradients,
        forward_pass=forward_pass,
        scale=None,
        sums=sums,
        places=touched.places,
        touched=None,
    )
    found: list[torch.Tensor | None] = [None] * len(weights)
    values = iter(sums.to(key.dtype).split(touched.sizes))
    for tables, rows, of_rows in zip(plan.groups, touched.rows, values, strict=True):
        first = next((table for table in tables if weights[table].requires_grad), None)
        if first is not None:
            found[first] = _coalesced(rows, of_rows, weights[first])
    _keep_coalesced(weights, found)
    return found, None if factor_gradients is None else inputs.returned(world, factor_gradients)


class _Touched(NamedTuple):
    """The rows that lookups have, of tensors in the order of their keys.

    Attributes:
        rows: of each tensor, `[U]`, int64, sorted.
        sizes: elements of these rows.
        places: `[number of lookups that count]`, int64: where the sums of a lookup's row begin among all elements.
    """

    rows: list[torch.Tensor]
    sizes: list[int]
    places: torch.Tensor

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    @classmethod
    def of(cls, plan: BackwardPlan, inverted: Inverted, weights: Sequence[torch.Tensor]) -> _Touched:
        """Return the touched rows of inverted lookups; waits on the host."""
        keys, numbers = torch.unique_consecutive(inverted.keys[: int(inverted.count)], return_inverse=True)
        tensors = [weights[tables[0]] for tables in plan.groups]
        ends = [0, *itertools.accumulate(len(tensor) for tensor in tensors)]
        bounds = torch.searchsorted(keys, torch.tensor(ends, dtype=keys.dtype, device=keys.device)).tolist()
        counts = [last - first for first, last in itertools.pairwise(bounds)]
        widths = [tensor.shape[1] for tensor in tensors]
        of_tensors = torch.tensor([widths, counts], dtype=torch.int64, device=keys.device)
        elements = of_tensors[0].repeat_interleave(of_tensors[1], output_size=len(keys))
        rows = [of_tensor.long() - first for of_tensor, first in zip(keys.split(counts), ends[:-1], strict=True)]
        sizes = [count * width for count, width in zip(counts, widths, strict=True)]
        return cls(rows, sizes, (elements.cumsum(0) - elements)[numbers])


def _coalesced(rows: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    shape = (len(rows), table.shape[1])
    if not len(rows):
        values = torch.empty_like(values)  # torch adds to an empty gradient by growing it where it lies
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0),
        values.view(shape),
        table.shape,
        device=values.device,
        is_coalesced=True,
        check_invariants=False,
    )


def _keep_coalesced(weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Let autograd's copies in `Tensor.grad`, which share rows and values, know that they are coalesced."""
    given = [
        (weight, gradient._indices().detach())
        for weight, gradient in zip(weights, gradients, strict=True)
        if gradient is not None and weight.is_leaf
    ]

    def keep() -> None:
        for weight, indices in given:
            found = weight.grad
            if found is not None and found.is_sparse and found._indices().data_ptr() == indices.data_ptr():
                found._coalesced_(True)

    queue_callback(keep)


# ---- parts of both ---------------------------------------------------------------------------------------------------


def gradient_plan(
    world: _world.World, key: BackwardKey, weights: Sequence[torch.Tensor], *written: torch.Tensor
) -> BackwardPlan:
    """Find or make the plan that writes rows' sums; collective in the key's team where it is made.

    Args:
        world: of this PE.
        key: without an optimizer.
        weights: its tables.
        written: what a CUDA graph keeps beside them.
    """
    plans: Plans[BackwardPlan] = OPERATOR.state(world).plans

    def build() -> BackwardPlan:
        return BackwardPlan(world, key, weights, [()] * len(weights), GRADIENT, "none", "nearest", {})

    return plans.get(key, build, *weights, *written)


def _tensors(weights: Sequence[torch.Tensor]) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the tensors that tables are, by `identity`, in the order in which they occur first."""
    return {identity(weight): weight for weight in weights}


def _views(memory: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return each table's sums and flags, as they lie in the memory of `dense_gradients`."""
    tensors = _tensors(weights)
    shapes = [tuple(weight.shape) for weight in tensors.values()]
    elements, rows = [r * d for r, d in shapes], [r for r, _ in shapes]
    parts = memory.split([*elements, *rows])
    sums = {which: part.view(shape) for which, part, shape in zip(tensors, parts, shapes, strict=False)}
    touched = dict(zip(tensors, parts[len(tensors) :], strict=True))
    names = [identity(weight) for weight in weights]
    return [sums[name] for name in names], [touched[name] for name in names]


def _check(
    gradient: torch.Tensor, weights: Sequence[torch.Tensor], pooling: str, per_sample_weights: torch.Tensor | None
) -> None:
    check_gradient(gradient, weights)
    if pooling not in POOLINGS or (pooling == "mean" and per_sample_weights is not None):
        raise ValueError(f"pooling: expected one of {POOLINGS}, 'sum' with per_sample_weights, got {pooling!r}")


def _check_memory(memory: torch.Tensor, size: int) -> None:
    if memory.dtype != torch.float32 or memory.shape != (size,) or not memory.is_contiguous():
        raise ValueError(f"memory: expected {size} contiguous float32, got {list(memory.shape)}, {memory.dtype}")
    if memory.data_ptr() % vector_bytes():
        raise ValueError(f"memory: expected a multiple of {vector_bytes()} as its address, got {memory.data_ptr()}")
