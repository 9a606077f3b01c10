"""torch's symmetric memory, which some of the methods sum in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from persistent_ops.runtime.world import World

from .pes import agree

__all__ = ["one_shot", "symmetric_buffer", "two_shot"]


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
        import torch.distributed._symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(elements, dtype=dtype, device=world.backend.device)
    except (ImportError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    problem = agree(world.bootstrap, problem)
    if problem is not None or buffer is None:
        return None, problem
    try:
        symmetric_memory.rendezvous(buffer, _group_name())
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
    assert group is not None
    return str(group.group_name)
