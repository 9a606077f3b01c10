"""Operators in Triton for tests: an all-gather that stores to peers, an all-reduce that loads from them; calls of them.

The interpreter runs the work-groups of a PE one after the other, so none waits for a later one of a peer: each signals
all that it has before it waits, and waits for the words of its own number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from interpreters import hasten

import persistent_ops as po
import persistent_ops.triton as pot

__all__ = [
    "HEAP_BYTES",
    "SHAPE",
    "added",
    "all_gather",
    "another_all_gather",
    "gather",
    "misdirected",
    "numbers_of",
    "one_word",
    "sum_of_all",
    "total",
]

HEAP_BYTES = 8 << 20
SHAPE = (6, 80)

hasten()


@pot.operator(contract=("M", "N"), phases={16: "tile {index} of its rows"})
@triton.jit
def all_gather(team, out, x, M, N, silent, BM: tl.constexpr, BN: tl.constexpr):
    """Gather `[M, N]` of every PE; a PE that is `silent` stores its tiles and signals none."""
    launch = pot.begin(team, out)
    across = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * across
    for step in range(1, launch.size + 1):
        pe = (launch.rank + step) % launch.size
        at = pot.await_credit(launch, pe)
        if at >= 0:
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                rows = tile // across * BM + tl.arange(0, BM)
                cols = tile % across * BN + tl.arange(0, BN)
                inside = (rows < M)[:, None] & (cols < N)[None, :]
                block = tl.load(x + rows[:, None] * N + cols[None, :], mask=inside)
                pot.put_block(launch, pe, at, launch.rank * M + rows, cols, N, block, inside)
                if (pe != launch.rank) & (silent == 0):
                    pot.signal(launch, pe, tile)
    for step in range(1, launch.size):
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            pot.wait(launch, (launch.rank + step) % launch.size, tile, 16)
    pot.await_all_credits(launch)
    pot.leave(launch, out, launch.size * M * N * (x.dtype.element_ty.primitive_bitwidth // 8))


@pot.operator(contract=("count",), phases={20: "its load of part {index}"})
@triton.jit
def sum_of_all(team, out, x, count, BLOCK: tl.constexpr):
    """Add up `x` of all PEs, a tensor of `po.empty`; it may be written again when the launch has ended."""
    launch = pot.begin(team, out)
    place = pot.offset_of(launch, x)
    pot.await_all_credits(launch)
    for part in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        cols = part * BLOCK + tl.arange(0, BLOCK)
        inside = (cols < count)[None, :]
        total = tl.zeros([1, BLOCK], tl.float32)
        for pe in range(launch.size):
            row = pot.get_block(launch, pe, place, tl.arange(0, 1), cols, count, x.dtype.element_ty, inside)
            total += row.to(tl.float32)
        tl.store(out + cols[None, :], total.to(out.dtype.element_ty), mask=inside)
        for step in range(1, launch.size):
            pot.signal(launch, (launch.rank + step) % launch.size, part)
    for step in range(1, launch.size):
        for part in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            pot.wait(launch, (launch.rank + step) % launch.size, part, 20)
    pot.leave(launch, out, count * (out.dtype.element_ty.primitive_bitwidth // 8))


@pot.operator(contract=("index",))
@triton.jit
def one_word(team, out, index, signals, waits):
    """Signal a word to the next PE, wait for one of the one before; store whether it came."""
    launch = pot.begin(team, out)
    pot.await_all_credits(launch)
    if signals != 0:
        pot.signal(launch, (launch.rank + 1) % launch.size, index)
    if waits != 0:
        came = pot.wait(launch, (launch.rank + launch.size - 1) % launch.size, index, 16)
        tl.store(out, came.to(tl.float32))
    pot.leave(launch, out, 4)


@pot.operator()
@triton.jit
def misdirected(team, out, pe, index):
    """Signal a word that nobody waits for, and wait for word 0 of the next PE."""
    launch = pot.begin(team, out)
    pot.signal(launch, pe, index)
    pot.wait(launch, (launch.rank + 1) % launch.size, 0, 16)
    pot.await_all_credits(launch)
    pot.leave(launch, out, 4)


def another_all_gather() -> pot.TritonOperator:
    """Return an operator that differs from `all_gather` in its source."""

    @pot.operator(contract=("M", "N"), phases={16: "tile {index} of its rows"})
    @triton.jit
    def all_gather(team, out, x, M, N, silent, BM: tl.constexpr, BN: tl.constexpr):
        launch = pot.begin(team, out)
        pot.await_all_credits(launch)
        pot.leave(launch, out, launch.size * M * N * 4)

    return all_gather


# ---- calls -----------------------------------------------------------------------------------------------------------


def numbers_of(iteration: int, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    """Return what the PEs pass, on this PE's device."""
    rng = torch.Generator().manual_seed(iteration)
    return torch.randn((po.world_size(), *shape), generator=rng).to(po.device())


def gather(
    numbers: torch.Tensor, *, silent: bool = False, op: Callable[..., torch.Tensor] = all_gather, **options: Any
) -> torch.Tensor:
    """Gather `numbers_of` all PEs, by default in four tiles of each."""
    world, rows, columns = numbers.shape
    options = {"meta": {"BM": 4, "BN": 64}, **options}
    if "out" not in options:
        options = {"out_shape": (world * rows, columns), **options}
    return op(numbers[po.rank()], rows, columns, int(silent), **options)


def added(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Add up what all PEs have in `x`, a tensor of `po.empty`."""
    return sum_of_all(x, x.numel(), **{"out_shape": x.shape, "meta": {"BLOCK": 128}, **options})


def total(numbers: torch.Tensor) -> torch.Tensor:
    """Return what that is."""
    result = torch.zeros_like(numbers[0])
    for part in numbers:
        result += part
    return result
