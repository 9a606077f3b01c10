"""A matrix product and an all-to-all of its rows in one launch, in Triton: tiles for other PEs come first."""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # before triton is imported
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import persistent_ops as po
import persistent_ops.triton as pot
from persistent_ops.testing.pes import run_on_pes


@pot.operator(contract=("M", "N", "K"), phases={16: "tile {index} of its product"})
@triton.jit
def gemm_all_to_all(team, out, a, b, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    launch = pot.begin(team, out)
    rows, across = M // launch.size, tl.cdiv(N, BN)
    tiles = tl.cdiv(rows, BM) * across  # for one PE
    for i in range(tl.program_id(0), launch.size * tiles, tl.num_programs(0)):
        pe = (launch.rank + 1 + i // tiles) % launch.size  # own block last
        row, col = i % tiles // across * BM, i % tiles % across * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):  # no wait in here
            acc = tl.dot(a.load([pe * rows + row, k]), b.load([col, k]).T, acc)
        at = pot.await_credit(launch, pe)
        if at >= 0:
            r, c = row + tl.arange(0, BM), col + tl.arange(0, BN)
            inside = (r < rows)[:, None] & (c < N)[None, :]
            pot.put_block(launch, pe, at, launch.rank * rows + r, c, N, acc.to(out.dtype.element_ty), inside)
            pot.signal(launch, pe, i % tiles)
    for i in range(tl.program_id(0), (launch.size - 1) * tiles, tl.num_programs(0)):
        pot.wait(launch, (launch.rank + launch.size - 1 - i // tiles) % launch.size, i % tiles, 16)
    pot.await_all_credits(launch)
    pot.leave(launch, out, M * N * 2)


def main(product: pot.TritonOperator = gemm_all_to_all, num_buffers: int = 0) -> None:
    po.init()
    torch.manual_seed(po.rank())
    world, on_gpu = po.world_size(), po.backend() == "cuda"  # the interpreter cannot multiply bfloat16
    m, n, k, dtype = (2048 * world, 8192, 2560, torch.bfloat16) if on_gpu else (200 * world, 304, 104, torch.float16)
    meta = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}
    with po.process_group():
        for _ in range(3):
            x, w = (torch.randint(-2, 3, (size, k), device=po.device()).to(dtype) for size in (m, n))
            a, b = TensorDescriptor.from_tensor(x, [128, 64]), TensorDescriptor.from_tensor(w, [256, 64])
            y = product(a, b, *(x.new_empty(m, n) for _ in range(num_buffers)), m, n, k, out_shape=(m, n), meta=meta)
            torch.distributed.all_to_all_single(expected := torch.empty_like(y), (x.float() @ w.float().t()).to(dtype))
            assert torch.equal(y, expected)  # to the bit: sums of small whole numbers are exact
    if po.rank() == 0:
        print(f"{product.__name__}: {m} x {n} x {k}, the bits of torch's product and all-to-all")


if __name__ == "__main__":
    run_on_pes(main, torch.cuda.device_count() or 2)
