"""torch's symmetric memory, which some of the methods of benchmarks and of launch/ sum in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from persistent_ops.runtime.world import World

from .pes import agree

__all__ = ["allocate", "one_shot", "rendezvous", "symmetric_buffer", "two_shot"]


def allocate(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor that `rendezvous` makes symmetric.

    Raises:
        ImportError, RuntimeError: torch cannot do it here, for instance because the GPUs do not reach each other.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    if symmetric_memory.get_backend(device) != "CUDA":  # torch's own NVSHMEM would be a second one in this process
        symmetric_memory.set_backend("CUDA")
    return symmetric_memory.empty(tuple(shape), dtype=dtype, device=device)


def rendezvous(buffer: torch.Tensor) -> None:
    """Make what every PE has allocated known to all PEs of torch's process group; collective. Raises RuntimeError."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    symmetric_memory.rendezvous(buffer, _group_name())


def symmetric_buffer(world: World, elements: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, str | None]:
    """Allocate a buffer; collective.

    Args:
        world: of this PE; torch's process group has the same PEs.
        elements: of the buffer.
        dtype: of its elements.

    Returns:
        `[elements]` and None; None and why some PE has none; None and None where there is nothing to exchange, or none
        is expected (the host backend).
    """
    if world.backend.name != "cuda" or world.size == 1:
        return None, None
    buffer, problem = None, None
    try:
        buffer = allocate((elements,), dtype=dtype, device=world.backend.device)
    except (ImportError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    problem = agree(world.bootstrap, problem)
    if problem is not None or buffer is None:
        return None, problem
    try:
        rendezvous(buffer)
    except RuntimeError as error:
        problem = f"{type(error).__name__}: {error}"
    problem = agree(world.bootstrap, problem)
    return (buffer, None) if problem is None else (None, problem)


def one_shot(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the PEs of a symmetric tensor."""
    result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", _group_name())
    return result


def two_shot(x: torch.Tensor) -> torch.Tensor:
    """Sum a symmetric tensor over the PEs in place; returns it."""
    torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", _group_name())
    return x


def _group_name() -> Any:  # what torch calls a GroupName
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group")
    return str(group.group_name)
