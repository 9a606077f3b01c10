"""The cuda backend: NVSHMEM (through nvshmem4py) for the heap, cuda.core to load and launch."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch

from .backend import KernelRequest
from .bootstrap import Bootstrap
from .errors import BackendUnavailableError, BootstrapError
from .jit import KernelSource, compile_cuda

__all__ = ["GpuBackend"]

_log = logging.getLogger("persistent_ops")
_T = TypeVar("_T")


class _GpuKernel:
    def __init__(self, backend: GpuBackend, code: Any, kernel: Any, request: KernelRequest) -> None:
        self._backend = backend
        self._code = code  # keeps the module loaded
        self._kernel = kernel
        self._request = request
        self._configs: dict[int, LaunchConfig] = {}

    def max_blocks_per_sm(self) -> int:
        request = self._request
        occupancy = self._kernel.occupancy
        return int(occupancy.max_active_blocks_per_multiprocessor(request.threads, request.arena_bytes))

    def launch(self, grid: int, plan: int, words: Sequence[int]) -> None:
        config = self._configs.get(grid)
        if config is None:
            has_early_launches = torch.cuda.get_device_capability(self._backend.device)[0] >= 9
            config = LaunchConfig(
                grid=grid,
                block=self._request.threads,
                shmem_size=self._request.arena_bytes,
                is_cooperative=True,
                programmatic_stream_serialization=self._request.overlaps_predecessor and has_early_launches,
            )
            self._configs[grid] = config
        launch(self._backend.core_stream(), config, self._kernel, plan, *words, *(0,) * (5 - len(words)))


class _DeviceMemory:
    """A piece of the heap as torch takes it in."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class GpuBackend:
    """See `Backend`.

    Args:
        bootstrap: connection to the other PEs.
        heap_bytes: size of each PE's heap.
        transport: "auto" (store directly to peers that are load/store reachable), or "staged" (every exchange takes the
            path of puts and signals).
        timeout: seconds for NVSHMEM's start.
    """

    name = "cuda"
    default_blocks_per_sm = 2
    network = 0

    def __init__(self, bootstrap: Bootstrap, heap_bytes: int, transport: str, timeout: float) -> None:
        # NVLink multicast can take a shared host's GPUs out of service, and nothing here needs it.
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap_bytes + (64 << 20)))
        if bootstrap.single_host:
            os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")
        import nvshmem.bindings as bindings
        import nvshmem.core as nvshmem

        count = torch.cuda.device_count()
        if bootstrap.local_world_size > count:
            # NVSHMEM's start does not end where some GPUs carry more PEs than others.
            count = max(n for n in range(1, count + 1) if bootstrap.local_world_size % n == 0)
        index = bootstrap.local_rank % count
        if bootstrap.local_world_size > count:
            _log.warning(
                "persistent_ops: %d PEs share %d GPUs of this host; fine for tests, useless for timing",
                bootstrap.local_world_size,
                count,
            )
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)  # creates the primary context
        self._core_device = Device(index)
        self._core_device.set_current()
        properties = torch.cuda.get_device_properties(self.device)
        self.num_sms = int(properties.multi_processor_count)
        self.arena_bytes = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
        self.heap_bytes = heap_bytes
        self._nvshmem = nvshmem
        self._bindings = bindings
        self._libraries: list[Any] = []
        self._streams: dict[int, Stream] = {}

        uid = nvshmem.get_unique_id(empty=bootstrap.rank != 0)
        raw = bootstrap.exchange("nvshmem-uid", uid._data.tobytes() if bootstrap.rank == 0 else b"")[0]
        if bootstrap.rank != 0:
            uid._data.view("uint8").reshape(-1)[:] = memoryview(raw)  # 128 bytes; a capability, never logged

        def start() -> Any:
            self._core_device.set_current()
            nvshmem.init(
                device=self._core_device,
                uid=uid,
                rank=bootstrap.rank,
                nranks=bootstrap.world_size,
                initializer_method="uid",
            )
            if bindings.init_status() < 2:
                raise BackendUnavailableError(f"NVSHMEM did not initialise (status {bindings.init_status()})")
            return nvshmem.buffer(heap_bytes)

        self._buffer = _within(timeout, start, "NVSHMEM's start")
        self.heap_base = int(self._buffer.handle)
        n_pes = bindings.n_pes()
        if n_pes != bootstrap.world_size or bindings.my_pe() != bootstrap.rank:
            raise BootstrapError(
                f"NVSHMEM numbers this PE {bindings.my_pe()} of {n_pes}, the launcher {bootstrap.rank} of "
                f"{bootstrap.world_size}; was NVSHMEM initialised earlier in this process?"
            )
        heaps = [int(bindings.ptr(self.heap_base, pe) or 0) for pe in range(bootstrap.world_size)]
        heaps[bootstrap.rank] = self.heap_base
        if transport == "staged":
            heaps = [base if pe == bootstrap.rank else 0 for pe, base in enumerate(heaps)]
        self.peer_heaps = tuple(heaps)

    def core_stream(self) -> Stream:
        """Return torch's current stream as cuda.core's launcher takes it."""
        handle = self.stream()
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = Stream.from_handle(handle)
        return stream

    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_DeviceMemory(address, nbytes, self._buffer), device=self.device)

    def private_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def host_visible_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def load(self, request: KernelRequest) -> _GpuKernel:
        needs_nvshmem = not all(self.peer_heaps)
        major, minor = torch.cuda.get_device_capability(self.device)
        defines = (*request.defines, ("PO_PLAN_BYTES", str(request.plan_bytes)))
        binary = compile_cuda(
            KernelSource(f"kernels/{request.name}.cuh", defines), arch=f"sm_{major}{minor}", nvshmem=needs_nvshmem
        )
        code = ObjectCode.from_cubin(str(binary.path))
        kernel = code.get_kernel(request.name)
        if needs_nvshmem:
            # nvshmem.core.library_init passes an object that cuda.core >= 1.2 no longer converts.
            self._bindings.culibrary_init(int(code.handle))
            self._libraries.append(code)
        if request.arena_bytes:
            _check_driver(
                driver.cuKernelSetAttribute(
                    driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    request.arena_bytes,
                    driver.CUkernel(int(kernel.handle)),
                    driver.CUdevice(self.device.index),
                ),
                f"{request.arena_bytes} bytes of shared memory for {request.name}",
            )
        loaded = _GpuKernel(self, code, kernel, request)
        loaded.max_blocks_per_sm()  # loads the code now: a lazy load behind a spinning kernel would deadlock
        return loaded

    def stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def quiet(self) -> None:
        if not all(self.peer_heaps):
            self._bindings.quiet_on_stream(self.stream())
            self.synchronize()

    def close(self) -> None:
        for code in self._libraries:
            self._bindings.culibrary_finalize(int(code.handle))
        self._libraries.clear()
        try:
            self._nvshmem.free(self._buffer)
            self._nvshmem.finalize()
        except Exception as error:  # nothing may keep a process from leaving
            _log.warning("persistent_ops: NVSHMEM reported an error while closing: %s", error)


def _check_driver(outcome: tuple[Any, ...], what: str) -> None:
    if outcome[0] != driver.CUresult.CUDA_SUCCESS:
        raise BackendUnavailableError(f"{what}: the CUDA driver said {outcome[0].name}")


def _within(seconds: float, start: Callable[[], _T], what: str) -> _T:
    """Run a library call that has no time-out of its own."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, start()))
        except BaseException as error:  # handed to the caller
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True, name="persistent_ops-start")
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise BootstrapError(f"{what} did not finish within {seconds:g} s; a peer may have died")
    ok, value = outcome[0]
    if not ok:
        raise value
    return value  # type: ignore[no-any-return]
