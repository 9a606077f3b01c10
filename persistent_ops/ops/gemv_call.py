"""What gemv_all_reduce and gemv share: torch operators, the check of their arguments, a call from plan to result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..runtime import world as _world
from ..runtime.compile.literals import vector_bytes
from ..runtime.overlap import check_apart
from ..runtime.plans import Plans
from ..runtime.torch_library import TorchOperator
from .gemv_plan import (
    ALGORITHMS,
    MAX_VECTORS,
    OPERATOR,
    SCALARS,
    GemvKey,
    GemvPlan,
    choose_algorithm,
    reserve_packets,
)

__all__ = ["check_choices", "execute", "gemv_operator"]


def gemv_operator(
    name: str,
    choices: str,
    run: Callable[..., torch.Tensor],
    check_choices: Callable[..., None],
    instead: str,
    *,
    is_collective: bool,
) -> TorchOperator:
    """Return one of the two as torch sees it.

    Args:
        name: of the operator.
        choices: schema of the arguments behind the tensors.
        run: called as run(weight, x, bias, residual, *choices, out=out), with out or None.
        check_choices: called as check_choices(*choices, weight.dtype) for fake tensors.
        instead: what gives gradients.
        is_collective: whether peers take part.
    """

    def fake(
        weight: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        *choices: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_choices(*choices, weight.dtype)
        return weight.new_empty(check(weight, x, bias, residual, out, None)[3])

    return TorchOperator(
        name,
        f"Tensor weight, Tensor x, Tensor? bias, Tensor? residual, {choices}",
        run,
        fake=fake,
        outputs=("out",),
        no_gradient=(
            f"{name} is forward only: call it under torch.no_grad(), or use {instead} where gradients are needed"
        ),
        is_collective=is_collective,
    )


# ---- launch --------------------------------------------------------------------------------------------------------


def execute(
    weight: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    algorithm: str,
    comm_dtype: torch.dtype | None,
    prefetch_weight: bool,
    out: torch.Tensor | None = None,
    is_alone: bool = False,
) -> torch.Tensor:
    """Check, find or make the plan, launch it, return the result. `is_alone`: for gemv, not for gemv_all_reduce."""
    world = _world.for_call()
    device = world.backend.device
    rows, columns, num_vectors, shape = check(weight, x, bias, residual, out, device)
    if out is not None:
        check_apart("out", out, {"weight": weight, "x": x, "bias": bias}, {"residual": residual})
    weight_at, x_at = weight.data_ptr(), x.data_ptr()
    is_aligned = not (weight_at | x_at | columns * weight.dtype.itemsize) % vector_bytes()
    team = world.alone if is_alone else world.team
    state = OPERATOR.state(world)
    key = GemvKey(
        team,
        rows,
        columns,
        num_vectors,
        weight.dtype,
        comm_dtype,
        algorithm,
        is_aligned,
        prefetch_weight,
        state.tuning,
    )
    plan = state.plans.find(key) or _new_plan(world, key)
    if out is None:
        out = torch.empty(shape, dtype=weight.dtype, device=device)
    else:
        increment_version(out)
    bias_at = 0 if bias is None else bias.data_ptr()
    plan.launch(world, weight_at, x_at, bias_at, 0 if residual is None else residual.data_ptr(), out)
    return out


def _new_plan(world: _world.World, key: GemvKey) -> GemvPlan:
    """Make a plan; for "auto", find the one that it means."""
    if key.team is world.team:
        reserve_packets(world)  # collective, and so before what one PE alone may refuse
        check_choices(key.algorithm, key.comm_dtype, key.prefetch_weight, key.dtype)
    plans: Plans[GemvPlan] = OPERATOR.state(world).plans
    if not isinstance(key.prefetch_weight, bool):
        raise TypeError(f"prefetch_weight: expected True or False, got {key.prefetch_weight!r}")
    if key.algorithm != "auto":
        return plans.make(key, lambda: GemvPlan(world, key), None if key.team is world.team else "gemv")
    meant = key._replace(algorithm=choose_algorithm(world, key))
    plan = plans[key] = plans.find(meant) or _new_plan(world, meant)
    return plan


# ---- checks --------------------------------------------------------------------------------------------------------


def check(
    weight: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    device: torch.device | None,
) -> tuple[int, int, int, tuple[int, ...]]:
    """Return M, K_r, N and the result's shape; raise for what the operator cannot take. No device: a fake call."""
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [M, K], got shape {list(weight.shape)}")
    rows, columns = weight.shape
    dtype = weight.dtype
    if dtype not in SCALARS:
        raise TypeError(f"weight: expected float32, float16 or bfloat16, got {dtype}")
    if x.dim() not in (1, 2) or x.shape[-1] != columns:
        raise ValueError(
            f"x: expected [{columns}] or [N, {columns}] for a weight of {list(weight.shape)}, got {list(x.shape)}"
        )
    num_vectors = 1 if x.dim() == 1 else x.shape[0]
    if num_vectors < 1:
        raise ValueError(f"x: expected 1 to {MAX_VECTORS} vectors, got 0")
    if num_vectors > MAX_VECTORS:
        raise ValueError(
            f"x: expected 1 to {MAX_VECTORS} vectors, got {num_vectors}. Beyond {MAX_VECTORS} the product is no longer "
            "bound by reading the weight: use torch.nn.functional.linear (and an all_reduce for a sum over the PEs)"
        )
    shape = (rows,) if x.dim() == 1 else (num_vectors, rows)
    named = (("weight", weight, None), ("x", x, None), ("bias", bias, (rows,)), ("residual", residual, shape))
    for name, tensor, expected in (*named, ("out", out, shape)):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected the weight's dtype {dtype}, got {tensor.dtype}")
        if expected is not None and tuple(tensor.shape) != expected:
            raise ValueError(f"{name}: expected shape {list(expected)}, got {list(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {tensor.stride()}; pass {name}.contiguous()"
            )
        if device is not None and tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    return rows, columns, num_vectors, shape


def check_choices(algorithm: str, comm_dtype: torch.dtype | None, _prefetch_weight: bool, dtype: torch.dtype) -> None:
    """Raise for what gemv_all_reduce cannot be asked for with a weight of `dtype`."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    if comm_dtype not in (None, torch.float32, dtype):
        raise ValueError(f"comm_dtype: expected None, torch.float32 or the weight's dtype {dtype}, got {comm_dtype}")
