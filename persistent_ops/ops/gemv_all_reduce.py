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

    ``y[n] = round(sum over PEs r of (weight_r @ x_r[n]) + bias + residual[n])`` on every PE. Products are added in
    fp32, the PEs' sums are added in rank order, and the result is rounded once. If bias and residual agree, all PEs get
    the same bits. Repeated calls and both algorithms give the same bits too. The bits of a vector do not depend on the
    other vectors of the call. All this holds for fixed K_r per PE, one backend and one `wire_dtype`.

    Args:
        weight: `[M, K_r]`, contiguous (the layout of `nn.Linear`), float32, float16 or bfloat16. M is the same on every
            PE; K_r may differ and may be 0. Rows of a multiple of 16 bytes take the fast path.
        x: `[K_r]`, or `[N, K_r]` with N from 1 to 16, contiguous, dtype of the weight.
        bias: `[M]`, dtype of the weight; added once. All PEs pass a bias, or none does. A captured graph keeps reading
            it.
        residual: shape and dtype of the result; added once. All PEs pass a residual, or none does. With two shots, the
            owner of a row adds its own bias and residual, so all PEs get the owner's sum.
        out: shape of the result, contiguous, in any memory of the device. It may be `residual`, and must not overlap
            any other argument.
        algorithm: "one_shot" sends each PE's sums to every PE. "two_shot" sends them to the owner of a row, which sends
            the result to every PE: fewer bytes, one more latency. "auto" chooses by the bytes that a PE would send.
        wire_dtype: dtype in which sums travel between PEs. None: float32, which keeps the result within the error of an
            fp32 sum rounded once. The weight's dtype: half the bytes and one more rounding per PE.
        prefetch_weight: on "cuda", start to read the weight before the previous kernel on the stream has ended (a
            programmatic dependent launch). Unsafe only if that kernel writes the weight. It helps after kernels that
            let this one begin early and then still have work, such as GEMVs of this package. After short kernels it
            costs about 1 us, since x then comes later. With several vectors it helps only for small weights, and does
            nothing if the vectors do not fit into shared memory (16 vectors of about 4900 columns in 16 bits).

    Returns:
        `[M]` or `[N, M]`, dtype of the weight, in ordinary memory of this PE's device.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device, layout or overlap; before any launch.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before.
        PeerTimeoutError, ContractMismatchError: a peer did not answer, or launched something else (another M, N, dtype
            or algorithm). On "cuda" the next operator or `po.check()` raises them, and rows that did not arrive are
            NaN.
        NotImplementedError: in a backward pass; the operator is forward only.

    Collective, on the current stream. The first call with a shape is blocking; after it, calls may be captured in a
    CUDA graph. While the operator waits for its peers, collectives of other libraries on other streams may find no room
    on the GPU. So all PEs must start them in the same order relative to this operator. Source: fused GEMV + AllReduce
    of "Optimizing Distributed ML Communication with Fused Computation-Collective Operations" (SC24), section III-B.
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
