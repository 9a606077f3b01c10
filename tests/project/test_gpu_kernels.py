"""GPU kernels compile for sm_80, sm_90 and sm_100 without spills or stack, and as many WGs as planned fit an SM."""

from __future__ import annotations

import pytest
from gpu_kernels import ARCHITECTURES, BLOCKS_PER_SM, SAMPLE, GpuKernel, operator_modules

from persistent_ops.ops.gemv_plan import OPERATOR as GEMV
from persistent_ops.runtime.compile.description import COMM, describe
from persistent_ops.runtime.compile.toolchain import find_nvcc
from persistent_ops.runtime.errors import CompileError

REGISTERS_PER_SM = 1 << 16


def _blocks_per_sm(kernel: GpuKernel) -> int:
    """Return how many WGs of a kernel must fit on an SM."""
    request = kernel.request
    if request.name == "embedding_inputs":
        return 1 if request.traces else 1024 // request.shape.threads  # with few threads they find room beside others
    # A GEMV has one WG per SM. With a single vector there is room for the next launch's WG beside it.
    is_alone = request.name == "gemv_all_reduce" and dict(request.config or ())["vectors"] != "1"
    is_alone |= request.name == "all_reduce" and request.shape.threads > 256
    is_alone |= request.name in ("embedding_backward", "gemm", "gemm_exchange")  # whose grids are what fits
    return 1 if is_alone else BLOCKS_PER_SM


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SAMPLE, ids=lambda kernel: kernel.name)
def test_what_a_kernel_needs_of_an_sm(kernel: GpuKernel) -> None:
    try:
        find_nvcc()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    used, _ = kernel.compiled()
    assert used.registers > 16, "so few registers mean that the kernel was compiled to nothing"
    if not kernel.request.traces:
        assert used.spill_store_bytes == used.spill_load_bytes == 0, f"it spills at {used.registers} registers"
        assert used.stack_bytes == 0, "each thread has an array in memory: it is indexed at run time"
    # The register file is given out in units of 8 per thread.
    threads, blocks = kernel.request.shape.threads, _blocks_per_sm(kernel)
    held = -(-used.registers // 8) * 8 * threads * blocks
    assert held <= REGISTERS_PER_SM, f"{blocks} WGs of {threads} threads hold {held} registers of an SM"
    if kernel.request.name == "gemv_all_reduce":  # a plan leaves room for what a kernel has beside its arena
        assert 0 < used.shared_bytes <= GEMV.description.queries["static_bytes"](describe(COMM).constants["kPeStep"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_reduce", "embedding_inversion", "gemv_all_reduce", "sparse_all_reduce"])
def test_a_wg_has_room_for_as_many_pes_as_a_world_may_have(name: str) -> None:
    """Otherwise its compiler refuses the kernel."""
    try:
        find_nvcc()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    request = next(kernel.request for kernel in SAMPLE if kernel.request.name == name)
    used, _ = GpuKernel(request.with_config(pes=describe(COMM).constants["kMostPes"])).compiled()
    assert used.shared_bytes > 4096


def test_every_operator_offers_kernels() -> None:
    operators = {m.OPERATOR.name for m in operator_modules() if hasattr(m, "OPERATOR") and m.OPERATOR.has_kernel}
    assert {each.request.name for each in SAMPLE} == operators | {"barrier"}
    assert {each.arch for each in SAMPLE} == set(ARCHITECTURES)
    assert len({each.name for each in SAMPLE}) == len(SAMPLE)
