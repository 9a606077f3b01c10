"""The GPU kernels compile for sm_80, sm_90 and sm_100 without spills, and need no more registers than the table says.

What is compiled covers every pair of dtype, pooling and row shape on sm_90 (18 of 54 combinations), each dtype and
pooling with tables of all row shapes, int32 indices and offsets, and a few combinations and the barrier on every
architecture. The table has the whole product; `python tests/kernel_resources.py --write` makes it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

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
    Embedding,
    covering,
    everything,
    nvcc_release,
    row,
)

from persistent_ops.ops.gemv_plan import OPERATOR as GEMV
from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.jit import KernelResources

_COMBINATIONS = {combination.name: combination for combination in covering()}
_AT_ONCE = 2  # compilers that run ahead of the tests


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Callable[[str], KernelResources]]:
    """Compiles what a test asks for, and meanwhile what the next ones will; each waits for its own alone."""
    try:
        nvcc_release()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    asked = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    pool = ThreadPoolExecutor(_AT_ONCE)
    names = dict.fromkeys(name for name in asked if name in _COMBINATIONS)
    ahead = {name: pool.submit(_COMBINATIONS[name].compile) for name in names}

    def resources_of(name: str) -> KernelResources:
        is_left = ahead[name].cancel()  # nobody has begun it: the tests are in another order
        return _COMBINATIONS[name].compile() if is_left else ahead[name].result()

    yield resources_of
    pool.shutdown(cancel_futures=True)


def _check(name: str, threads: int, registers: int, spill_bytes: int) -> None:
    assert spill_bytes == 0, f"{name} spills {spill_bytes} bytes per thread at {registers} registers"
    # The register file is given out in units of 8 per thread and 256 per warp. A GEMV has one WG per SM; with a single
    # vector, or where it prefetches, there is room for a successor's beside it.
    is_alone = name.startswith("gemv_all_reduce") and " 1 vectors" not in name and "prefetches" not in name
    is_alone |= name.startswith("all_reduce") and threads > 256  # as all_reduce's largest WGs
    blocks = 1 if is_alone else BLOCKS_PER_SM
    held = -(-registers // 8) * 8 * threads * blocks
    assert held <= REGISTERS_PER_SM, f"{name}: {blocks} WGs of {threads} threads hold {held} registers of an SM"


@pytest.mark.slow
@pytest.mark.parametrize("name", _COMBINATIONS)
def test_no_spills(compiled: Callable[[str], KernelResources], name: str) -> None:
    used = compiled(name)
    _check(name, _COMBINATIONS[name].threads, used.registers, used.spill_store_bytes + used.spill_load_bytes)
    assert used.registers > 16, "so few registers mean that the kernel was compiled to nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", _COMBINATIONS)
def test_the_table_says_what_is_compiled(compiled: Callable[[str], KernelResources], name: str) -> None:
    table = json.loads(TABLE.read_text())
    if table["nvcc"] != nvcc_release():
        pytest.skip(f"the table is of nvcc {table['nvcc']}, this is {nvcc_release()}")
    assert table["kernels"].get(name) == row(_COMBINATIONS[name], compiled(name)), f"run `{table['command']}`"


def test_nothing_in_the_table_spills() -> None:
    kernels = json.loads(TABLE.read_text())["kernels"]
    assert set(kernels) == {combination.name for combination in everything()}
    for name, found in kernels.items():
        _check(name, found["threads"], found["registers"], found["spill_bytes"])


def test_a_plan_leaves_room_for_what_a_kernel_has_beside_its_arena() -> None:
    kernels = json.loads(TABLE.read_text())["kernels"]
    used = [found["shared_bytes"] for name, found in kernels.items() if name.startswith("gemv_all_reduce")]
    assert 0 < max(used) <= GEMV.description.constants["kStaticBytes"]


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
