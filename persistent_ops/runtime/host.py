"""The host backend: kernels compiled by the C++ compiler, PEs as processes (or threads), heaps in shared memory.

A heap is an anonymous shared-memory file (memfd, mode 0600), which the peers map through the owner's /proc entry. It
never has a name, so nothing remains however the PEs end, kill -9 included.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .backend import KernelRequest, Peeked, in_node
from .bootstrap.connection import Bootstrap
from .compile.description import describe
from .compile.jit import KernelSource, compile_host, load_host
from .errors import BootstrapError, PersistentOpsError, SymmetricHeapError
from .interruptible import Interruptible
from .residency import Footprint, Sm
from .tensor_map import TENSOR_MAP, TensorMaps

__all__ = ["HostBackend"]

_NO_THREADS = "the system has no room for more threads (ulimit -u, or the pids.max of a container)"
_MOST_WORK_GROUPS = 64  # they are threads; the operating system shares the cores among them
_NO_ROOM = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EINVAL)


class _HostKernel:
    def __init__(self, function: Any, wg_size: int, cluster: int, waits: Interruptible | None) -> None:
        self._function = function
        self._wg_size, self._cluster = wg_size, cluster
        self._waits = waits
        self._sink: ctypes.Structure | None = None
        self.admitted_grid = 0

    def footprint(self) -> Footprint:
        return Footprint(self._wg_size, 0, 0, _MOST_WORK_GROUPS, cluster=self._cluster)

    def resident_work_groups(self) -> int:
        return _MOST_WORK_GROUPS // self._cluster * self._cluster

    def launch(self, grid: int, plan: int, call: ctypes.Structure, *, begins_early: bool = False) -> None:
        sink = 0 if self._sink is None else ctypes.addressof(self._sink)
        run = functools.partial(self._function, plan, ctypes.addressof(call), grid, self._wg_size, sink)
        if not (run() if self._waits is None else self._waits.call(run)):
            raise PersistentOpsError(
                f"a launch on the host has not begun: {_NO_THREADS}, and it takes {grid * self._wg_size}. Peers wait "
                "for it: call po.recover() on all PEs"
            )

    def trace_into(self, sink: ctypes.Structure, memory: object) -> None:
        self._sink, self._memory = sink, memory


class _Segment:
    """One PE's heap as mapped by this process; unmapped with the last reference to this object."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.map = mmap.mmap(fd, nbytes)
        self._anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)


