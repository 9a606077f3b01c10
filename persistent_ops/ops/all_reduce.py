"""All-reduce of tensors of any size, and all-reduce followed by the RMS norm of rows, each in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..runtime import world as _world
from ..runtime.arguments import as_number
from ..runtime.compile.literals import vector_bytes
from ..runtime.dtypes import SCALARS, fill_nan
from ..runtime.overlap import check_apart
from ..runtime.tensor_specs import TensorSpec, TensorSpecs
from ..runtime.torch_library import TorchOperator
from .all_reduce_plan import (
    ALGORITHMS,
    FLOAT8,
    OPERATOR,
    AllReduceKey,
    AllReducePlan,
    reserve_room,
    resolved,
)

__all__ = ["add_up_gradients", "all_reduce", "all_reduce_rms_norm", "reference"]

_MOST = torch.finfo(torch.float32).max
_Optional = torch.Tensor | None
_FORWARD_ONLY = "{} is forward only: call it under torch.no_grad(), or use {} where gradients are needed"


def all_reduce(
    x: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Sum a tensor over all PEs, in one kernel.

    ``sum = round(x_0 + x_1 + ... + x_{P-1} + bias + residual)`` on every PE, added in fp32 in this order and rounded
    once. If bias and residual agree, all PEs get the same bits. Repeated calls and all algorithms give the same bits
    too, and the bits of an element do not depend on the other elements of the tensor. If a sum is NaN, algorithms may
    give different NaNs.

    Args:
        x: `[...]`, contiguous, float32, float16 or bfloat16, in any memory of the device; the same shape on every PE.
            Tensors that begin at multiples of 16 bytes take the fast path.
        residual: shape and dtype of x, contiguous; added once. All PEs pass a residual, or none does. With two shots,
            the owner of an element adds its own residual and bias, so all PEs get the owner's sum.
        bias: `[x.shape[-1]]`, dtype of x; added once. All PEs pass a bias, or none does.
        out: shape and dtype of x, contiguous, in any memory of the device. It may be x or residual, and must not
            overlap any other argument.
        algorithm: "one_shot" sends every element to every PE. "two_shot" sends an element to its owner, which sends the
            sum to every PE. Both send packets of 16 bytes whose arrival the receiver detects without a separate flag.
            "slices" is "two_shot" part by part, for large tensors. "auto" chooses by bytes and number of PEs
            (`SWITCH_POINTS` in all_reduce_plan.py).

    Returns:
        `[...]`, shape and dtype of x, in ordinary memory of this PE's device; `out` if given.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device, layout or overlap; before any launch.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before.
        PeerTimeoutError, ContractMismatchError: a peer did not answer, or launched something else (another size, dtype
            or algorithm). On "cuda" the next operator or `po.check()` raises them, and elements that did not arrive are
            NaN.
        NotImplementedError: in a backward pass; the operator is forward only.

    Collective, on the current stream. The first call with a shape is blocking; after it, calls may be captured in a
    CUDA graph. Uses at most 64 MiB of the symmetric heap for any size of x. Source: one-shot and two-shot all-reduce of
    TensorRT-LLM's custom kernels, with their "Lamport" buffers, which are empty until data arrives.
    """
    total: torch.Tensor = _all_reduce((x, residual, bias, algorithm), {"out": out}, (x,), (residual, bias, out))
    return total


