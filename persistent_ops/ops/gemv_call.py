"""What gemv_all_reduce and gemv share: torch operators, the check of their arguments, a call from plan to result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..runtime import world as _world
from ..runtime.torch_library import define_operator
from .gemv_plan import (
    ALGORITHMS,
    MAX_VECTORS,
    OPERATOR,
    SCALARS,
    TUNING,
    GemvPlan,
    areas_of,
    choose_algorithm,
    plans_of,
)
from .plain_call import is_plain

__all__ = ["GemvOperator", "check_choices", "execute"]


class GemvOperator:
    """One of the two as torch sees it: operators that return the result and that write it, forward only.

    Called with weight, x, bias, residual, out and the choices, it returns the result, past torch's dispatcher where
    nobody but the kernel wants to see the call.

    Args:
        name: of the operator; the one that writes is called `name`_out.
        choices: schema of the arguments behind the tensors.
        run: called as run(weight, x, bias, residual, *choices, out), with out or None.
        check_choices: called as check_choices(*choices, weight.dtype) for fake tensors.
        instead: what gives gradients.
    """

    def __init__(
        self,
        name: str,
        choices: str,
        run: Callable[..., torch.Tensor],
        check_choices: Callable[..., None],
        instead: str,
    ) -> None:
        self._name = name
        self._run = run
        self._check_choices = check_choices
        self._forward_only = (
            f"{name} is forward only: call it under torch.no_grad(), or use {instead} where gradients are needed"
        )
        arguments = f"Tensor weight, Tensor x, Tensor? bias, Tensor? residual, {choices}"
        define_operator(
            name,
            f"({arguments}) -> Tensor",
            lambda *given: run(*given, None),
            fake=self._fake,
            no_gradient=self._forward_only,
        )
        define_operator(f"{name}_out", f"({arguments}, *, Tensor(a!) out) -> ()", self._run_out, fake=self._fake_out)

    def __call__(
        self,
        weight: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
        *choices: Any,
    ) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            if is_plain((weight, x), (bias, residual, out)):
                return self._run(weight, x, bias, residual, *choices, out)
            check_types(weight, x, bias, residual, out)
        operators = torch.ops.persistent_ops
        if out is None:
            result: torch.Tensor = getattr(operators, self._name)(weight, x, bias, residual, *choices)
            return result
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (weight, x, bias, residual, out)):
            raise NotImplementedError(f"out: cannot be given where gradients are recorded. {self._forward_only}")
        getattr(operators, f"{self._name}_out")(weight, x, bias, residual, *choices, out=out)
        return out

    def _run_out(self, *given: Any, out: torch.Tensor) -> None:
        self._run(*given, out)

    def _fake(
        self,
        weight: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        *choices: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._check_choices(*choices, weight.dtype)
        return weight.new_empty(check(weight, x, bias, residual, out, None)[3])

    def _fake_out(self, *given: Any, out: torch.Tensor) -> None:
        self._fake(*given, out=out)


# ---- launch --------------------------------------------------------------------------------------------------------


def execute(
    weight: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    algorithm: str,
    comm_dtype: torch.dtype | None,
    prefetch_weight: bool,
    out: torch.Tensor | None,
    is_alone: bool = False,
) -> torch.Tensor:
    """Check, find or make the plan, launch it, return the result. `is_alone`: for gemv, not for gemv_all_reduce."""
    world = _world.for_call()
    device = world.backend.device
    rows, columns, num_vectors, shape = check(weight, x, bias, residual, out, device)
    element = weight.dtype.itemsize
    weight_at, x_at = weight.data_ptr(), x.data_ptr()
    is_aligned = not ((weight_at | x_at | columns * element) & 15)
    bias_at = 0 if bias is None else bias.data_ptr()
    tuning = world.operator_state.get(TUNING)
    signature = (
        rows, columns, num_vectors, weight.dtype, comm_dtype, bias_at, algorithm, is_aligned, prefetch_weight, tuning
    )  # fmt: skip
    plans = plans_of(world, is_alone=is_alone)
    plan = plans.get(signature)
    if plan is None:
        if not is_alone:
            areas_of(world)  # collective, and so before what one PE alone may refuse
            check_choices(algorithm, comm_dtype, prefetch_weight, weight.dtype)
        if algorithm == "auto":
            chosen = choose_algorithm(world, rows, num_vectors, comm_dtype or torch.float32)
            plan = plans.get((*signature[:6], chosen, *signature[7:]))
        else:
            chosen = algorithm
        plan = plan or GemvPlan(
            world,
            rows,
            columns,
            num_vectors,
            weight.dtype,
            comm_dtype or torch.float32,
            bias,
            chosen,
            is_aligned,
            prefetch_weight,
            is_alone=is_alone,
        )
        OPERATOR.keep(world, plans, signature, plan)
    world.keep_captured(plan)
    if out is None:
        out = torch.empty(shape, dtype=weight.dtype, device=device)
    else:
        increment_version(out)
    plan.launch(world, weight_at, x_at, out.data_ptr(), 0 if residual is None else residual.data_ptr())
    return out


# ---- checks --------------------------------------------------------------------------------------------------------


def check_types(
    weight: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    named = (("weight", weight), ("x", x), ("bias", bias), ("residual", residual), ("out", out))
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("weight", "x")):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")


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
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
        if device is not None and tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    return rows, columns, num_vectors, shape


def check_choices(algorithm: str, comm_dtype: torch.dtype | None, _prefetch_weight: bool, dtype: torch.dtype) -> None:
    """Raise for what gemv_all_reduce cannot be asked for with a weight of `dtype`."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    if comm_dtype not in (None, torch.float32, dtype):
        raise ValueError(f"comm_dtype: expected None, torch.float32 or the weight's dtype {dtype}, got {comm_dtype}")
