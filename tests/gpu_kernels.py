"""Kernels that the operators offer as samples (`sample_requests` beside each plan), compiled for GPUs."""

from __future__ import annotations

import importlib
import pkgutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from persistent_ops import ops
from persistent_ops.runtime.backend import KernelRequest, LaunchShape
from persistent_ops.runtime.compile.jit import KernelResources, compile_cuda

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
BLOCKS_PER_SM = 2  # GpuBackend.default_blocks_per_sm; its module cannot be imported without a GPU's packages


@dataclass(frozen=True)
class GpuKernel:
    """A kernel and the architecture that it is compiled for."""

    request: KernelRequest
    arch: str = "sm_90"

    @property
    def name(self) -> str:
        config = ", ".join(f"{name} {value.rpartition('::')[2]}" for name, value in self.request.config or ())
        traced = ", traced" * self.request.traces
        return f"{self.request.name} {self.arch} {self.request.shape.threads} threads{traced}: {config}".rstrip(": ")

    def compiled(self) -> tuple[KernelResources, bytes]:
        """Compile it. Return the needs of a WG, and the cubin.

        Raises:
            RuntimeError: the compiler's output contains an instruction that no GPU executes.
        """
        code = compile_cuda(self.request.source(), arch=self.arch + self.request.shape.architecture_suffix)
        cubin = code.path.read_bytes()
        opcodes = (word & 0xFFF for word in _instructions(cubin))
        if self.arch == "sm_90" and _LDGSTS_UR in opcodes:  # in code for sm_80 it is as good as any
            raise RuntimeError(f"{self.name}: an asynchronous copy whose uniform registers the compiler has lost")
        return code.kernels[self.request.name], cubin


# LDGSTS with an offset in a uniform register: nvcc 13.0 emits it in some loops for a copy with a cache policy, though
# the copy has no such offset. It names UR0 and UR1, which hold other values. A GPU reports an illegal instruction.
_LDGSTS_UR = 0xDAE
_EXECUTABLE = 4  # SHF_EXECINSTR


def _instructions(cubin: bytes) -> Iterator[int]:
    """Return the first half of each instruction in a cubin. It contains the opcode."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for number in range(count):
        _, _, flags, _, offset, nbytes = struct.unpack_from("<IIQQQQ", cubin, sections + number * size)
        if flags & _EXECUTABLE:
            yield from (word for word, _ in struct.iter_unpack("<QQ", cubin[offset : offset + nbytes]))


def operator_modules() -> list[ModuleType]:
    """Return the modules of the operators' package."""
    found = pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")
    return [importlib.import_module(each.name) for each in found]


def _sample() -> Iterator[GpuKernel]:
    """Yield the samples of the operators. The first one of each is for all architectures that can run it."""
    offers = [list(module.sample_requests()) for module in operator_modules() if hasattr(module, "sample_requests")]
    for requests in [[KernelRequest("barrier", None, LaunchShape(64))], *offers]:
        yield from map(GpuKernel, requests)
        if requests[0].shape.cluster == 1:  # sm_80 has no clusters
            yield from (GpuKernel(requests[0], arch) for arch in ARCHITECTURES if arch != "sm_90")


SAMPLE = tuple(_sample())