def all_reduce_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum a tensor over all PEs and take the RMS norm of the sum's rows, in one kernel.

    ``sum`` is the result of `all_reduce`. ``norm = round(sum / sqrt(mean(sum^2) + eps) * (weight_bias + weight))`` is
    taken of the rounded sum over the last dimension, in fp32, and rounded once. With `scale`, the norm is divided by it
    and converted to float8_e4m3fn, saturating at +-448. The order in which squares are added depends only on the width,
    so the bits of a row do not depend on the other rows of the tensor.

    Args:
        x: `[..., D]`, as for `all_reduce`.
        weight: `[D]`, dtype of x.
        residual, bias, algorithm: as for `all_reduce`.
        eps: 0 or more; it may differ from call to call. Each PE uses its own weight, eps, weight_bias and scale. The
            operator does not check that these agree.
        weight_bias: added to the weight, in fp32 (1 for Gemma's norm).
        out: for the sum; shape and dtype of x, contiguous. It may be x or residual, and must not overlap any other
            argument.
        norm_out: for the norm; shape of x, contiguous, dtype of x, or float8_e4m3fn if `scale` is given. It may be x or
            residual if it has their dtype, and must not overlap any other argument.
        scale: `[1]` or `[]`, float32, on the device, above 0: the divisor of the norm.

    Returns:
        (sum, norm), both of x's shape. The sum has x's dtype; the norm has x's dtype or, with `scale`, float8_e4m3fn.

    Raises:
        All errors of `all_reduce`, and ValueError: eps is negative or not finite, weight_bias is not finite, or
            norm_out is float8 without a scale.

    Collective, stream and CUDA graph as for `all_reduce`. The kernel reads `scale`, so it may change between replays.
    Source: the fusion of vLLM, FlashInfer and TensorRT-LLM (all-reduce + residual + RMSNorm + quantization).
    """
    numbers = (as_number("eps", eps), as_number("weight_bias", weight_bias))
    arguments = (x, weight, residual, bias, scale, algorithm, *numbers)
    outputs = {"out": out, "norm_out": norm_out}
    results: tuple[torch.Tensor, torch.Tensor] = _all_reduce_rms_norm(
        arguments, outputs, (x, weight), (residual, bias, scale, out, norm_out)
    )
    return results


def add_up_gradients(sums: torch.Tensor, forward_pass: int) -> None:
    """Sum the gradients of one forward pass over all PEs, in place.

    Args:
        sums: as x of `all_reduce`, without a gradient.
        forward_pass: number of the forward pass (`CallNumbers`). PEs that pass different numbers do not match.
    """
    _execute(sums, None, None, None, None, "auto", 0.0, 0.0, out=sums, forward_pass=forward_pass)


def reference(
    xs: Sequence[torch.Tensor], bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the sum in fp64 on the CPU, from every PE's x.

    Returns:
        `[...]`, float64, not rounded.
    """
    total = torch.stack([x.detach().cpu().double() for x in xs]).sum(0)
    for addend in (bias, residual):
        if addend is not None:
            total = total + addend.detach().cpu().double()
    return total


# ---- the call ------------------------------------------------------------------------------------------------------


def _execute(
    x: torch.Tensor,
    weight: _Optional,
    residual: _Optional,
    bias: _Optional,
    scale: _Optional,
    algorithm: str,
    eps: float,
    weight_bias: float,
    out: _Optional = None,
    norm_out: _Optional = None,
    forward_pass: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Check, find or make the plan, launch it, return the results."""
    world = _world.for_call()
    _TENSORS.check(world.backend.device, x, weight, residual, bias, out, norm_out, scale)
    norm_dtype = _norm_dtype(x, weight, scale, norm_out, algorithm, eps, weight_bias)
    numel, dtype = x.numel(), x.dtype
    # If nothing depends on rows, the tensor counts as one row.
    width = x.shape[-1] if x.dim() and (weight is not None or bias is not None) else numel
    total = torch.empty_like(x) if out is None else out
    norm = None
    if norm_dtype is not None:
        norm = torch.empty_like(x, dtype=norm_dtype) if norm_out is None else norm_out
    addresses = [0 if t is None else t.data_ptr() for t in (x, residual, bias, total, weight, norm, scale)]
    together = 0
    for address in addresses[:6]:
        together |= address
    rows = 1 if width == numel else numel // width
    unit = vector_bytes()
    is_aligned = not together % unit and (rows == 1 or width * dtype.itemsize % unit == 0)
    if out is not None or norm_out is not None:
        read, may_be = {"bias": bias, "weight": weight, "scale": scale}, {"x": x, "residual": residual}
        check_apart("out", total, read, may_be)
        if norm is not None:
            check_apart("norm_out", norm, {**read, "out": total}, may_be)
    state = OPERATOR.state(world)
    has_bias, has_residual, norms = bias is not None, residual is not None, weight is not None
    key = AllReduceKey(
        world.team, rows, width, dtype, algorithm, has_bias, has_residual, norms, is_aligned, state.tuning
    )
    caller = "all_reduce_rms_norm" if norms else None
    plan = state.plans.get(key, lambda: _new_plan(world, key), caller=caller)
    if out is not None:
        increment_version(out)
    if norm_out is not None:
        increment_version(norm_out)

    def poison(first_element: int) -> None:
        for result in (total, norm):
            if result is not None:
                fill_nan(result.view(-1)[first_element:])

    plan.launch(addresses, eps, weight_bias, 0 if norm is None else norm.element_size(), forward_pass, poison=poison)
    return total, norm


def _new_plan(world: _world.World, key: AllReduceKey) -> AllReducePlan:
    """Make a plan; for "auto", find the one that it means."""
    reserve_room(world)  # collective
    if key.algorithm != "auto":
        return AllReducePlan(world, key)
    meant = resolved(world, key)
    plan: AllReducePlan = OPERATOR.state(world).plans.get(meant, lambda: _new_plan(world, meant))
    return plan


# ---- checks --------------------------------------------------------------------------------------------------------


_TENSORS = TensorSpecs(
    TensorSpec("x", "... D?"),
    TensorSpec("weight", "D", "x"),
    TensorSpec("residual", "... D?", "x"),
    TensorSpec("bias", "D", "x"),
    TensorSpec("out", "... D?", "x"),
    TensorSpec("norm_out", "... D?", (*SCALARS, FLOAT8)),
    TensorSpec("scale", "one", (torch.float32,)),
)


def _norm_dtype(
    x: torch.Tensor, weight: _Optional, scale: _Optional, norm_out: _Optional, algorithm: str, *numbers: float
) -> torch.dtype | None:
    """Return the norm's dtype, or None; raise for choices that the operator cannot take."""
    _check_choices(algorithm, *numbers)
    if weight is None:
        return None
    norm_dtype = x.dtype if scale is None else FLOAT8
    if norm_out is not None and norm_out.dtype != norm_dtype:
        _refuse_norm_dtype(norm_out.dtype, x.dtype, has_scale=scale is not None)
    return norm_dtype


def _refuse_norm_dtype(found: torch.dtype, dtype: torch.dtype, *, has_scale: bool) -> None:
    if has_scale:
        raise TypeError(f"norm_out: expected {FLOAT8} where scale is given, got {found}; leave scale out")
    if found == FLOAT8:
        raise ValueError(f"scale: expected a float32 tensor for a norm_out of {FLOAT8}, got None")
    raise TypeError(f"norm_out: expected x's dtype {dtype}, or {FLOAT8} with a scale, got {found}")


def _check_choices(algorithm: str, eps: float, weight_bias: float) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    if not 0 <= eps <= _MOST:
        raise ValueError(f"eps: expected a number of at least 0 and below infinity, in float32, got {eps}")
    if not abs(weight_bias) <= _MOST:
        raise ValueError(f"weight_bias: expected a finite number, in float32, got {weight_bias}")


# ---- torch operators -----------------------------------------------------------------------------------------------


def _fake(
    x: torch.Tensor,
    weight: _Optional,
    residual: _Optional,
    bias: _Optional,
    scale: _Optional,
    algorithm: str,
    eps: float,
    weight_bias: float,
    out: _Optional = None,
    norm_out: _Optional = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _TENSORS.check(None, x, weight, residual, bias, out, norm_out, scale)
    norm_dtype = _norm_dtype(x, weight, scale, norm_out, algorithm, eps, weight_bias)
    return torch.empty_like(x), torch.empty_like(x, dtype=norm_dtype)


def _of_sum(function: Callable[..., tuple[torch.Tensor, Any]]) -> Callable[..., torch.Tensor]:
    """Return the counterpart for all_reduce of a function of all_reduce_rms_norm."""

    def without_norm(
        x: torch.Tensor, residual: _Optional, bias: _Optional, algorithm: str, out: _Optional = None
    ) -> torch.Tensor:
        return function(x, None, residual, bias, None, algorithm, 0.0, 0.0, out)[0]

    return without_norm


_all_reduce = TorchOperator(
    "all_reduce",
    "Tensor x, Tensor? residual, Tensor? bias, str algorithm",
    _of_sum(_execute),
    fake=_of_sum(_fake),
    outputs=("out",),
    no_gradient=_FORWARD_ONLY.format("all_reduce", "torch.distributed.nn.all_reduce"),
)
_all_reduce_rms_norm = TorchOperator(
    "all_reduce_rms_norm",
    "Tensor x, Tensor weight, Tensor? residual, Tensor? bias, Tensor? scale, str algorithm, float eps, "
    "float weight_bias",
    _execute,
    results="(Tensor, Tensor)",
    fake=_fake,
    outputs=("out", "norm_out"),
    no_gradient=_FORWARD_ONLY.format(
        "all_reduce_rms_norm", "torch.distributed.nn.all_reduce + torch.nn.functional.rms_norm"
    ),
)
