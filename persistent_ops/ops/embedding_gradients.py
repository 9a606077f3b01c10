"""Gradients of embedding tables, for whoever makes the optimizer's step later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..runtime import world as _world
from ..runtime.plans import Plans
from .embedding_all_to_all import table_set
from .embedding_backward_plan import GRADIENT, OPERATOR, BackwardKey, BackwardPlan, identity
from .embedding_checks import MODES
from .embedding_inversion import invert

__all__ = ["DenseGradients", "dense_gradients", "dense_size"]

_VECTOR_BYTES = 16


class DenseGradients(NamedTuple):
    """What `dense_gradients` returns; tables that are one tensor share sums and flags.

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
    mode: str = "sum",
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
        per_sample_weights: `[n]`, float32; with mode "sum" only.
        mode: "sum" or "mean".
        scale: `[1]`, float32, on the device; None for 1.
        memory: `[dense_size(weights)]`, float32, contiguous, at a multiple of 16 bytes, also of the symmetric heap;
            None: it is allocated.
        wants_factors: whether per_sample_weights have a gradient.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, layout or device.
        RuntimeError: a CUDA-graph capture meets shapes that were not called before, or more lookups.

    Not collective, on the current stream, no host synchronisation; may be captured in a CUDA graph behind a first call
    with the same shapes.
    """
    world = _world.for_call()
    widths = tuple(weight.shape[1] for weight in weights)
    _check(gradient, weights, mode, per_sample_weights)
    if memory is None:
        memory = torch.empty(dense_size(weights), device=gradient.device)
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
        mode,
        per_sample_weights is not None,
    )
    plan = gradient_plan(world, key, weights, memory)
    inverted = invert(world, plan.rows, indices, offsets, counts=mode == "mean", lookups=per_sample_weights is not None)
    memory.zero_()
    found = _views(memory, weights)
    factors = None
    if wants_factors and per_sample_weights is not None:
        factors = torch.zeros_like(per_sample_weights)
    flags = memory[memory.numel() - plan.rows.num_keys :]
    world.workspace.raise_failure()  # of earlier launches
    plan.launch(
        aligned(gradient), inverted, per_sample_weights, factors, scale=scale, sums=memory, places=None, touched=flags
    )
    return DenseGradients(memory, *found, factors)


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
        return BackwardPlan(world, key, weights, [()] * len(weights), GRADIENT, "none", {})

    return plans.find(key, *weights, *written) or plans.make(key, build)


def aligned(gradient: torch.Tensor) -> torch.Tensor:
    """Return it contiguous and at a multiple of 16 bytes."""
    gradient = gradient.contiguous()
    return gradient.clone() if gradient.data_ptr() % _VECTOR_BYTES else gradient


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
    gradient: torch.Tensor, weights: Sequence[torch.Tensor], mode: str, per_sample_weights: torch.Tensor | None
) -> None:
    """Raise for what the kernel would misread; the inversion checks the lookups."""
    for t, weight in enumerate(weights):
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_contiguous():
            raise ValueError(f"weights[{t}]: expected a contiguous [R, D] tensor")
        if weight.dtype != gradient.dtype or weight.device != gradient.device:
            raise TypeError(
                f"gradient: expected {weight.dtype} on {weight.device} as weights[{t}] is, got {gradient.dtype} on "
                f"{gradient.device}"
            )
    columns = sum(weight.shape[1] for weight in weights)
    if gradient.dim() != 2 or gradient.shape[1] != columns:
        raise ValueError(f"gradient: expected [B, {columns}], got {list(gradient.shape)}")
    if mode not in MODES or (mode == "mean" and per_sample_weights is not None):
        raise ValueError(f"mode: expected one of {MODES}, 'sum' with per_sample_weights, got {mode!r}")


def _check_memory(memory: torch.Tensor, size: int) -> None:
    if memory.dtype != torch.float32 or memory.shape != (size,) or not memory.is_contiguous():
        raise ValueError(f"memory: expected {size} contiguous float32, got {list(memory.shape)}, {memory.dtype}")
    if memory.data_ptr() % _VECTOR_BYTES:
        raise ValueError(f"memory: expected a multiple of {_VECTOR_BYTES} as its address, got {memory.data_ptr()}")