class HostBackend:
    """See `Backend`.

    Args:
        bootstrap: connection to the other PEs; all must run on this machine.
        heap_bytes: size of each PE's heap.
        transport: which PEs' heaps are stored to directly: see `in_node`. The others are reached through a proxy that
            delays and reorders, as a network would.
        network_delay_us: longest delay of one operation of that proxy, in microseconds.
        wg_size: threads per WG; more than one is for tests.
    """

    name = "host"
    num_sms = 1
    sm = Sm()
    default_blocks_per_sm = 1
    arena_bytes = 1 << 30
    runs_beside = False
    begins_early = False
    leaves_room = False

    def __init__(
        self, bootstrap: Bootstrap, heap_bytes: int, transport: str, network_delay_us: int = 200, wg_size: int = 1
    ) -> None:
        if not bootstrap.shares_memory:
            raise BootstrapError(
                "the host backend shares memory between PEs, so all of them must run on one machine and in one PID "
                "namespace; use backend='cuda' across machines"
            )
        for option, value in (("network_delay_us", network_delay_us), ("wg_size", wg_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{option}: expected a whole number of at least 0, got {value!r}")
        if not 1 <= wg_size <= 64:
            raise ValueError(f"wg_size: expected 1 to 64 threads, got {wg_size}")
        self.device = torch.device("cpu")
        self.heap_bytes = heap_bytes
        self.waits = Interruptible()
        self._wg_size = wg_size
        self._tensor_maps = TensorMaps(_host_tensor_map)
        self._segments = _map_heaps(bootstrap, heap_bytes)
        addresses = tuple(segment.address for segment in self._segments)
        self.heap_base = addresses[bootstrap.rank]
        self.network = 0
        self._runtime: Any = None
        self.peer_heaps = addresses
        near = in_node(transport, bootstrap.rank, bootstrap.world_size)
        if not all(near):
            self.peer_heaps = tuple(a if is_near else 0 for a, is_near in zip(addresses, near, strict=True))
            self._runtime = load_host(KernelSource("platform/host_runtime.cuh"))
            self._runtime.po_network_create.restype = ctypes.c_void_p
            self._runtime.po_network_destroy.argtypes = [ctypes.c_void_p]
            self._runtime.po_network_quiet.argtypes = [ctypes.c_void_p]
            table = (ctypes.c_uint64 * len(addresses))(*addresses)
            network = self._runtime.po_network_create(
                table, len(addresses), ctypes.c_uint64(network_delay_us), ctypes.c_uint64(bootstrap.rank + 1)
            )
            if network is None:
                raise PersistentOpsError(f"transport={transport!r}: {_NO_THREADS}")
            self.network = network

    @torch.inference_mode(False)
    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        memory = (ctypes.c_char * nbytes).from_address(address)
        memory._segments = self._segments  # type: ignore[attr-defined]  # the mapping outlives the tensor
        return torch.frombuffer(memory, dtype=torch.uint8)

    @torch.inference_mode(False)
    def private_words(self, count: int) -> torch.Tensor:
        # LocalState wants a cache line's alignment; torch's CPU allocator gives 64 bytes, so cut to 128.
        words = torch.zeros(count + 16, dtype=torch.int64, device=self.device)
        skip = (-words.data_ptr() % 128) // 8
        return words[skip : skip + count]

    @torch.inference_mode(False)
    def host_visible_bytes(self, nbytes: int) -> torch.Tensor:
        return self.private_words((nbytes + 7) // 8).view(torch.uint8)[:nbytes]

    def set_word(self, words: torch.Tensor, index: int, value: int) -> None:
        ctypes.c_uint64.from_address(words.data_ptr() + 8 * index).value = value

    def peek(self, pieces: Sequence[Peeked]) -> bool:
        for address, copy in pieces:
            ctypes.memmove(copy, address, ctypes.sizeof(copy))
        return True

    def tensor_map(self, matrix: torch.Tensor, box: tuple[int, int], swizzle: int = 0) -> ctypes.Structure:
        return self._tensor_maps.find(matrix, box, swizzle)

    def warps_of(self, threads: int) -> int:
        return self._wg_size

    def compile(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Path:
        return compile_host(request.source())

    def load(self, request: KernelRequest, *, links_nvshmem: bool = False) -> _HostKernel:
        library = load_host(request.source())
        function = getattr(library, request.name)
        function.restype = ctypes.c_bool
        # The last argument is for kernels that trace; other kernels ignore it.
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        # A PE without peers never waits: signals are delayed until a launch has ended, and no thread has to wake.
        waits = self.waits if len(self.peer_heaps) > 1 else None
        return _HostKernel(function, self._wg_size, request.shape.cluster, waits)

    def use_in_this_thread(self) -> None:
        """Nothing to do: all threads have the same processor."""

    def stream(self) -> int:
        return 0

    def synchronize(self, patience: float | None = None) -> None:
        """Nothing to do: launches on the host are synchronous."""

    def quiet(self) -> None:
        if self.network:
            self._runtime.po_network_quiet(self.network)

    def close(self, *, is_alone: bool = False) -> None:
        self.waits.close()
        if self._runtime is not None and self.network:
            self._runtime.po_network_destroy(self.network)
            self.network = 0
        self._segments = []


def _host_tensor_map(matrix: torch.Tensor, box: tuple[int, int], swizzle: int) -> bytes:
    element = matrix.element_size()
    return bytes(
        describe(TENSOR_MAP).structs["HostTensorMap"](
            base=matrix.data_ptr(),
            rows=matrix.shape[0],
            row_bytes=matrix.shape[1] * element,
            row_stride=matrix.stride(0) * element,
            box_rows=box[0],
            box_row_bytes=box[1] * element,
            element_bytes=element,
            swizzle_bytes=swizzle,
        )
    )


def _map_heaps(bootstrap: Bootstrap, heap_bytes: int) -> list[_Segment]:
    """Make this PE's heap and map everybody's."""
    own = os.memfd_create(f"persistent_ops-{bootstrap.rank}", os.MFD_CLOEXEC)
    try:
        os.fchmod(own, 0o600)
        with _room_for(heap_bytes):
            os.ftruncate(own, heap_bytes)
        status = os.fstat(own)
        card = {"pid": os.getpid(), "fd": own, "dev": status.st_dev, "ino": status.st_ino, "bytes": heap_bytes}
        cards = [json.loads(raw) for raw in bootstrap.exchange("heap", json.dumps(card).encode())]
        with _room_for(heap_bytes):
            segments = [
                _Segment(own, heap_bytes) if rank == bootstrap.rank else _peer_heap(rank, peer)
                for rank, peer in enumerate(cards)
            ]
        bootstrap.exchange("heap-mapped", b"")  # the owner's descriptor must stay until everybody has opened it
        return segments
    finally:
        os.close(own)


_peer_heaps: weakref.WeakValueDictionary[tuple[int, int], _Segment] = weakref.WeakValueDictionary()
_mapping = threading.Lock()


def _peer_heap(rank: int, card: dict[str, int]) -> _Segment:
    """Map the heap of a PE, once for all its peers that are threads of this process: a process has few mappings."""
    with _mapping:
        segment = _peer_heaps.get(place := (card["dev"], card["ino"]))
        if segment is None:
            fd = _open_peer(rank, card)
            try:
                segment = _peer_heaps[place] = _Segment(fd, card["bytes"])
            finally:
                os.close(fd)
        return segment


@contextlib.contextmanager
def _room_for(heap_bytes: int) -> Iterator[None]:
    """Say what there is no room for, where the system says that there is none."""
    try:
        yield
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_ROOM:
            raise
        raise SymmetricHeapError(
            f"heap_size: this machine has no {heap_bytes} bytes for a PE ({error}); pass a smaller heap_size to "
            "po.init, or start fewer PEs"
        ) from error


def _open_peer(rank: int, card: dict[str, int]) -> int:
    path = f"/proc/{card['pid']}/fd/{card['fd']}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise BootstrapError(
            f"cannot map the heap of PE {rank} through {path}: {error}. PEs of the host backend must run as the same "
            "user and in one PID namespace (in containers: share it)."
        ) from error
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != (card["dev"], card["ino"]) or status.st_uid != os.geteuid():
        os.close(fd)
        raise BootstrapError(f"{path} is not the heap that PE {rank} announced; did that PE exit?")
    if stat.S_IMODE(status.st_mode) != 0o600:
        os.close(fd)
        raise BootstrapError(f"the heap of PE {rank} has mode {stat.S_IMODE(status.st_mode):o}, expected 600")
    return fd
