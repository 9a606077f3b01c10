"""GEMM: a matrix product on one PE, by the main loop of this package's operators that multiply matrices."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..runtime import world as _world
from ..runtime.backend import KernelRequest
from ..runtime.compile.description import copy_of
from ..runtime.dtypes import SCALARS
from ..runtime.operator import Operator
from ..runtime.overlap import check_apart
from ..runtime.plans import Plan
from ..runtime.tensor_specs import TensorSpec, TensorSpecs
from ..runtime.torch_library import TorchOperator
from ..runtime.world import World, upload
from .product import (
    DTYPES,
    Division,
    Rows,
    Shape,
    Tile,
    Tuning,
    has_tensor_cores,
    is_row_major,
    kernel_config,
    launch_shape,
)

__all__ = [
    "OPERATOR",
    "gemm",
    "gradients_of_factors",
    "kernel_request",
    "multiply",
    "sample_requests",
    "save_factors",
]

_log = logging.getLogger("persistent_ops")
_MOST = 1 << 31
OPERATOR = Operator("gemm", (), default_tuning=Tuning())


def gemm(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply two matrices on this PE alone: ``round(a @ b + bias)``.

    Products are added in fp32 and rounded once. Repeated calls give the same bits, whatever else the GPU does. The
    kernel is for Hopper GPUs (sm_90) and for the host backend. Other GPUs, and matrices whose rows do not begin at
    multiples of 16 bytes, take `torch.addmm` (cuBLAS on GPUs), whose bits may differ; the first such call logs a
    warning. ``po.gemm.last_path`` is "kernel" or "torch": the path of the last call.

    Args:
        a: `[M, K]`, float16 or bfloat16, any strides. For the kernel, one stride is 1 and the other one a multiple of 8
            elements.
        b: `[K, N]`, dtype of a, strides as for a. `weight.t()` of an `nn.Linear` costs no copy.
        bias: `[N]`, contiguous, dtype of a.
        out: `[M, N]`, contiguous, dtype of a, in any memory of the device; apart from all other arguments.

    Returns:
        `[M, N]`, dtype of a, contiguous, in ordinary memory of this PE's device; N a multiple of 8 for the kernel.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device, layout or overlap; before any launch.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before, or `po.init()` was not called.
        PersistentOpsError: an error of an earlier operator of this PE, as from `po.check()`.

    Not collective: other PEs need not call it. On the current stream. The first call with a shape is blocking; after
    it, calls may be captured in a CUDA graph. Gradients of a, b and bias are products of the same kernel.
    """
    result: torch.Tensor = _operator((a, b, bias), {"out": out}, (a, b), (bias, out))
    return result


gemm.last_path = None  # type: ignore[attr-defined]


# ---- plan ----------------------------------------------------------------------------------------------------------


class _Key(NamedTuple):
    shape: Shape
    dtype: torch.dtype
    has_bias: bool
    tuning: Tuning | None


def kernel_request(dtype: torch.dtype, shape: Shape, tile: Tile, *, depth: int, has_bias: bool) -> KernelRequest:
    """Return the kernel for a tile; `depth`: of a step."""
    return KernelRequest.of(
        "gemm",
        {"scalar": SCALARS[dtype], **kernel_config(shape, tile, depth), "bias": has_bias},
        launch_shape(OPERATOR.description, shape, tile, depth, is_resident=False),
    )


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    for k_major, tile in (
        ((True, True), Tile(128, 256, 2, 1, 4)),
        ((True, True), Tile(256, 160, 2, 1, 4)),
        ((True, True), Tile(128, 96, 2, 2, 7)),
        ((False, False), Tile(128, 224, 1, 1, 4)),
    ):
        shape = Shape(4096, 4096, 4096, *k_major)
        yield kernel_request(torch.bfloat16, shape, tile, depth=64, has_bias=k_major[0])


