"""A matrix product in Triton, without communication: what `triton_gemm_all_to_all` is compared with."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gemm(
    a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLATTEN: tl.constexpr
):  # fmt: skip
    """Store a @ b.t(); a and b are tensor descriptors, and tiles are those of the operator."""
    down = tl.cdiv(M, BM)
    for i in tl.range(tl.program_id(0), down * tl.cdiv(N, BN), tl.num_programs(0), flatten=FLATTEN):
        row, col = i % down * BM, i // down * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(a.load([row, k]), b.load([col, k]).T, acc)
        r, c = row + tl.arange(0, BM), col + tl.arange(0, BN)
        place = out + r.to(tl.int64)[:, None] * N + c[None, :]
        tl.store(tl.multiple_of(place, (1, 16)), acc.to(out.dtype.element_ty), mask=(r < M)[:, None] & (c < N)[None, :])
