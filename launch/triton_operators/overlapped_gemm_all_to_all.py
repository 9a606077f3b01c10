"""The same as gemm_all_to_all.py, where a tile travels in pieces while the next one is multiplied."""

from gemm_all_to_all import main  # first: without a GPU it chooses Triton's interpreter

# isort: split
import torch
import triton
import triton.language as tl

import persistent_ops.triton as pot
from persistent_ops.testing.pes import run_on_pes

ROWS = tl.constexpr(4)  # of a piece


@pot.operator(contract=("M", "N", "K"), phases={16: "tile {index} of its product"})
@triton.jit
def overlapped_gemm_all_to_all(team, out, a, b, staging, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    launch = pot.begin(team, out)
    rows, steps = M // launch.size, tl.cdiv(K, BK)
    down = tl.cdiv(rows, BM)
    tiles = down * tl.cdiv(N, BN)  # for one PE
    transfer, index, granted, at = pot.no_transfer(out), 0, launch.rank, launch.output
    for i in range(tl.program_id(0), launch.size * tiles, tl.num_programs(0)):
        pe = (launch.rank + 1 + i // tiles) % launch.size  # own block last
        row, col = i % tiles % down * BM, i % tiles // down * BN
        acc = tl.zeros([BM, BN], tl.float32)
        piece = pot.first_piece(transfer, ROWS, BN)
        for step in range(0, steps):
            acc = tl.dot(a.load([pe * rows + row, step * BK]), b.load([col, step * BK]).T, acc)
            piece = pot.move_piece(transfer, piece, step, tl.maximum((steps - 1) // (BM // ROWS), 1))
        if transfer.height > 0:
            pot.finish_transfer(transfer, piece)
            pot.signal(launch, granted, index)
            transfer = pot.no_transfer(out)
        r, c = tl.arange(0, BM), tl.arange(0, BN)
        first = (launch.rank * rows + row).to(tl.int64) * N + col  # element of the receiver's output
        place = staging + (pe * rows + row).to(tl.int64) * N + col
        if pe == launch.rank:
            place = out + first
        elements = tl.multiple_of(place + r[:, None] * N + c[None, :], (1, 16))
        tl.store(elements, acc.to(out.dtype.element_ty), mask=(row + r < rows)[:, None] & (col + c < N)[None, :])
        if pe != granted:
            at, granted = pot.await_credit(launch, pe), pe
        if (pe != launch.rank) & (at >= 0):
            tl.debug_barrier()  # all threads have stored their part of the tile
            target = pot.peer_ptr(launch, pe, at, out.dtype.element_ty) + first
            transfer, index = pot.Transfer(target, place, N, tl.minimum(rows - row, BM), N - col), i % tiles
    if transfer.height > 0:
        pot.finish_transfer(transfer, pot.first_piece(transfer, ROWS, BN))
        pot.signal(launch, granted, index)
    for i in range(tl.program_id(0), (launch.size - 1) * tiles, tl.num_programs(0)):
        pot.wait(launch, (launch.rank + launch.size - 1 - i // tiles) % launch.size, i % tiles, 16)
    pot.await_all_credits(launch)
    pot.leave(launch, out, M * N * 2)


if __name__ == "__main__":
    run_on_pes(main, torch.cuda.device_count() or 2, overlapped_gemm_all_to_all, 1)
