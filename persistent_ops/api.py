"""Public functions around the operators: join a world, use symmetric memory, report errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .runtime import joining, world as _world
from .runtime.arguments import as_whole_number
from .runtime.bootstrap import process_group as _process_group
from .runtime.plain_call import refuse_transforms, require_plain
from .runtime.world import finalize as finalize, is_initialized as is_initialized

__all__ = [
    "backend",
    "barrier",
    "check",
    "device",
    "empty",
    "finalize",
    "free",
    "init",
    "is_initialized",
    "local_world_size",
    "peer_view",
    "process_group",
    "rank",
    "recover",
    "to_symmetric",
    "world_size",
]


def init(
    backend: str = "auto",
    group: Any = None,
    timeout: float | None = None,
    *,
    operator_timeout: float | None = None,
    heap_size: int | None = None,
    transport: str = "auto",
    host_options: dict[str, int] | None = None,
) -> None:
    """Join the world of this job.

    Collective and blocking. The environment says who the peers are: torchrun, Hydra (nvshmrun, mpiexec.hydra), Open
    MPI, Slurm's srun or `po.launch`. Without a launcher the world has one PE. If torch.distributed is initialized, its
    ranks become the PEs.

    On "cuda" the PE picks its device in this order, and makes it the current device:

    1. torch's current device, if this process has already used CUDA (for example through `torch.cuda.set_device`).
    2. The device of the launcher's local rank (LOCAL_RANK or its counterpart). If `group` is a part of the job, this
       local rank still counts.
    3. The device of the PE's position among the ranks on this host.

    PEs that share a GPU get a warning. If there are fewer GPUs than PEs, each GPU must hold equally many PEs.

    Args:
        backend: "cuda" (one PE per GPU, NVSHMEM), "host" (CPU, shared memory), or "auto": "cuda" if torch sees a GPU.
            Rank 0 logs the choice (logger "persistent_ops"), and `po.backend()` returns it.
        group: torch.distributed process group whose ranks become the PEs; only its members call `init`. None: the
            default group, or the environment. Groups without a common rank are separate worlds.
        timeout: seconds within which all PEs must join; None for PERSISTENT_OPS_TIMEOUT or 120.
        operator_timeout: seconds after which a wait for a live peer raises, in a kernel or where PEs meet on the host
            (`po.empty`, `po.recover`); None for PERSISTENT_OPS_OPERATOR_TIMEOUT or 600. A killed peer is noticed within
            a second, and a peer that has called `finalize` or ended its program within 5 s (on "cuda" 15 s). Time that
            a peer spends compiling a kernel does not count.
        heap_size: bytes of symmetric heap on each PE; None for 4 GiB on "cuda" and 1 GiB on "host", where unused pages
            cost nothing.
        transport: "auto": store to peers where the hardware allows; "staged": put and signal to all peers, as to other
            hosts; "nodes:N": divide the PEs into N nodes of consecutive ranks, and put and signal between nodes.
        host_options: for tests of the host backend: network_delay_us, wg_size.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: this process has already joined a world.
        BootstrapError: a PE is missing or dead, has the number of another PE, or belongs to another job; the launcher's
            environment contradicts itself; or some GPUs hold more PEs than others.
        BackendUnavailableError: the backend cannot run here, or PEs chose different backends.
        SymmetricHeapError: `heap_size` is too small for the world's own data, or larger than the memory.
    """
    joining.init(
        backend,
        group,
        timeout,
        operator_timeout=operator_timeout,
        heap_size=heap_size,
        transport=transport,
        host_options=host_options,
    )


def rank() -> int:
    """Return the number of this PE, 0 to world_size() - 1."""
    return _world.current().rank


def world_size() -> int:
    """Return the number of PEs."""
    return _world.current().size


def local_world_size() -> int:
    """Return the number of PEs on this host."""
    return _world.current().bootstrap.local_world_size


def backend() -> str:
    """Return "cuda" or "host"."""
    return _world.current().backend.name


def device() -> torch.device:
    """Return the device of this PE's tensors."""
    return _world.current().backend.device


