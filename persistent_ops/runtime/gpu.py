"""The cuda backend: NVSHMEM (through nvshmem4py) for the heap, cuda.core to load kernels, the driver to launch them."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device, ObjectCode

from . import nvshmem_end
from .backend import GPU_BLOCKS_PER_SM, KernelRequest, LaunchShape, Peeked, in_node
from .bootstrap import launchers
from .bootstrap.connection import Bootstrap
from .bootstrap.route import meeting_interface
from .bounded import within
from .compile.jit import compile_cuda
from .compile.literals import warp_size
from .devices import Numbers, architecture, check_sharing, choose_device
from .errors import BackendUnavailableError, BootstrapError
from .interruptible import Interruptible
from .nvshmem_turns import turn_to_start
from .nvshmem_variables import NvshmemVariables
from .residency import Footprint, Sm
from .tensor_map import TensorMaps
from .torch_private import current_raw_stream

__all__ = ["GpuBackend"]

_log = logging.getLogger("persistent_ops")
_MAX_CONFIGS = 256  # of a kernel: streams may come and go
_MAP_TYPES = {torch.float32: "FLOAT32", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
_SUCCESS = driver.CUresult.CUDA_SUCCESS


_own_choice: int | None = None  # the current device, where it was set here


class _GpuKernel:
    def __init__(self, backend: GpuBackend, code: Any, name: str, shape: LaunchShape) -> None:
        self._backend = backend
        self._code = code  # keeps the module loaded
        self._name, self._shape = name, shape
        self._kernel = kernel = code.get_kernel(name)
        if shape.arena_bytes:
            _check_driver(
                driver.cuKernelSetAttribute(
                    driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shape.arena_bytes,
                    driver.CUkernel(int(kernel.handle)),
                    driver.CUdevice(backend.device.index),
                ),
                f"{shape.arena_bytes} bytes of shared memory for {name}",
            )
        outcome = driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle)))
        _check_driver(outcome, name)
        self._function = outcome[1]
        self._configs: dict[tuple[int, int, bool, bool, bool], driver.CUlaunchConfig] = {}
        self.admitted_grid = 0
        # The driver copies what these point to before a launch returns.
        self._plan = ctypes.c_uint64()
        self._parameters = (ctypes.c_void_p * 3)(ctypes.addressof(self._plan), 0, 0)  # the last: of one that traces
        self._parameters_address = ctypes.addressof(self._parameters)
        self.footprint()  # loads the code now: a lazy load would wait for a kernel that spins

    def resident_work_groups(self) -> int:
        backend, cluster = self._backend, self._shape.cluster
        if cluster == 1:
            return (min(self._occupancy(), 1) if backend.leaves_room else self._occupancy()) * backend.num_sms
        if backend.leaves_room:
            raise ValueError(
                f"{self._name}: its WGs come in clusters of {cluster}, and a cluster may find no room beside "
                "other libraries' collectives: it cannot be called after po.nn.leave_room()"
            )
        config = self._make_config(cluster, 0, is_beside=True, leaves_room=False, begins_early=False)
        outcome = driver.cuOccupancyMaxActiveClusters(self._function, config)
        _check_driver(outcome, f"clusters of {self._name}")
        return int(outcome[1]) * cluster

    def _occupancy(self) -> int:
        occupancy, shape = self._kernel.occupancy, self._shape
        return int(occupancy.max_active_blocks_per_multiprocessor(shape.threads, shape.arena_bytes))

    def footprint(self) -> Footprint:
        attributes = driver.CUfunction_attribute
        wanted = (attributes.CU_FUNC_ATTRIBUTE_NUM_REGS, attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        values = []
        for attribute in wanted:
            outcome = driver.cuFuncGetAttribute(attribute, self._function)
            _check_driver(outcome, f"resources of {self._name}")
            values.append(int(outcome[1]))
        registers, shared_bytes = values
        return Footprint(
            self._shape.threads,
            registers,
            shared_bytes + self._shape.arena_bytes,
            self._occupancy(),
            overlaps=self._shape.overlaps_predecessor,
            cluster=self._shape.cluster,
            is_resident=self._shape.is_resident,
        )

    def launch(self, grid: int, plan: int, call: ctypes.Structure, *, begins_early: bool = False) -> None:
        backend = self._backend
        key = grid, backend.stream(), backend.runs_beside, backend.leaves_room, begins_early
        config = self._configs.get(key)
        if config is None:
            if len(self._configs) >= _MAX_CONFIGS:
                self._configs.clear()
            config = self._configs[key] = self._make_config(
                grid,
                backend.stream(),
                is_beside=backend.runs_beside,
                leaves_room=backend.leaves_room,
                begins_early=begins_early,
            )
        self._pass(plan, call)
        outcome = driver.cuLaunchKernelEx(config, self._function, self._parameters_address, 0)[0]
        if outcome != _SUCCESS:
            raise RuntimeError(f"{self._name}: the CUDA driver did not launch it: {outcome.name}")

    def _pass(self, plan: int, call: ctypes.Structure) -> None:
        """Let the parameters of a launch point to a plan's address and to a call."""
        self._plan.value = plan
        self._parameters[1] = ctypes.addressof(call)

    def trace_into(self, sink: ctypes.Structure, memory: object) -> None:
        self._sink, self._memory = sink, memory
        self._parameters[2] = ctypes.addressof(sink)

    def _make_config(
        self, grid: int, stream: int, *, is_beside: bool, leaves_room: bool, begins_early: bool
    ) -> driver.CUlaunchConfig:
        config = driver.CUlaunchConfig()
        config.hStream = driver.CUstream(stream)
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._shape.threads, 1, 1
        config.sharedMemBytes = self._shape.arena_bytes
        attributes = []
        if self._shape.cluster > 1:
            clusters = driver.CUlaunchAttribute()
            clusters.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = clusters.value.clusterDim
            dimension.x, dimension.y, dimension.z = self._shape.cluster, 1, 1
            attributes.append(clusters)
        # A cooperative launch begins as a whole, and no other one may become resident beside it (cuda/DESIGN.md,
        # "Launches side by side").
        if self._shape.is_resident and not (is_beside or leaves_room or begins_early):
            cooperative = driver.CUlaunchAttribute()
            cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            cooperative.value.cooperative = 1
            attributes.append(cooperative)
        overlaps = self._shape.overlaps_predecessor and self._backend.has_early_launches
        # Of two launches at a time the WGs would be twice as many as there is room for.
        if begins_early or (overlaps and not leaves_room):
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


