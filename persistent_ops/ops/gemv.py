"""GEMV: gemv_all_reduce on one PE, without communication."""

from __future__ import annotations

import torch

from .gemv_call import execute, gemv_operator

__all__ = ["gemv"]


def _run(
    weight: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    prefetch_weight: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return execute(weight, x, bias, residual, "one_shot", None, prefetch_weight, out, is_alone=True)


_operator = gemv_operator(
    "gemv",
    "bool prefetch_weight",
    _run,
    lambda prefetch_weight, dtype: None,
    "torch.nn.functional.linear",
    is_collective=False,
)


def gemv(
    weight: torch.Tensor,
    x: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    prefetch_weight: bool = False,
) -> torch.Tensor:
    """Multiply a weight by one or a few vectors, on this PE alone.

    ``y[n] = round(weight @ x[n] + bias + residual[n])``, by the kernel of `gemv_all_reduce` and with its guarantees:
    products are added in fp32 and rounded once, repeated calls give the same bits, and the bits of a vector do not
    depend on the other vectors of the call.

    Args:
        weight: `[M, K]`, contiguous (the layout of `nn.Linear`), float32, float16 or bfloat16. Rows of a multiple of 16
            bytes take the fast path.
        x: `[K]`, or `[N, K]` with N from 1 to 16, contiguous, dtype of the weight.
        bias: `[M]`, dtype of the weight. A captured graph keeps reading it.
        residual: shape and dtype of the result.
        out: shape of the result, contiguous, in any memory of the device. It may be `residual`, and must not overlap
            any other argument.
        prefetch_weight: on "cuda", start to read the weight before the previous kernel on the stream has ended (a
            programmatic dependent launch). Unsafe only if that kernel writes the weight. It helps after kernels that
            let this one begin early and then still have work, such as GEMVs of this package. After short kernels it
            costs about 1 us, since x then comes later. With several vectors it helps only for small weights, and does
            nothing if the vectors do not fit into shared memory (16 vectors of about 4900 columns in 16 bits).

    Returns:
        `[M]` or `[N, M]`, dtype of the weight, in ordinary memory of this PE's device.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device, layout or overlap; before any launch.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before, or `po.init()` was not called.
        PersistentOpsError: an error of an earlier operator of this PE, as from `po.check()`.
        NotImplementedError: in a backward pass; the operator is forward only.

    Not collective: other PEs need not call it. On the current stream. The first call with a shape is blocking; after
    it, calls may be captured in a CUDA graph. Replays that contain it should not overlap on a PE: that is safe but
    slow.
    """
    arguments = (weight, x, bias, residual, prefetch_weight)
    result: torch.Tensor = _operator(arguments, {"out": out}, (weight, x), (bias, residual, out))
    return result
