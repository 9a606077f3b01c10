"""Shared by gemv_all_reduce and gemv: torch operators, checks of arguments, a call from plan to result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..runtime import world as _world
from ..runtime.compile.literals import vector_bytes
from ..runtime.overlap import check_apart
from ..runtime.tensor_specs import TensorSpec, TensorSpecs
from ..runtime.torch_library import TorchOperator
from .gemv_plan import (
    ALGORITHMS,
    MAX_VECTORS,
    OPERATOR,
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
        choices: schema of the arguments after the tensors.
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
        _check_vectors(_TENSORS.check(None, weight, x, bias, residual, out).get("N"))
        return weight.new_empty((*x.shape[:-1], weight.shape[0]))

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
    wire_dtype: torch.dtype | None,
    prefetch_weight: bool,
    out: torch.Tensor | None = None,
    is_alone: bool = False,
) -> torch.Tensor:
    """Check, find or make the plan, launch it, return the result. `is_alone`: for gemv, not for gemv_all_reduce."""
    world = _world.for_call()
    device = world.backend.device
    dims = _TENSORS.check(device, weight, x, bias, residual, out)
    rows, columns, num_vectors = dims["M"], dims["K"], _check_vectors(dims.get("N"))
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
        wire_dtype,
        algorithm,
        is_aligned,
        prefetch_weight,
        state.tuning,
    )
    caller = "gemv" if is_alone else None
    plan = state.plans.get(key, lambda: _new_plan(world, key), caller=caller)
    if out is None:
        out = torch.empty((*x.shape[:-1], rows), dtype=weight.dtype, device=device)
    else:
        increment_version(out)
    bias_at = 0 if bias is None else bias.data_ptr()
    plan.launch(world, weight_at, x_at, bias_at, 0 if residual is None else residual.data_ptr(), out)
    return out


def _new_plan(world: _world.World, key: GemvKey) -> GemvPlan:
    """Make a plan; for "auto", find the one that it means."""
    if key.team is world.team:
        reserve_packets(world)  # collective, and so before what one PE alone may refuse
        check_choices(key.algorithm, key.wire_dtype, key.prefetch_weight, key.dtype)
    if not isinstance(key.prefetch_weight, bool):
        raise TypeError(f"prefetch_weight: expected True or False, got {key.prefetch_weight!r}")
    if key.algorithm != "auto":
        return GemvPlan(world, key)
    meant = key._replace(algorithm=choose_algorithm(world, key))
    plan: GemvPlan = OPERATOR.state(world).plans.get(meant, lambda: _new_plan(world, meant))
    return plan


# ---- checks --------------------------------------------------------------------------------------------------------


_TENSORS = TensorSpecs(
    TensorSpec("weight", "M K"),
    TensorSpec("x", "N? K", "weight"),
    TensorSpec("bias", "M", "weight"),
    TensorSpec("residual", "N? M", "weight"),
    TensorSpec("out", "N? M", "weight"),
)


def _check_vectors(num_vectors: int | None) -> int:
    """Return how many there are; raise for more, or fewer, than the kernel takes."""
    if num_vectors is None:
        return 1
    if num_vectors < 1:
        raise ValueError(f"x: expected 1 to {MAX_VECTORS} vectors, got 0")
    if num_vectors > MAX_VECTORS:
        raise ValueError(
            f"x: expected 1 to {MAX_VECTORS} vectors, got {num_vectors}. Beyond {MAX_VECTORS} the product is no longer "
            "bound by reading the weight: use torch.nn.functional.linear (and an all_reduce for a sum over the PEs)"
        )
    return num_vectors


def check_choices(algorithm: str, wire_dtype: torch.dtype | None, _prefetch_weight: bool, dtype: torch.dtype) -> None:
    """Raise for arguments that gemv_all_reduce cannot take with a weight of `dtype`."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    if wire_dtype not in (None, torch.float32, dtype):
        raise ValueError(f"wire_dtype: expected None, torch.float32 or the weight's dtype {dtype}, got {wire_dtype}")
