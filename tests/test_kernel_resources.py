"""The GPU kernels compile for sm_80, sm_90 and sm_100 without spills, and need no more registers than the table says.

What is compiled covers every pair of dtype, pooling and row shape on sm_90 (18 of 54 combinations), each dtype and
pooling with tables of all row shapes, int32 indices and offsets, and a few combinations and the barrier on every
architecture. The table has the whole product; `python tests/kernel_resources.py --write` makes it.
"""

from __future__ import annotations

import functools
import itertools
import json

import pytest
from kernel_resources import (
    ALL_SHAPES,
    ARCHITECTURES,
    BLOCKS_PER_SM,
    DTYPES,
    POOLINGS,
    REGISTERS_PER_SM,
    SHAPES,
    TABLE,
    Combination,
    Embedding,
    compile_all,
    covering,
    everything,
    nvcc_release,
    row,
)

from persistent_ops.ops.gemv_plan import _STATIC_BYTES
from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.jit import KernelResources

_COMBINATIONS = {combination.name: combination for combination in covering()}


@functools.cache
def _compiled() -> dict[str, tuple[Combination, KernelResources]]:
    return compile_all(_COMBINATIONS.values())


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[Combination, KernelResources]]:
    try:
        nvcc_release()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    return _compiled()


def _check(name: str, threads: int, registers: int, spill_bytes: int) -> None:
    assert spill_bytes == 0, f"{name} spills {spill_bytes} bytes per thread at {registers} registers"
    # The register file is given out in units of 8 per thread and 256 per warp. A GEMV has one WG per SM; with a single
    # vector, or where it prefetches, there is room for a successor's beside it.
    is_alone = name.startswith("gemv_all_reduce") and " 1 vectors" not in name and "prefetches" not in name
    blocks = 1 if is_alone else BLOCKS_PER_SM
    held = -(-registers // 8) * 8 * threads * blocks
    assert held <= REGISTERS_PER_SM, f"{name}: {blocks} WGs of {threads} threads hold {held} registers of an SM"


@pytest.mark.slow
@pytest.mark.parametrize("name", _COMBINATIONS)
def test_no_spills(compiled: dict[str, tuple[Combination, KernelResources]], name: str) -> None:
    combination, used = compiled[name]
    _check(name, combination.threads, used.registers, used.spill_store_bytes + used.spill_load_bytes)
    assert used.registers > 16, "so few registers mean that the kernel was compiled to nothing"


@pytest.mark.slow
def test_the_table_says_what_is_compiled(compiled: dict[str, tuple[Combination, KernelResources]]) -> None:
    table = json.loads(TABLE.read_text())
    if table["nvcc"] != nvcc_release():
        pytest.skip(f"the table is of nvcc {table['nvcc']}, this is {nvcc_release()}")
    different = {
        name: (table["kernels"].get(name), row(*compiled[name]))
        for name in compiled
        if table["kernels"].get(name) != row(*compiled[name])
    }
    assert not different, f"run `{table['command']}`; in the table and now: {different}"


def test_nothing_in_the_table_spills() -> None:
    kernels = json.loads(TABLE.read_text())["kernels"]
    assert set(kernels) == {combination.name for combination in everything()}
    for name, found in kernels.items():
        _check(name, found["threads"], found["registers"], found["spill_bytes"])


def test_a_plan_leaves_room_for_what_a_kernel_has_beside_its_arena() -> None:
    kernels = json.loads(TABLE.read_text())["kernels"]
    used = [found["shared_bytes"] for name, found in kernels.items() if name.startswith("gemv_all_reduce")]
    assert 0 < max(used) <= _STATIC_BYTES


def test_the_set_covers_every_pair() -> None:
    on_hopper = [c for c in covering() if isinstance(c, Embedding) and c.arch == "sm_90"]
    single = [c for c in on_hopper if c.shapes != ALL_SHAPES]
    assert {(c.dtype, c.pooling) for c in single} == set(itertools.product(DTYPES, POOLINGS))
    assert {(c.dtype, c.shapes) for c in single} == set(itertools.product(DTYPES, SHAPES))
    assert {(c.pooling, c.shapes) for c in single} == set(itertools.product(POOLINGS, SHAPES))
    assert {c.dtype for c in on_hopper if c.shapes == ALL_SHAPES} == set(DTYPES)
    assert {c.pooling for c in on_hopper if c.shapes == ALL_SHAPES} == set(POOLINGS)
    assert {c.arch for c in covering()} == set(ARCHITECTURES)
    assert set(covering()) <= set(everything())
