"""A backend on paper: operators plan as on a GPU of some kind, and load kernels that do nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .backend import GPU_BLOCKS_PER_SM, KernelRequest, LaunchShape
from .bootstrap.connection import Bootstrap
from .devices import architecture
from .host import HostBackend
from .residency import Footprint

__all__ = ["Gpu", "PaperBackend", "SilentKernel", "Wanted"]


class Gpu(NamedTuple):
    """The GPU properties that plans and the compiler use; by default of an H100 or H200.

    Attributes:
        arch: architecture, as nvcc spells it.
        num_sms: streaming multiprocessors.
        arena_bytes: the most shared memory that a WG can have.
    """

    arch: str = "sm_90"
    num_sms: int = 132
    arena_bytes: int = 227 << 10

    @classmethod
    def of_machine(cls) -> Gpu | None:
        """Return the properties of this machine's first GPU, or None without one."""
        if not torch.cuda.is_available():
            return None
        found = torch.cuda.get_device_properties(0)
        arena_bytes = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return cls(architecture(found.major, found.minor), found.multi_processor_count, arena_bytes)


class SilentKernel:
    """A kernel that does nothing."""

    def __init__(self, backend: HostBackend, shape: LaunchShape) -> None:
        self.admitted_grid = 0
        self._backend, self._shape = backend, shape

    def footprint(self) -> Footprint:
        return Footprint(self._shape.threads, 0, 0, self._backend.default_blocks_per_sm, cluster=self._shape.cluster)

    def resident_work_groups(self) -> int:
        return self._backend.default_blocks_per_sm * self._backend.num_sms

    def launch(self, grid: int, plan: int, call: object, *, begins_early: bool = False) -> None:
        """Nothing."""

    def trace_into(self, sink: object, memory: object) -> None:
        """Nothing: there will be no timeline."""


class Wanted(dict[tuple[KernelRequest, bool], None]):
    """The kernels that PEs have asked for, in that order, and whether they link NVSHMEM."""

    lock = threading.Lock()

    def add(self, request: KernelRequest, links_nvshmem: bool) -> None:
        """Take note of one; any thread."""
        with self.lock:
            self.setdefault((request, links_nvshmem))


class PaperBackend(HostBackend):
    """A backend that looks like a GPU's to a PE, until the PE uses the GPU.

    Args:
        gpu: that operators plan for.
        wanted: where the kernels are noted.
        bootstrap, heap_bytes, transport: of `HostBackend`.
    """

    name = "paper"
    default_blocks_per_sm = GPU_BLOCKS_PER_SM

    def __init__(self, gpu: Gpu, wanted: Wanted, bootstrap: Bootstrap, heap_bytes: int, transport: str) -> None:
        super().__init__(bootstrap, heap_bytes, transport)
        self.num_sms, self.arena_bytes = gpu.num_sms, gpu.arena_bytes
        self._wanted = wanted

    def warps_of(self, threads: int) -> int:
        return threads // 32

    def compile(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Path:
        self._wanted.add(request, links_nvshmem)
        return Path()

    def load(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Any:
        self._wanted.add(request, links_nvshmem)
        return SilentKernel(self, request.shape)
