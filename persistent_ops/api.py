"""The public functions around the operators: joining a world, symmetric memory, errors."""

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
    MPI, Slurm's srun or `po.launch`; without any of them the world has one PE. An initialized torch.distributed is used
    instead where there is one.

    On "cuda" a PE takes torch's current device where this process has initialized CUDA, as `torch.cuda.set_device` does
    and any other use of a GPU; else the device of the launcher's local rank (LOCAL_RANK and its like), also where
    `group` is a part of the job; else that of its place among the group's ranks on this host. It becomes the current
    device. PEs that share a GPU are warned; where GPUs are too few, equally many PEs go on each.

    Args:
        backend: "cuda" (one PE per GPU, NVSHMEM), "host" (CPU, shared memory), or "auto": "cuda" where torch sees a
            GPU. What was taken is logged by rank 0 (logger "persistent_ops") and told by `po.backend()`.
        group: torch.distributed process group whose ranks become the PEs, on its members only; None for the default
            one or the environment. Groups that have no rank in common are worlds of their own, side by side.
        timeout: seconds within which all PEs must have joined; None for PERSISTENT_OPS_TIMEOUT or 120.
        operator_timeout: seconds after which a wait for a peer, in a kernel or where PEs meet on the host (`po.empty`,
            `po.recover`), becomes an error; None for PERSISTENT_OPS_OPERATOR_TIMEOUT or 600. It is for a peer that is
            alive: one that was killed is noticed within a second, one that has left with `finalize` or at its program's
            end within 5 (on "cuda" 15), and the time in which one compiles a kernel is not counted.
        heap_size: bytes of symmetric heap on each PE; None for 4 GiB on "cuda", 1 GiB on "host" (where pages that are
            not used cost nothing).
        transport: "auto", or "staged" to send everything by put and signal, as to a peer on another host.
        host_options: of the host backend, for tests: network_delay_us, wg_size.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: already initialized.
        BootstrapError: a PE is missing, dead, numbered twice or of another job, the launcher's environment
            contradicts itself, or some GPUs carry more PEs than others.
        BackendUnavailableError: the backend cannot run here, or PEs chose different ones.
        SymmetricHeapError: the heap has no room for what a world itself needs, or is more than there is.
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
    """Return this PE's number, 0 to world_size() - 1."""
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
    """Return the device that this PE's tensors live on."""
    return _world.current().backend.device


def empty(*size: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate an uninitialized tensor in the symmetric heap, at the same offset on every PE.

    Collective and blocking; every PE passes the same size and dtype, in the same order of calls.

    Args:
        size: shape, as for torch.empty.
        dtype: of the elements.

    Raises:
        TypeError, ValueError: a size that is no whole number, or below 0.
        SymmetricHeapError: no room on some PE, or the PEs asked for different tensors.
        PeerTimeoutError, ContractMismatchError: a PE did not come, or called something else, now or in a launch before.
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
    """Copy a tensor into the symmetric heap; collective, see `empty`. The copy is on the world's device.

    No gradient flows back from it.

    Raises:
        TypeError: it is not a plain dense tensor, or has no memory.
    """
    require_plain({"tensor": tensor})
    if tensor.is_meta:
        raise TypeError("tensor: expected a tensor with memory, got one on meta")
    copy = empty(*tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor.detach())
    return copy


def peer_view(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a tensor over PE `rank`'s copy of a symmetric tensor.

    Reads and writes go over the links; ordering them with the peer's own is the caller's business (`po.barrier`).

    Raises:
        NotSymmetricError: `tensor` is not this PE's symmetric memory, or the peer is not load/store reachable.
        TypeError: `tensor` is not a plain dense tensor, or `rank` no whole number.
        ValueError: no such PE, or `tensor` is not contiguous.
    """
    require_plain({"tensor": tensor})
    number = as_whole_number(rank, f"rank: expected a whole number, got {rank!r}")
    return _world.current().heap.peer_view(tensor, number)


def free(tensor: torch.Tensor) -> None:
    """Give a tensor from `empty` or `to_symmetric` back; collective. It and its views must not be used afterwards.

    Raises:
        TypeError: it is not a plain dense tensor.
        NotSymmetricError: it is not such a tensor but a part of one, or was given back already.
        PeerTimeoutError, ContractMismatchError: see `empty`.
    """
    require_plain({"tensor": tensor})
    _world.current().free(tensor)


def barrier() -> None:
    """Wait until every PE has come here and all launches before it on this PE's current stream have completed.

    Collective and blocking.

    Raises:
        PeerTimeoutError: a PE did not come within the time-out.
        ContractMismatchError: a PE launched an operator instead.
    """
    refuse_transforms("po.barrier")
    _world.current().barrier()


def check() -> None:
    """Wait for this PE's launches and raise what they reported.

    On "cuda" an operator returns before its kernel has run, so its errors are raised by the next operator or by this
    function; on "host" the operator raises them itself, but in a backward pass.

    Raises:
        PeerTimeoutError, ContractMismatchError: see those; the world needs `po.recover()`.
        IndexError, ValueError, CapacityError: a kernel met bad input; the world stays usable. What is wrong with the
            input of a call that has a handle, its `wait()` raises.
    """
    _world.current().check()


def recover() -> None:
    """Make the world usable again after PeerTimeoutError or ContractMismatchError; collective and blocking.

    Also after a launch on the host that has not begun. Every PE of the world must be alive and call it. Results of
    aborted launches stay poisoned. Who comes first waits for twice ``operator_timeout`` (once more for each exchange of
    inputs that has launches of its own), since its peers may come to an operator later than it did, and wait there.

    Raises:
        BootstrapError: a PE did not come within that time; the world is lost then, and all that follows is refused.
    """
    _world.current().recover()


@contextlib.contextmanager
def process_group(
    backend: str | None = None, *, timeout: float | None = None, max_ctas: int | None = None
) -> Iterator[None]:
    """Make torch.distributed's default process group of the world's PEs, whatever launcher started them.

    A context manager, collective to enter and to leave: the group lives as long as the context. It is for what runs
    beside the operators, such as DistributedDataParallel. A world that was made of a process group needs none.

    Args:
        backend: "nccl" or "gloo"; None for "nccl" on "cuda", and "gloo" on "host" and where PEs share a GPU, which NCCL
            refuses.
        timeout: seconds that a collective of the group may take; None for the world's operator_timeout.
        max_ctas: of NCCL's kernels, which then have no clusters either (`po.nn.leave_room`); None for NCCL's choice.

    Raises:
        RuntimeError: this process has a default group already, or torch cannot make one.
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
