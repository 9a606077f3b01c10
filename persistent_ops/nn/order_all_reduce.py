"""The all-reduce of DistributedDataParallel in one order with the package's launches, on all PEs."""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook with types, not with their names.

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..runtime import world as _world
from ..runtime.bootstrap.process_group import only_tensor

__all__ = ["average_in_order", "order_all_reduce"]


def order_all_reduce(module: DistributedDataParallel) -> None:
    """Average the gradients of a DistributedDataParallel in one order with the package's launches.

        po.nn.order_all_reduce(ddp)  # once
        loss(ddp(dense, embeddings(values, lengths))).backward()  # in every step

    The group's kernels (NCCL's) and this package's launches, such as the update of tables, both stay on the GPU until
    the other PEs' ones come. Without an order, one could block on one GPU what the other waits for on another GPU.
    With this hook, buckets still travel while autograd computes the next ones. Buckets, and what is computed after
    them, come after the launches that were made before (such as an exchange of lookups for the next batch). Launches
    that are made later come after the buckets, on all streams. So all PEs have one order, the order of the calls, also
    in a CUDA-graph capture. Other collectives of the process group are not ordered: do not start any while lookups
    travel ahead on a stream of their own.

    Args:
        module: the DistributedDataParallel that gets this communication hook, on its process group.

    Raises:
        TypeError: `module` is not a DistributedDataParallel.
        RuntimeError: `module` has a communication hook already.
    """
    if not isinstance(module, DistributedDataParallel):
        raise TypeError(f"module: expected a DistributedDataParallel, got {type(module).__name__}")
    module.register_comm_hook(module.process_group, average_in_order)


def average_in_order(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the group's ranks, in one order with the launches: the hook."""
    gradient = bucket.buffer().mul_(1.0 / dist.get_world_size(group))

    def start() -> Any:
        return dist.all_reduce(gradient, group=group, async_op=True)

    work: Any = _world.current().in_order(start, group) if _world.is_initialized() else start()
    average: torch.futures.Future[torch.Tensor] = work.get_future().then(only_tensor)
    return average
