"""gemm_all_to_all.py, where a tile travels while the next one is multiplied; benchmarks/ times this kernel."""

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
def gemm_all_to_all(
    team, out, a, b, staging, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr
):
    launch = pot.begin(team, out)
    rows, steps = M // launch.size, tl.cdiv(K, BK)
    down = tl.cdiv(rows, BM)
    tiles = down * tl.cdiv(N, BN)  # for one PE
    every = tl.maximum((steps - 1) // (BM // ROWS), 1)
    transfer, to = pot.no_transfer(out), launch.rank * tiles  # and its PE and tile, as one number
    for i in range(tl.program_id(0), launch.size * tiles, tl.num_programs(0)):
        pe, tile = (launch.rank + 1 + i // tiles) % launch.size, i % tiles  # own block last
        row, col = tile % down * BM, tile // down * BN
        acc = tl.zeros([BM, BN], tl.float32)
        piece = pot.first_piece(transfer, ROWS, BN)
        for step in range(0, steps):
            acc = tl.dot(a.load([pe * rows + row, step * BK]), b.load([col, step * BK]).T, acc)
            piece = pot.move_piece(transfer, piece, step, every)  # the tile before
        if transfer.height > 0:
            pot.finish_transfer(transfer, piece)
            pot.signal(launch, to // tiles, to % tiles)
            transfer = pot.no_transfer(out)
        r, c = tl.arange(0, BM), tl.arange(0, BN)
        place = out + (launch.rank * rows + row).to(tl.int64) * N + col
        if pe != launch.rank:
            place = staging + (pe * rows + row).to(tl.int64) * N + col
        inside = (row + r < rows)[:, None] & (col + c < N)[None, :]
        tl.store(
            tl.multiple_of(place + r[:, None] * N + c[None, :], (1, 16)), acc.to(out.dtype.element_ty), mask=inside
        )
        if pe != launch.rank:
            at = pot.await_credit(launch, pe)
            if at >= 0:
                target = (
                    pot.peer_ptr(launch, pe, at, out.dtype.element_ty)
                    + (launch.rank * rows + row).to(tl.int64) * N
                    + col
                )
                tl.debug_barrier()  # all threads have staged their elements
                transfer = pot.Transfer(target, place, N, tl.minimum(rows - row, BM), N - col)
                to = pe * tiles + tile
    if transfer.height > 0:
        pot.finish_transfer(transfer, pot.first_piece(transfer, ROWS, BN))
        pot.signal(launch, to // tiles, to % tiles)
    for i in range(tl.program_id(0), (launch.size - 1) * tiles, tl.num_programs(0)):
        pot.wait(launch, (launch.rank + launch.size - 1 - i // tiles) % launch.size, i % tiles, 16)
    pot.await_all_credits(launch)
    pot.leave(launch, out, M * N * 2)


def main() -> None:
    po.init()
    torch.manual_seed(po.rank())
    world, on_gpu = po.world_size(), po.backend() == "cuda"  # the interpreter cannot multiply bfloat16
    m, n, k, dtype = (2048 * world, 8192, 2560, torch.bfloat16) if on_gpu else (200 * world, 304, 104, torch.float16)
    meta = {"BM": 128, "BN": 256, "BK": 64, "ROWS": 8, "num_warps": 8, "num_stages": 3}
    with po.process_group():
        for _ in range(3):
            x, w = (torch.randint(-2, 3, (size, k), device=po.device()).to(dtype) for size in (m, n))
            a, b = TensorDescriptor.from_tensor(x, [128, 64]), TensorDescriptor.from_tensor(w, [256, 64])
            y = gemm_all_to_all(a, b, x.new_empty(m, n), m, n, k, out_shape=(m, n), meta=meta)
            po.check()
            torch.distributed.all_to_all_single(expected := torch.empty_like(y), (x.float() @ w.float().t()).to(dtype))
            assert torch.equal(y, expected)  # to the bit: sums of small whole numbers are exact
    if po.rank() == 0:
        print(f"overlapped_gemm_all_to_all: {m} x {n} x {k}, the bits of torch's product and all-to-all")


if __name__ == "__main__":
    run_on_pes(main, torch.cuda.device_count() or 2)
