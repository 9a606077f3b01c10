"""torch's symmetric memory: baselines of benchmarks and examples sum in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import persistent_ops as po

from ..runtime.torch_private import symmetric_memory
from .pes import agree

__all__ = ["allocate", "matmul_reduce_scatter", "one_shot", "rendezvous", "symmetric_buffer", "two_shot"]


def allocate(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor that `rendezvous` makes symmetric.

    Raises:
        ImportError, RuntimeError: torch cannot do it here, for instance because the GPUs do not reach each other.
    """
    module = symmetric_memory()
    if module.get_backend(device) != "CUDA":  # torch's own NVSHMEM would be a second one in this process
        module.set_backend("CUDA")
    buffer: torch.Tensor = module.empty(tuple(shape), dtype=dtype, device=device)
    return buffer


def rendezvous(buffer: torch.Tensor) -> None:
    """Make what every PE has allocated known to all PEs of torch's process group; collective. Raises RuntimeError."""
    symmetric_memory().rendezvous(buffer, _group_name())


def symmetric_buffer(elements: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, str | None]:
    """Allocate a buffer that torch's process group, which has the same PEs, can sum; collective.

    Args:
        elements: of the buffer.
        dtype: of its elements.

    Returns:
        `[elements]` and None; None and why some PE has none; None and None where there is nothing to exchange, or none
        is expected (the host backend).
    """
    if po.backend() != "cuda" or po.world_size() == 1:
        return None, None
    buffer, problem = None, None
    try:
        buffer = allocate((elements,), dtype=dtype, device=po.device())
    except (ImportError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    problem = agree(problem)
    if problem is not None or buffer is None:
        return None, problem
    try:
        rendezvous(buffer)
    except RuntimeError as error:
        problem = f"{type(error).__name__}: {error}"
    problem = agree(problem)
    return (buffer, None) if problem is None else (None, problem)


def one_shot(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the PEs of a symmetric tensor."""
    result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", _group_name())
    return result


def two_shot(x: torch.Tensor) -> torch.Tensor:
    """Sum a symmetric tensor over the PEs in place; returns it."""
    torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", _group_name())
    return x


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return this PE's rows of the sum of `a @ b` over the PEs; the tensors need not be symmetric."""
    result: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, _group_name())
    return result


def _group_name() -> Any:  # what torch calls a GroupName
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group")
    return str(group.group_name)
