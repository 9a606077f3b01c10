"""Exchanges of rows without a product: of gradients, and of products that no kernel of this package can exchange.

torch.distributed makes them where it has a process group of the world's PEs, and `all_reduce` makes them elsewhere.
They have no gradients of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..runtime import world as _world
from ..runtime.torch_library import TorchOperator
from ..runtime.world import World
from .all_reduce import all_reduce

__all__ = ["all_gather_rows", "all_to_all_rows"]


def all_to_all_rows(x: torch.Tensor) -> torch.Tensor:
    """Send the r-th of as many equal blocks of rows as there are PEs to PE r.

    Args:
        x: `[rows, columns]`, contiguous, of a dtype that `all_reduce` takes; rows a multiple of the number of PEs.

    Returns:
        As x: the blocks that the PEs have sent, in rank order.
    """
    result: torch.Tensor = _all_to_all((x,), {}, (x,))
    return result


def all_gather_rows(x: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return all PEs' rows, in rank order.

    Args:
        x: `[rows, columns]`, contiguous, of a dtype that `all_reduce` takes.
        world_size: number of PEs.

    Returns:
        `[world_size * rows, columns]`.
    """
    result: torch.Tensor = _all_gather((x, world_size), {}, (x,))
    return result


def _has_group(world: World) -> bool:
    """Return whether the default process group has the world's PEs as its ranks, and takes their tensors."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    is_suited = world.backend.name == "host" or dist.get_backend() == "nccl"
    return is_suited and (dist.get_world_size(), dist.get_rank()) == (world.size, world.rank)


def _run_all_to_all(x: torch.Tensor) -> torch.Tensor:
    world = _world.for_call()
    with torch.no_grad():
        if _has_group(world):
            result = torch.empty_like(x)
            dist.all_to_all_single(result, x)
            return result
        # Every PE gets all blocks. Only one PE has numbers in each, and the others -0.0, which changes no number.
        rows, columns = x.shape
        blocks = x.new_full((world.size, world.size, rows // world.size, columns), -0.0)
        blocks[:, world.rank] = x.view(world.size, -1, columns)
        all_reduce(blocks, out=blocks)
        return blocks[world.rank].reshape(rows, columns)


def _run_all_gather(x: torch.Tensor, world_size: int) -> torch.Tensor:
    world = _world.for_call()
    with torch.no_grad():
        if _has_group(world):
            result = x.new_empty((world_size * x.shape[0], x.shape[1]))
            dist.all_gather_into_tensor(result, x)
            return result
        blocks = x.new_full((world_size, *x.shape), -0.0)
        blocks[world.rank] = x
        all_reduce(blocks, out=blocks)
        return blocks.view(-1, x.shape[1])


def _fake_all_gather(x: torch.Tensor, world_size: int) -> torch.Tensor:
    return x.new_empty((world_size * x.shape[0], x.shape[1]))


def _operator(name: str, arguments: str, run: Any, fake: Any) -> TorchOperator:
    return TorchOperator(name, arguments, run, fake=fake)


_all_to_all = _operator("all_to_all_rows", "Tensor x", _run_all_to_all, torch.empty_like)
_all_gather = _operator("all_gather_rows", "Tensor x, int world_size", _run_all_gather, _fake_all_gather)
