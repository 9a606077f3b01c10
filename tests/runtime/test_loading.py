"""A kernel's code is on the GPU when `load` returns: its launch must not wait for a kernel that waits for a peer."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from worlds import in_world

from persistent_ops.runtime.backend import KernelRequest, LaunchShape
from persistent_ops.runtime.compile import jit
from persistent_ops.runtime.compile.description import description_of
from persistent_ops.runtime.world import current, upload

CUDA = Path(__file__).resolve().parents[2] / "cuda"
# Waits for a flag, and reports whether it has come in time. Kernels with different numbers are loaded apart.
HEADER = """
#pragma once
#include "platform/entry.cuh"
#include "platform/memory.cuh"

namespace po::wait_probe {

struct Config {
  int number = 0;
};

struct Plan {
  uint64_t unused;
};
PO_DESCRIBE(Plan, unused)

struct Call {
  const uint64_t* flag;
  uint64_t* found;
  uint64_t timeout_ns;
};
PO_DESCRIBE(Call, flag, found, timeout_ns)

struct Shared {
  Plan plan;
};

template <Config kConfig>
struct Kernel {
  using Plan = wait_probe::Plan;
  using Call = wait_probe::Call;
  using Shared = wait_probe::Shared;
  static constexpr int kThreads = 32;
  static constexpr int kBlocksPerSm = 1;

  static PO_FN void run(const WorkGroup& wg, Shared&, const Call& call) {
    if (wg.rank() != 0) return;
    const uint64_t started = clock_ns();
    bool is_there = false;
    while (!is_there && clock_ns() - started < call.timeout_ns) is_there = flag_load_acquire_sys(call.flag) != 0;
    *call.found = is_there;
  }
};

}  // namespace po::wait_probe
"""


def _launched_beside_one_that_waits(root: Path) -> tuple[bool, bool, bool]:
    """Return whether a kernel was loaded before its launch; whether a kernel has seen its flag; and this one its own.

    The first kernel's flag comes when the second kernel has ended.
    """
    from cuda.bindings import driver

    backend: Any = current().backend
    shape = LaunchShape(32, is_resident=False)  # a cooperative launch would let no other kernel run
    with mock.patch.object(jit, "kernel_source_root", return_value=root):
        waits, other = (backend.load(KernelRequest.of("wait_probe", {"number": n}, shape)) for n in range(2))
        structs = description_of("wait_probe").structs
    outcome, state = driver.cuFuncIsLoaded(other._function)
    assert outcome == driver.CUresult.CUDA_SUCCESS
    words = torch.tensor([0, 1, 0, 0], device=backend.device)  # flags, then reports
    plan, streams = upload(backend, structs["Plan"]()), (torch.cuda.Stream(), torch.cuda.Stream())
    torch.cuda.synchronize()
    for number, (kernel, stream) in enumerate(zip((waits, other), streams, strict=True)):
        flag, found = (words[number + first :].data_ptr() for first in (0, 2))
        with torch.cuda.stream(stream):
            kernel.launch(1, plan.data_ptr(), structs["Call"](flag=flag, found=found, timeout_ns=20 * 10**9))
    streams[1].synchronize()
    backend.set_word(words, 0, 1)
    torch.cuda.synchronize()
    _, _, first, second = words.tolist()
    return state == driver.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED, bool(first), bool(second)


@pytest.mark.gpu
def test_a_launch_does_not_wait_for_a_kernel_that_waits(backend: str, tmp_path: Path) -> None:
    shutil.copytree(CUDA, tmp_path / "cuda")
    (tmp_path / "cuda/kernels/wait_probe.cuh").write_text(HEADER)
    assert in_world(_launched_beside_one_that_waits, 1, backend, tmp_path / "cuda") == [(True, True, True)]


@pytest.mark.host
def test_load_asks_the_driver_for_what_only_loaded_code_knows() -> None:
    driver = mock.MagicMock(CUresult=SimpleNamespace(CUDA_SUCCESS=0))
    driver.cuKernelGetFunction.return_value = 0, "function"
    driver.cuFuncGetAttribute.return_value = 0, 32
    names = ("cuda", "cuda.bindings", "cuda.core")
    modules = dict(zip(names, (mock.MagicMock(), mock.MagicMock(driver=driver), mock.MagicMock()), strict=True))
    with mock.patch.dict(sys.modules, modules):
        sys.modules.pop("persistent_ops.runtime.gpu", None)
        gpu: Any = importlib.import_module("persistent_ops.runtime.gpu")
        backend = object.__new__(gpu.GpuBackend)
        backend.device = None
        with mock.patch.object(gpu, "compile_cuda"), mock.patch.object(gpu, "torch") as fake_torch:
            fake_torch.cuda.get_device_capability.return_value = 9, 0
            backend.load(KernelRequest("barrier", None, LaunchShape(64)))
    assert any("function" in call.args for call in driver.cuFuncGetAttribute.call_args_list)
