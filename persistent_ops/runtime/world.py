"""The world of this PE: who its peers are, on which backend they run, and what they share."""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import threading
from typing import Any, Protocol, runtime_checkable

import torch

from . import launchers, spawn
from .backend import Backend, KernelRequest
from .bootstrap import Bootstrap, connect, from_group
from .contract import Contract, register
from .errors import BackendUnavailableError, BootstrapError
from .heap import OutputPool, SymmetricHeap
from .layout import MAX_PES
from .workspace import Workspace

__all__ = ["World", "current", "finalize", "init", "is_initialized"]

_log = logging.getLogger("persistent_ops")
_DEFAULT_HEAP_BYTES = {"host": 1 << 30, "cuda": 4 << 30}

_process_world: World | None = None
_thread_worlds = threading.local()
register("barrier", ("world_size",))


@runtime_checkable
class Forgetful(Protocol):
    """An operator's state that PEs may see differently after a failure."""

    def forget(self) -> None:
        """Go back to what all PEs agree on."""


class World:
    """Everything that one PE knows and owns; `po.init()` makes it, operators take it from `current()`."""

    def __init__(self, bootstrap: Bootstrap, backend: Backend, timeout: float) -> None:
        self.bootstrap = bootstrap
        self.backend = backend
        self.timeout = timeout
        self.rank = bootstrap.rank
        self.size = bootstrap.world_size
        self.heap = SymmetricHeap(backend, bootstrap)
        self.workspace = Workspace(backend, bootstrap, self.heap, timeout)
        self.outputs = OutputPool(backend, self.heap)
        reachable = [int(base != 0) for base in backend.peer_heaps]
        matrix = [list(raw) for raw in bootstrap.exchange("reachable", bytes(reachable))]
        for peer in range(self.size):
            if matrix[peer][self.rank] != reachable[peer]:
                raise BootstrapError(
                    f"PE {self.rank} and PE {peer} disagree on whether they reach each other's memory directly"
                )
        self.all_reachable = all(all(row) for row in matrix)
        self.operator_state: dict[str, Any] = {}
        """Per operator: its plans and agreements. Operators keep nothing elsewhere."""
        self.captured: list[Any] = []
        """What CUDA graphs of this world read at every replay; kept until the world is closed."""
        self._barrier: tuple[Any, Any] | None = None

    def enqueue_barrier(self) -> None:
        """Let the current stream wait until every PE has launched this barrier; on GPUs the host goes on."""
        if self._barrier is None:
            team = self.workspace.team(Contract("barrier", (self.size,)))
            kernel = self.backend.load(KernelRequest("barrier", (), ctypes.sizeof(team), 64))
            self._barrier = (kernel, upload(self.backend, bytes(team)))
        kernel, plan = self._barrier
        self.workspace.launch(kernel, 1, plan.data_ptr(), ())

    def meet(self, contract: Contract) -> None:
        """Wait, on the host too, for every PE to come to a launch under the same contract.

        What follows may be collective on the host, where PEs that do not match would wait for each other in vain.
        """
        team = self.workspace.team(contract)
        kernel = self.backend.load(KernelRequest("barrier", (), ctypes.sizeof(team), 64))
        plan = upload(self.backend, bytes(team))
        self.workspace.launch(kernel, 1, plan.data_ptr(), (), raises_input_errors=False)
        self.backend.synchronize()
        self.workspace.raise_failure()

    def barrier(self) -> None:
        """Wait, on the host too, until every PE has come here and this PE's launches before it have completed."""
        self.enqueue_barrier()
        self.check()

    def check(self) -> None:
        """Wait for this PE's launches and raise what they reported."""
        self.backend.synchronize()
        self.workspace.raise_pending()

    def recover(self) -> None:
        """Start clean epochs after a failure; collective."""
        self.workspace.recover()
        for state in self.operator_state.values():
            if isinstance(state, Forgetful):
                state.forget()

    def make_room(self, plans: dict[Any, Any], most: int) -> None:
        """Drop the older half of `plans` where there are `most`, when no launch that is queued reads them any more."""
        if len(plans) < most or self.workspace.is_capturing():
            return
        self.backend.synchronize()
        for key in list(plans)[: most // 2]:
            del plans[key]

    def close(self) -> None:
        """Release the world; collective where the peers are still there."""
        try:
            self.backend.synchronize()
        except RuntimeError:
            _log.warning("PE %d: the device reported an error while the world was closed", self.rank)
        try:
            self.bootstrap.exchange("close", b"", timeout=min(self.timeout, 5.0))
        except BootstrapError:
            _log.info("PE %d: closing without its peers", self.rank)
        self.operator_state.clear()
        self.captured.clear()
        self.backend.close()
        self.bootstrap.close()


def upload(backend: Backend, data: bytes) -> torch.Tensor:
    """Return private memory of the backend's device that holds `data`."""
    words = backend.private_words((len(data) + 7) // 8)
    padded = bytearray(data.ljust(words.numel() * 8, b"\0"))
    words.copy_(torch.frombuffer(padded, dtype=torch.int64))
    return words


def is_initialized() -> bool:
    """Return whether `po.init()` has been called in this process (or this PE's thread) and not undone."""
    return getattr(_thread_worlds, "world", None) is not None or _process_world is not None


def current() -> World:
    """Return this PE's world; RuntimeError where there is none."""
    world = getattr(_thread_worlds, "world", None) or _process_world
    if world is None:
        raise RuntimeError("persistent_ops is not initialised in this process: call persistent_ops.init() first")
    return world


def init(
    backend: str = "auto",
    group: Any = None,
    timeout: float = 30.0,
    *,
    heap_size: int | None = None,
    transport: str = "auto",
    host_options: dict[str, int] | None = None,
) -> None:
    """Join the world of this job; collective. See `persistent_ops.init`."""
    global _process_world
    if backend not in ("auto", "cuda", "host"):
        raise ValueError(f"backend: expected 'auto', 'cuda' or 'host', got {backend!r}")
    if transport not in ("auto", "staged"):
        raise ValueError(f"transport: expected 'auto' or 'staged', got {transport!r}")
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout: expected seconds, got {timeout!r}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout: expected seconds above 0 and below infinity, got {timeout}")
    if heap_size is not None and not isinstance(heap_size, int):
        raise TypeError(f"heap_size: expected a whole number of bytes, got {heap_size!r}")
    unknown = set(host_options or {}) - {"network_delay_us", "wg_size"}
    if unknown:
        raise TypeError(f"host_options: expected network_delay_us and wg_size, got {', '.join(sorted(unknown))}")
    if is_initialized():
        raise RuntimeError("persistent_ops is already initialised here: call persistent_ops.finalize() first")
    thread_bootstrap = spawn.thread_bootstrap()
    if thread_bootstrap is not None:
        bootstrap = thread_bootstrap
    elif group is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        bootstrap = from_group(group, timeout)
    else:
        bootstrap = connect(launchers.detect(os.environ), timeout)
    try:
        world = World(
            bootstrap, _make_backend(backend, bootstrap, timeout, heap_size, transport, host_options), timeout
        )
    except BaseException as error:
        bootstrap.fail(f"{type(error).__name__}: {error}")
        bootstrap.close()
        raise
    if thread_bootstrap is not None:
        _thread_worlds.world = world
    else:
        _process_world = world
        atexit.register(finalize)
    if backend == "auto":
        level = logging.INFO if world.rank == 0 else logging.DEBUG
        _log.log(level, "persistent_ops: %d PEs on backend '%s'", world.size, world.backend.name)


def finalize() -> None:
    """Leave the world; collective. Tensors from the heap must not be used afterwards. Harmless without a world."""
    global _process_world
    world = getattr(_thread_worlds, "world", None)
    if world is not None:
        _thread_worlds.world = None
    else:
        world, _process_world = _process_world, None
    if world is not None:
        world.close()


def _make_backend(
    name: str,
    bootstrap: Bootstrap,
    timeout: float,
    heap_size: int | None,
    transport: str,
    host_options: dict[str, int] | None,
) -> Backend:
    if bootstrap.world_size > MAX_PES:
        raise BootstrapError(f"a world has at most {MAX_PES} PEs, this job has {bootstrap.world_size}")
    chosen = name
    if name == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "host"
    everyone = [raw.decode() for raw in bootstrap.exchange("backend", chosen.encode())]
    if len(set(everyone)) > 1:
        listed = ", ".join(f"PE {pe}: {other}" for pe, other in enumerate(everyone))
        raise BackendUnavailableError(
            f"the PEs chose different backends ({listed}); pass backend='host' or 'cuda' on all"
        )
    if heap_size is not None and heap_size <= 0:
        raise ValueError(f"heap_size: expected bytes above 0, got {heap_size}")
    heap_bytes = -(-(heap_size or _DEFAULT_HEAP_BYTES[chosen]) // 4096) * 4096
    sizes = [int(raw) for raw in bootstrap.exchange("heap-size", str(heap_bytes).encode())]
    if len(set(sizes)) > 1:
        raise BootstrapError(f"heap_size differs between PEs: {sizes} bytes")
    if chosen == "host":
        from .host import HostBackend

        return HostBackend(bootstrap, heap_bytes, transport, **(host_options or {}))
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            "backend='cuda' needs a GPU that torch can use, and torch.cuda.is_available() is False here "
            f"(torch {torch.__version__}). Use backend='host', or install a CUDA build of torch; "
            "`persistent-ops doctor` shows what is missing."
        )
    try:
        from .gpu import GpuBackend
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend='cuda' needs nvshmem4py and cuda.core ({error}): pip install 'persistent-ops[cuda13]'"
        ) from error
    return GpuBackend(bootstrap, heap_bytes, transport, timeout)
