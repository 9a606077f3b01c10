"""GEMV: the half of gemv_all_reduce that communicates with nobody."""

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
    products are added up in fp32 and rounded once, repeated calls give the same bits, and so does a vector whatever
    others it travels with.

    Args:
        weight: `[M, K]`, contiguous (the layout of `nn.Linear`), float32, float16 or bfloat16. Rows of a multiple of 16
            bytes take the fast path.
        x: `[K]`, or `[N, K]` with N from 1 to 16, contiguous, dtype of the weight.
        bias: `[M]`, dtype of the weight. A captured graph keeps reading it.
        residual: of the result's shape and dtype.
        out: of the result's shape, contiguous, any memory of the device; it may be `residual`, and overlaps
            nothing else that is passed.
        prefetch_weight: on "cuda", start reading the weight before the kernel before this one on the stream has ended
            (a programmatic dependent launch). Unsafe only where that kernel writes the weight. It pays after kernels
            that let this one begin early and then still have work, such as GEMVs of this package; after short ones it
            costs about 1 us, since x then comes later. With several vectors it pays for small weights alone, and does
            nothing where they find no room on a multiprocessor (16 vectors of about 4900 columns in 16 bits).

    Returns:
        `[M]` or `[N, M]`, dtype of the weight, in ordinary memory of this PE's device.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device, layout or overlap; before anything is launched.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before, or `po.init()` was not called.
        PersistentOpsError: what an earlier operator of this PE left behind, as from `po.check()`.
        NotImplementedError: in a backward pass; the operator is forward only.

    Not collective: the other PEs need not call it. On the current stream; the first call with a shape is blocking. May
    be captured in a CUDA graph after it; replays that contain it should not overlap on a PE, which is safe but slow.
    """
    arguments = (weight, x, bias, residual, prefetch_weight)
    result: torch.Tensor = _operator(arguments, {"out": out}, (weight, x), (bias, residual, out))
    return result