class _KernelOfFields(_GpuKernel):
    """A kernel whose parameters are the fields of a call."""

    def __init__(
        self, backend: GpuBackend, code: Any, name: str, shape: LaunchShape, call: type[ctypes.Structure]
    ) -> None:
        super().__init__(backend, code, name, shape)
        self._call = call()
        address = ctypes.addressof(self._call)
        fields = [address + getattr(call, field[0]).offset for field in call._fields_]
        self._parameters = (ctypes.c_void_p * max(len(fields), 1))(*fields)
        self._parameters_address = ctypes.addressof(self._parameters)

    def _pass(self, plan: int, call: ctypes.Structure) -> None:
        ctypes.pointer(self._call)[0] = call

    def trace_into(self, sink: ctypes.Structure, memory: object) -> None:
        self._sink, self._memory = sink, memory  # the plan says where it is


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
        transport: which PEs may be stored to directly if they are load/store reachable: see `in_node`.
        timeout: seconds for NVSHMEM's start.
    """

    name = "cuda"
    default_blocks_per_sm = GPU_BLOCKS_PER_SM
    runs_beside = False
    leaves_room = False
    network = 0

    @property
    def begins_early(self) -> bool:
        return self.has_early_launches and not self.runs_beside and not self.leaves_room

    def __init__(self, bootstrap: Bootstrap, heap_bytes: int, transport: str, timeout: float) -> None:
        index = _choose_device(bootstrap)
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self.has_early_launches = torch.cuda.get_device_capability(self.device)[0] >= 9
        torch.zeros(1, dtype=torch.uint8, device=self.device)  # creates the primary context
        self._core_device = Device(index)
        self._core_device.set_current()
        properties = torch.cuda.get_device_properties(self.device)
        uuids = [raw.decode() for raw in bootstrap.exchange("gpu", str(properties.uuid).encode())]  # type: ignore[attr-defined]
        warning = check_sharing(uuids, bootstrap.rank)
        if warning:
            _log.warning("persistent_ops: %s", warning)
        self._shares_gpu = bool(warning)
        self.num_sms = int(properties.multi_processor_count)
        self.arena_bytes = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
        self.sm = Sm(
            threads=_device_attribute("MAX_THREADS_PER_MULTIPROCESSOR", index),
            registers=_device_attribute("MAX_REGISTERS_PER_MULTIPROCESSOR", index),
            shared_bytes=_device_attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR", index),
            blocks=_device_attribute("MAX_BLOCKS_PER_MULTIPROCESSOR", index),
        )
        self.heap_bytes = heap_bytes
        self._tensor_maps = TensorMaps(_gpu_tensor_map)
        self._libraries: list[Any] = []
        self.waits = Interruptible()
        outcome = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        _check_driver(outcome, "a stream")
        self._side_stream = outcome[1]

        interface = meeting_interface(bootstrap)
        if not bootstrap.single_host:
            name = "an interface of NVSHMEM's choice" if interface is None else " ".join(interface)
            _log.info("persistent_ops: NVSHMEM's PEs meet over %s", name)
        with NvshmemVariables(heap_bytes, interface):
            self._start(bootstrap, timeout)
        self.heap_base = int(self._buffer.handle)
        try:
            self.peer_heaps = self._map_peers(bootstrap, transport)
        except BaseException as error:
            self.close(is_alone=not bootstrap.fail_and_meet(f"{type(error).__name__}: {error}"))
            raise

    def _start(self, bootstrap: Bootstrap, timeout: float) -> None:
        """Start NVSHMEM and take this PE's heap; collective."""
        import nvshmem.bindings as bindings
        import nvshmem.core as nvshmem

        nvshmem_end.refuse_restart()
        self._nvshmem = nvshmem
        self._bindings = bindings

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
                raise BackendUnavailableError(f"NVSHMEM did not initialize (status {bindings.init_status()})")
            try:
                return nvshmem.buffer(self.heap_bytes)
            except BaseException as error:
                if bootstrap.fail_and_meet(f"{type(error).__name__}: {error}"):
                    nvshmem.finalize()
                else:
                    nvshmem_end.leave_out()
                raise

        with turn_to_start(bootstrap, timeout / 2) if self._shares_gpu else nullcontext():
            uid = nvshmem.get_unique_id(empty=bootstrap.rank != 0)
            raw = bootstrap.exchange("nvshmem-uid", uid._data.tobytes() if bootstrap.rank == 0 else b"")[0]
            if bootstrap.rank != 0:
                uid._data.view("uint8").reshape(-1)[:] = memoryview(raw)  # 128 bytes; a capability, never logged
            self._buffer = within(timeout, start, "NVSHMEM's start")

    def _map_peers(self, bootstrap: Bootstrap, transport: str) -> tuple[int, ...]:
        """Return the address of each PE's heap here; 0 where it is not load/store reachable or must not be used so."""
        me, n_pes = self._bindings.my_pe(), self._bindings.n_pes()
        if (me, n_pes) != (bootstrap.rank, bootstrap.world_size):
            raise BootstrapError(
                f"NVSHMEM numbers this PE {me} of {n_pes}, the launcher {bootstrap.rank} of {bootstrap.world_size}; "
                "was NVSHMEM initialized earlier in this process?"
            )
        heaps = [int(self._bindings.ptr(self.heap_base, pe) or 0) for pe in range(n_pes)]
        heaps[bootstrap.rank] = self.heap_base
        near = in_node(transport, bootstrap.rank, n_pes)
        return tuple(base if is_near else 0 for base, is_near in zip(heaps, near, strict=True))

    @torch.inference_mode(False)
    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_DeviceMemory(address, nbytes, self._buffer), dtype=torch.uint8, device=self.device)

    def private_words(self, count: int) -> torch.Tensor:
        # In a thread of its own: torch.compile(mode="reduce-overhead") has the calling thread allocate from the pool of
        # a CUDA graph, whose memory is given out again.
        stream = torch.cuda.current_stream(self.device)

        def make() -> torch.Tensor:
            with torch.cuda.stream(stream):
                return torch.zeros(count, dtype=torch.int64, device=self.device)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make).result()

    @torch.inference_mode(False)
    def host_visible_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def peek(self, pieces: Sequence[Peeked]) -> bool:
        with torch.cuda.device(self.device):
            # What other threads capture does not forbid this one to ask.
            driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            if driver.cuStreamQuery(self._side_stream)[0] != _SUCCESS:
                return False
            for address, copy in pieces:
                to, count = ctypes.addressof(copy), ctypes.sizeof(copy)
                outcome = driver.cuMemcpyDtoHAsync(to, driver.CUdeviceptr(address), count, self._side_stream)
                _check_driver(outcome, "a copy of what peers have begun")
        return True

    def tensor_map(self, matrix: torch.Tensor, box: tuple[int, int], swizzle: int = 0) -> ctypes.Structure:
        return self._tensor_maps.find(matrix, box, swizzle)

    def warps_of(self, threads: int) -> int:
        return threads // warp_size()

    def compile(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Path:
        arch = architecture(*torch.cuda.get_device_capability(self.device)) + request.shape.architecture_suffix
        return compile_cuda(request.source(), arch=arch, nvshmem=links_nvshmem).path

    def load(self, request: KernelRequest, *, links_nvshmem: bool = False) -> _GpuKernel:
        shape = request.shape
        code = ObjectCode.from_cubin(str(self.compile(request, links_nvshmem=links_nvshmem)))
        if links_nvshmem:
            # nvshmem.core.library_init passes an object that cuda.core >= 1.2 no longer converts.
            self._bindings.culibrary_init(int(code.handle))
            self._libraries.append(code)
        return _GpuKernel(self, code, request.name, shape)

    def load_cubin(self, cubin: bytes, name: str, shape: LaunchShape, call: type[ctypes.Structure]) -> _GpuKernel:
        """Load a kernel that another compiler has made.

        Args:
            cubin: the code.
            name: symbol in it.
            shape: of its launches.
            call: of its launches; each field is a parameter of the kernel.
        """
        return _KernelOfFields(self, ObjectCode.from_cubin(cubin), name, shape, call)

    def use_in_this_thread(self) -> None:
        torch.cuda.set_device(self.device)
        self._core_device.set_current()  # torch leaves a thread that begins with this device without a context

    def stream(self) -> int:
        return int(current_raw_stream(self.device.index))  # type: ignore[misc]  # a build with CUDA has it

    def synchronize(self, patience: float | None = None) -> None:
        self.waits.call(lambda: torch.cuda.synchronize(self.device), patience)

    def set_word(self, words: torch.Tensor, index: int, value: int) -> None:
        # Not through torch: the current stream may be captured, or wait for the very kernel that is to see the word.
        with torch.cuda.device(self.device):
            address = driver.CUdeviceptr(words.data_ptr() + 8 * index)
            outcome = driver.cuStreamWriteValue64(self._side_stream, address, value, 0)
        _check_driver(outcome, "a word for kernels under way")

    def quiet(self) -> None:
        if not all(self.peer_heaps):
            self._bindings.quiet_on_stream(self.stream())
            self.synchronize()

    def close(self, *, is_alone: bool = False) -> None:
        self.waits.close()
        for code in self._libraries:
            self._bindings.culibrary_finalize(int(code.handle))
        self._libraries.clear()

        def free() -> None:
            self._core_device.set_current()
            self._nvshmem.free(self._buffer)

        heap, finalize = self._buffer, self._nvshmem.finalize
        nvshmem_end.end(free, finalize, heap=heap, is_alone=is_alone, shares_gpu=self._shares_gpu)


def _gpu_tensor_map(matrix: torch.Tensor, box: tuple[int, int], swizzle: int) -> bytes:
    """Return a CUtensorMap."""
    rows, columns = matrix.shape
    swizzled = f"{swizzle}B" if swizzle else "NONE"
    outcome = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES[matrix.dtype]}"),
        2,
        matrix.data_ptr(),
        [driver.cuuint64_t(size) for size in (columns, rows)],
        [driver.cuuint64_t(matrix.stride(0) * matrix.element_size())],
        [driver.cuuint32_t(size) for size in reversed(box)],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzled}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    _check_driver(outcome, "a tensor map")
    return ctypes.string_at(outcome[1].getPtr(), 128)


def _choose_device(bootstrap: Bootstrap) -> int:
    """Choose this PE's GPU and remember it, so that the next world does not take it for the user's choice."""
    global _own_choice
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    if current == _own_choice:
        current = None
    said = launchers.local_numbers(os.environ)
    index = choose_device(
        torch.cuda.device_count(),
        current=current,
        of_job=None if said is None else Numbers(*said),
        of_world=Numbers(bootstrap.local_rank, bootstrap.local_world_size),
    )
    if current is None:
        _own_choice = index
    return index


def _device_attribute(name: str, index: int) -> int:
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    outcome = driver.cuDeviceGetAttribute(attribute, driver.CUdevice(index))
    _check_driver(outcome, name)
    return int(outcome[1])


def _check_driver(outcome: tuple[Any, ...], what: str) -> None:
    if outcome[0] != _SUCCESS:
        raise BackendUnavailableError(f"{what}: the CUDA driver said {outcome[0].name}")