def empty(*size: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate an uninitialized tensor in the symmetric heap, at the same offset on every PE.

    Collective and blocking. Every PE passes the same size and dtype, in the same order of calls.

    Args:
        size: shape, as for torch.empty.
        dtype: of the elements.

    Raises:
        TypeError, ValueError: a size is not a whole number, or is negative.
        SymmetricHeapError: a PE has no room, or the PEs asked for different tensors.
        PeerTimeoutError, ContractMismatchError: a PE did not come or called something else, now or in an earlier
            launch.
    """
    given = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    shape = tuple(as_whole_number(n, f"size: expected whole numbers, got {list(given)}") for n in given)
    if min(shape, default=0) < 0:
        raise ValueError(f"size: expected numbers of at least 0, got {list(shape)}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    refuse_transforms("po.empty")
    return _world.current().empty(shape, dtype)


def to_symmetric(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into the symmetric heap, on the world's device; collective, see `empty`.

    The copy passes no gradient back to `tensor`.

    Raises:
        TypeError: `tensor` is not a plain dense tensor, or has no memory.
    """
    require_plain({"tensor": tensor})
    if tensor.is_meta:
        raise TypeError("tensor: expected a tensor with memory, got one on meta")
    copy = empty(*tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor.detach())
    return copy


def peer_view(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a tensor over PE `rank`'s copy of a symmetric tensor.

    Reads and writes go over the links. The caller must order them with the peer's own accesses (`po.barrier`).

    Raises:
        NotSymmetricError: `tensor` is not in this PE's symmetric heap, or loads and stores do not reach the peer.
        TypeError: `tensor` is not a plain dense tensor, or `rank` is not a whole number.
        ValueError: there is no such PE, or `tensor` is not contiguous.
    """
    require_plain({"tensor": tensor})
    number = as_whole_number(rank, f"rank: expected a whole number, got {rank!r}")
    return _world.current().heap.peer_view(tensor, number)


def free(tensor: torch.Tensor) -> None:
    """Free a tensor from `empty` or `to_symmetric`; collective. The tensor and its views must not be used afterwards.

    Raises:
        TypeError: `tensor` is not a plain dense tensor.
        NotSymmetricError: `tensor` is only a part of such a tensor, or was freed before.
        PeerTimeoutError, ContractMismatchError: see `empty`.
    """
    require_plain({"tensor": tensor})
    _world.current().free(tensor)


def barrier() -> None:
    """Wait until every PE has called this function and all earlier launches on their current streams have completed.

    Collective and blocking.

    Raises:
        PeerTimeoutError: a PE did not come within the time-out.
        ContractMismatchError: a PE launched an operator instead.
    """
    refuse_transforms("po.barrier")
    _world.current().barrier()


def check() -> None:
    """Wait for this PE's launches and raise the errors that they reported.

    On "cuda" an operator returns before its kernel has run. The next operator or this function raises its errors. On
    "host" the operator itself raises them, except in a backward pass.

    Raises:
        PeerTimeoutError, ContractMismatchError: a launch was given up; the world needs `po.recover()`.
        IndexError, ValueError, CapacityError: a kernel met bad input; the world stays usable. If the call returned a
            handle, the handle's `wait()` raises these instead.
    """
    _world.current().check()


def recover() -> None:
    """Make the world usable again after PeerTimeoutError or ContractMismatchError.

    Collective and blocking. Every PE of the world must be alive and call it. It also recovers from a launch on the host
    backend that has not begun. Results of aborted launches stay poisoned (NaN).

    The first PE waits for twice `operator_timeout`, and once more for each `EmbeddingInputs` with launches of its own:
    its peers may reach an operator later than this PE did, and wait there.

    A late PE may still get a valid result from the launch that its peers gave up, and meet the error one call later. So
    PEs may be one step apart: continue all of them from the same step, such as a checkpoint's.

    Raises:
        BootstrapError: a PE did not come within that time. The world is then lost, and all later calls are refused.
    """
    _world.current().recover()


@contextlib.contextmanager
def process_group(
    backend: str | None = None, *, timeout: float | None = None, max_ctas: int | None = None
) -> Iterator[None]:
    """Make torch.distributed's default process group of the world's PEs, under any launcher.

    A context manager; collective to enter and to leave. The group lives as long as the context. It serves code beside
    the operators, such as DistributedDataParallel. A world that was made from a process group does not need it.

    Args:
        backend: "nccl" or "gloo". None: "nccl" on "cuda"; "gloo" on "host" and where PEs share a GPU, which NCCL
            refuses.
        timeout: seconds for one collective of the group; None for the world's operator_timeout.
        max_ctas: limit of CTAs for NCCL's kernels, which then also use no clusters (`po.nn.leave_room`); None for
            NCCL's choice.

    Raises:
        RuntimeError: this process already has a default group, or torch cannot make one.
        BootstrapError: a PE did not come.
    """
    world = _world.current()
    if backend is None:
        has_own_gpu = world.backend.name == "cuda" and local_world_size() <= torch.cuda.device_count()
        backend = "nccl" if has_own_gpu else "gloo"
    seconds = world.workspace.timeout if timeout is None else timeout
    with _process_group.process_group(
        world.bootstrap, backend=backend, device=world.backend.device, timeout=seconds, max_ctas=max_ctas
    ):
        yield
