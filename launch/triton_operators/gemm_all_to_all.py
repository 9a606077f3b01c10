"""GEMM + All-to-All in one launch: `all_to_all_single(a @ b.t())`. A tile travels while the next one is multiplied."""

import triton
import triton.language as tl

import persistent_ops.triton as pot


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
