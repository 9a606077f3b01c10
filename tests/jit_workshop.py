"""Shared by the tests of the compile cache: kernels in a temporary folder and a compiler that counts."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from persistent_ops.runtime.compile import jit
from persistent_ops.runtime.compile.jit import KernelSource, compile_host

REPOSITORY = Path(__file__).resolve().parent.parent
REAL_CXX = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") or "c++"
# For the tests' small kernels. -O3 takes twice as long to compile, and is tested once per operator (bits.py).
CXX_FLAGS = "-O1 -Werror"

ENTRY = """#pragma once
#include <cstdint>
#include <platform/middle.h>
#ifndef BONUS
#define BONUS 0
#endif
#ifdef __CUDACC__
extern "C" __global__ void scale(float* x, int n) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[n + threadIdx.x] = tile[(threadIdx.x + n) % 256] * VALUE;
}
extern "C" __global__ void crowded(const float* x, float* y) {
    float v[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = x[threadIdx.x * 64 + i];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; ++i) y[threadIdx.x * 64 + i] = v[i] * v[63 - i] + v[(i * 7) % 64];
}
__device__ __noinline__ float sum_of_products(const float* x, int stride) {
    float v[64], sum = 0;
    #pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = x[i * stride];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; ++i) sum += v[i] * v[(i * 7) % 64] * v[63 - i];
    return sum;
}
extern "C" __global__ void crowded_callee(const float* x, float* y, int stride) {
    y[threadIdx.x] = sum_of_products(x, stride);
}
#else
extern "C" __attribute__((visibility("default"))) int value() { return VALUE + BONUS; }
extern "C" __attribute__((visibility("default"))) double multiply_add(double a, double b, double c) {
    return a * b + c;
}
#endif
"""

# Begins a program that uses the compile cache without the rest of the package, because that imports torch.
BARE_PACKAGE = """
import sys
sys.modules["persistent_ops"] = package = type(sys)("persistent_ops")
package.__path__ = [sys.argv[1] + "/persistent_ops"]
"""

# Answers the toolchain's questions like the compiler that it wraps, counts compilations, and stalls on request.
WRAPPER = """#!/bin/sh
case "$*" in
    *--version*) cat {state}/version; exit 0 ;;
    *-shared*)
        echo "$$" >> {state}/compiled
        if [ -e {state}/on_compile ]; then . {state}/on_compile; fi ;;
esac
exec {compiler} "$@"
"""

# Replaces nvcc where the test is about the cache and not about CUDA. It writes its arguments as the result.
FAKE_NVCC = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release {release}, V{release}.88"; exit 0 ;; esac
echo "$*" >> {state}/nvcc_calls
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo "$*" > "$2"; fi; shift; done
"""


@dataclass
class Workshop:
    """A folder with kernel sources, a cache, and a compiler that counts."""

    root: Path
    cache: Path
    state: Path
    source: KernelSource

    @property
    def compilations(self) -> int:
        log = self.state / "compiled"
        return len(log.read_text().split()) if log.exists() else 0

    def on_compile(self, script: str) -> None:
        (self.state / "on_compile").write_text(script)

    def build(self, **options: object) -> Path:
        """Compile like a process that starts now."""
        jit.clear_memo()
        return compile_host(self.source, **options)  # type: ignore[arg-type]

    def start(self) -> subprocess.Popen[str]:
        """Compile in another process, which prints the library's path."""
        program = BARE_PACKAGE + (
            "import pathlib\n"
            "from persistent_ops.runtime.compile.jit import KernelSource, compile_host\n"
            "print(compile_host(KernelSource(sys.argv[2], (), pathlib.Path(sys.argv[3]))))"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program, str(REPOSITORY), self.source.entry, str(self.root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def value_of(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).value())


def write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the other process did not get there in time"
        time.sleep(0.01)


def make_workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Lay out the folder and point the environment at it."""
    root, state = tmp_path / "root", tmp_path / "state"
    for folder in (root / "kernels", root / "platform", state):
        folder.mkdir(parents=True)
    (root / "kernels" / "scale.cuh").write_text(ENTRY)
    (root / "platform" / "middle.h").write_text('#pragma once\n#  include "deep.h"\n')
    (root / "platform" / "deep.h").write_text("#pragma once\n#define VALUE 7\n")
    (root / "platform" / "unrelated.h").write_text("#define UNRELATED 1\n")
    (state / "version").write_text("counting compiler 1.0\n")
    wrapper = write_script(state / "c++", WRAPPER.format(state=state, compiler=REAL_CXX))
    for name in ("CXX", "CUDA_HOME", "PERSISTENT_OPS_NVCC", "PERSISTENT_OPS_COMPILE_TIMEOUT", *jit._COMPILER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERSISTENT_OPS_CXX", str(wrapper))
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path / "cache"))
    jit.clear_memo()
    return Workshop(root, tmp_path / "cache", state, KernelSource("kernels/scale.cuh", (), root))


def add_wheel(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Install an invented wheel: its files and the metadata that names them."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file, text in files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        write_script(site / file, text)


def add_nvshmem(site: Path, version: str, header_version: str) -> None:
    defines = zip(("MAJOR", "MINOR", "PATCH"), header_version.split("."), strict=True)
    files = {
        "nvidia/nvshmem/include/nvshmem.h": "",
        "nvidia/nvshmem/include/non_abi/nvshmem_version.h": "".join(
            f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in defines
        ),
        "nvidia/nvshmem/lib/libnvshmem_device.a": "",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3": "",
    }
    add_wheel(site, "nvidia-nvshmem-cu13", version, files)
