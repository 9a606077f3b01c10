"""Fused GEMV + AllReduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .gemv_call import check_choices, execute, gemv_operator

__all__ = ["gemv_all_reduce", "reference"]

_operator = gemv_operator(
    "gemv_all_reduce",
    "str algorithm, ScalarType? wire_dtype, bool prefetch_weight",
    execute,
    check_choices,
    "torch.nn.functional.linear + all_reduce",
    is_collective=True,
)


def gemv_all_reduce(
    weight: torch.Tensor,
    x: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
    prefetch_weight: bool = False,
) -> torch.Tensor:
    """Multiply this PE's shard of a weight by one or a few vectors and sum the results over all PEs, in one kernel.

    ``y[n] = round(sum over PEs r of (weight_r @ x_r[n]) + bias + residual[n])``, on every PE. Products are added up in
    fp32, the PEs' sums in rank order, and the result is rounded once. Where bias and residual agree, all PEs get the
    same bits; so do repeated calls, both algorithms, and a vector whatever others it travels with (N). All this holds
    for one K_r per PE, one backend and one `wire_dtype`.

    Args:
        weight: `[M, K_r]`, contiguous (the layout of `nn.Linear`), float32, float16 or bfloat16. M is the same on every
            PE, K_r may differ and may be 0. Rows of a multiple of 16 bytes take the fast path.
        x: `[K_r]`, or `[N, K_r]` with N from 1 to 16, contiguous, dtype of the weight.
        bias: `[M]`, dtype of the weight; added once. The PEs pass one all or none. A captured graph keeps reading it.
        residual: of the result's shape and dtype; added once. The PEs pass one all or none. In two shots a row's owner
            adds its own bias and residual, so all PEs get its sum.
        out: of the result's shape, contiguous, any memory of the device; it may be `residual`, and overlaps
            nothing else that is passed.
        algorithm: "one_shot" sends each PE's sums to every PE, "two_shot" to the owner of a row, which sends every PE
            the result: fewer bytes, one more latency. "auto" chooses by the bytes that a PE would send.
        wire_dtype: of the sums under way: None for float32, which keeps the result within the error of an fp32 sum
            rounded once, or the weight's dtype for half the bytes and one more rounding per PE.
        prefetch_weight: on "cuda", start reading the weight before the kernel before this one on the stream has ended
            (a programmatic dependent launch). Unsafe only where that kernel writes the weight. It pays after kernels
            that let this one begin early and then still have work, such as GEMVs of this package; after short ones it
            costs about 1 us, since x then comes later. With several vectors it pays for small weights alone, and does
            nothing where they find no room on a multiprocessor (16 vectors of about 4900 columns in 16 bits).

    Returns:
        `[M]` or `[N, M]`, dtype of the weight, in ordinary memory of this PE's device.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device, layout or overlap; before anything is launched.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before.
        PeerTimeoutError, ContractMismatchError: a peer did not answer, or launched something else (another M, N, dtype
            or algorithm). On "cuda" they come with the next operator or `po.check()`; rows that did not arrive are NaN.
        NotImplementedError: in a backward pass; the operator is forward only.

    Collective, on the current stream; the first call with a shape is blocking. May be captured in a CUDA graph after
    it. Collectives of other libraries on other streams must meet it in the same order on all PEs: while it waits for
    its peers they may find no room on the GPU.
    Source: fused GEMV + AllReduce of "Optimizing Distributed ML Communication with Fused Computation-Collective
    Operations" (SC24), section III-B.
    """
    arguments = (weight, x, bias, residual, algorithm, wire_dtype, prefetch_weight)
    result: torch.Tensor = _operator(arguments, {"out": out}, (weight, x), (bias, residual, out))
    return result


def reference(
    weights: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the result in fp64 on the CPU, from every PE's weight and x.

    Returns:
        `[M]` or `[N, M]`, float64, not rounded.
    """
    total = sum(x.detach().cpu().double() @ w.detach().cpu().double().T for w, x in zip(weights, xs, strict=True))
    for addend in (bias, residual):
        if addend is not None:
            total = total + addend.detach().cpu().double()
    return total  # type: ignore[return-value]