class _Plan(Plan):
    """One key's kernel, and what its calls have in common."""

    def __init__(self, world: World, key: _Key) -> None:
        backend, description, shape = world.backend, OPERATOR.prepare(world), key.shape
        tuning = key.tuning or OPERATOR.default_tuning
        self._division = division = Division(backend, description, shape, tuning, Rows.of_one_pe(shape.rows))
        self._workspace = world.workspace
        request = kernel_request(key.dtype, shape, division.tile, depth=division.depth, has_bias=key.has_bias)
        self._kernel = world.load(request, world.alone)
        team = world.workspace.team(OPERATOR.contract(world.alone))
        self._words = upload(backend, description.structs["Plan"](team=team))
        self._address = self._words.data_ptr()
        self._template = description.structs["Call"](columns=shape.columns, product=division.product)

    def launch(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Launch on the current stream."""
        call = copy_of(self._template)
        self._division.set_factors(call.product, a, b)
        call.output = self._division.output_map(out)
        call.bias = 0 if bias is None else bias.data_ptr()
        self._workspace.launch(self._kernel, self._division.grid, self._address, call)


# ---- the call ------------------------------------------------------------------------------------------------------

_TENSORS = TensorSpecs(
    TensorSpec("a", "M K", DTYPES, is_contiguous=False),
    TensorSpec("b", "K N", "a", is_contiguous=False),
    TensorSpec("bias", "N", "a"),
    TensorSpec("out", "M N", "a"),
)


def _shape_of(world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Shape | None:
    """Return a product that the kernel makes, or None."""
    (rows, depth), columns = a.shape, b.shape[1]
    a_k_major, b_across = is_row_major(a), is_row_major(b)
    is_possible = a_k_major is not None and b_across is not None and is_row_major(out)
    if not is_possible or not rows * depth * columns or max(rows, depth, columns) >= _MOST:
        return None
    return (
        Shape(rows, depth, columns, bool(a_k_major), not b_across) if has_tensor_cores(world.backend.device) else None
    )


def multiply(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Check, find or make the plan, launch it, return the result."""
    world = _world.for_call()
    device = world.backend.device
    dims = _TENSORS.check(device, a, b, bias, out)
    if out is None:
        out = torch.empty((dims["M"], dims["N"]), dtype=a.dtype, device=device)
    else:
        check_apart("out", out, {"a": a, "b": b, "bias": bias})
        increment_version(out)
    shape = _shape_of(world, a, b, out)
    if shape is None:
        return _by_torch(world, a, b, bias, out)
    gemm.last_path = "kernel"  # type: ignore[attr-defined]
    state = OPERATOR.state(world)
    key = _Key(shape, a.dtype, bias is not None, state.tuning)
    plan: _Plan = state.plans.get(key, lambda: _Plan(world, key))
    plan.launch(a, b, bias, out)
    return out


_WARNED: set[str] = set()  # reasons that this process has been told


def _by_torch(
    world: World, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    reason = (
        "rows of a, b or out do not begin at multiples of 16 bytes"
        if has_tensor_cores(world.backend.device)
        else "this GPU's architecture"
    )
    if out.numel() and a.shape[1] and reason not in _WARNED:
        _WARNED.add(reason)
        _log.warning("persistent_ops: gemm takes torch's product: %s", reason)
    gemm.last_path = "torch"  # type: ignore[attr-defined]
    world.workspace.raise_failure()
    with torch.no_grad():
        if bias is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(bias, a, b, out=out)


def _fake(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    _TENSORS.check(None, a, b, bias, out)
    return a.new_empty((a.shape[0], b.shape[1]))


def save_factors(context: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Keep what `gradients_of_factors` needs; a has two or more dimensions."""
    context.a_shape, context.is_b_transposed = a.shape, b.stride(0) == 1 and b.shape[1] > 1
    context.save_for_backward(a if context.needs_input_grad[1] else None, b if context.needs_input_grad[0] else None)


def gradients_of_factors(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of a and b from that of their product, `[M, N]`."""
    a, b = context.saved_tensors
    of_a = of_b = None
    if context.needs_input_grad[0]:
        of_a = gemm(gradient, b.t()).view(context.a_shape)
    if context.needs_input_grad[1]:
        a = a.flatten(0, -2)
        # In the memory layout of b: that of a weight in nn.Linear is the transposed one.
        of_b = gemm(gradient.t(), a).t() if context.is_b_transposed else gemm(a.t(), gradient)
    return of_a, of_b


def _setup_context(context: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, _ = inputs
    save_factors(context, a, b)


def _backward(
    context: Any, gradient: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    of_bias = gradient.sum(0) if context.needs_input_grad[2] else None
    return *gradients_of_factors(context, gradient), of_bias


_operator = TorchOperator(
    "gemm",
    "Tensor a, Tensor b, Tensor? bias",
    multiply,
    fake=_fake,
    outputs=("out",),
    setup_context=_setup_context,
    backward=_backward,
    is_collective=False,
)
