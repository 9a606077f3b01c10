"""Kernels that use the device functions of a module, which `kernels_of` names."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import triton
import triton.language as tl

from persistent_ops.triton import device as pot

__all__ = ["kernels_of"]


@functools.cache
def kernels_of(device: ModuleType) -> ModuleType:
    """Return a copy of this module that uses other device functions."""
    spec = importlib.util.find_spec(__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.pot = device  # type: ignore[attr-defined]
    return module


@triton.jit
def exchange(team, out, x, came, rows, stride):
    """Send a block to the next PE, wait for one and get one."""
    launch = pot.begin(team, out)
    peer = (launch.rank + 1) % launch.size
    row, col = tl.arange(0, 16), tl.arange(0, 64)
    mask = tl.broadcast_to((row < rows)[:, None], (16, 64))
    at = pot.await_credit(launch, peer)
    if at >= 0:
        value = tl.load(x + row[:, None] * 64 + col[None, :])
        pot.put_block(launch, peer, at, row, col, stride, value, mask)
        pot.signal(launch, peer, 3)
    arrived = pot.wait(launch, peer, 3, 16)
    tl.store(came, arrived.to(tl.int64))
    if arrived:
        block = pot.get_block(launch, peer, pot.offset_of(launch, x), row, col, stride, tl.bfloat16, mask)
        tl.store(out + row[:, None] * 64 + col[None, :], block)
    pot.await_all_credits(launch)
    pot.leave(launch, out, 2048)


@triton.jit
def misdirect(team, out):
    """Signal with an index that no word has."""
    launch = pot.begin(team, out)
    pot.signal(launch, 2, 99)


@triton.jit
def fill(team, out):
    """Store something at the end."""
    launch = pot.begin(team, out)
    tl.debug_barrier()  # what follows reuses shared memory without another one
    tl.store(out + tl.arange(0, 128), tl.full([128], 1, tl.bfloat16))
    pot.leave(launch, out, 256)


@triton.jit
def copy(team, out, stride):
    """Get a block from a PE, and put it to another one."""
    launch = pot.begin(team, out)
    row, col = tl.arange(0, 16), tl.arange(0, 64)
    mask = tl.broadcast_to((row < launch.size)[:, None], (16, 64))
    block = pot.get_block(launch, 0, 0, row, col, stride, tl.bfloat16, mask)
    pot.put_block(launch, 2, 0, row, col, stride, block, mask)


@triton.jit
def product(team, out, a, b, K, TMA: tl.constexpr):
    """Wait for `a` and `b`, multiply them, send the product."""
    launch = pot.begin(team, out)
    row, col, at = tl.arange(0, 128), tl.arange(0, 128), tl.arange(0, 64)
    acc = tl.zeros([128, 128], tl.float32)
    if pot.wait(launch, 2, 0, 16):
        for k in range(0, K, 64):
            if TMA:
                acc = tl.dot(a.load([0, k]), b.load([0, k]).T, acc)
            else:
                x = tl.load(a + row[:, None] * K + (k + at)[None, :])
                acc = tl.dot(x, tl.load(b + col[None, :] * K + (k + at)[:, None]), acc)
    mask = tl.full([128, 128], 1, tl.int1)
    pot.put_block(launch, 2, launch.output, row, col, 128, acc.to(tl.bfloat16), mask)
    pot.signal(launch, 2, 0)


@triton.jit
def gemm_all_to_all(team, out, a, b, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    launch = pot.begin(team, out)
    rows = M // launch.size
    across = tl.cdiv(N, BN)
    tiles = tl.cdiv(rows, BM) * across  # for one PE
    for i in range(tl.program_id(0), launch.size * tiles, tl.num_programs(0)):
        pe = (launch.rank + 1 + i // tiles) % launch.size
        row, col = i % tiles // across * BM, i % tiles % across * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(a.load([pe * rows + row, k]), b.load([col, k]).T, acc)
        at = pot.await_credit(launch, pe)
        if at >= 0:
            r, c = row + tl.arange(0, BM), col + tl.arange(0, BN)
            mask = (r < rows)[:, None] & (c < N)[None, :]
            pot.put_block(launch, pe, at, launch.rank * rows + r, c, N, acc.to(out.dtype.element_ty), mask)
            pot.signal(launch, pe, i % tiles)
    for i in range(tl.program_id(0), (launch.size - 1) * tiles, tl.num_programs(0)):
        pot.wait(launch, (launch.rank + launch.size - 1 - i // tiles) % launch.size, i % tiles, 16)
    pot.await_all_credits(launch)
    pot.leave(launch, out, M * N * 2)
