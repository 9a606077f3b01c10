"""The all-reduce of DistributedDataParallel beside tables that a backward pass updates: one order on all PEs."""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook with types, not with their names.

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..runtime.process_group import only_tensor
from ..runtime.torch_private import backward_pass

__all__ = ["OrderedAllReduce"]


class OrderedAllReduce:
    """Averages the gradients of a DistributedDataParallel, in one order with the backward pass of embedding tables.

        reduction = po.nn.OrderedAllReduce(ddp)              # once
        pooled = reduction.order(embeddings(values, lengths))  # in every step
        loss(ddp(dense, pooled)).backward()

    The group's kernels (NCCL's) and the launch that updates the tables both stay on the GPU until those of the other
    PEs come, and neither may keep off one GPU what the other one waits for on another. Buckets travel while autograd
    computes the next ones, as without this; but the tables' backward pass begins when those under way have ended, on
    every PE, and the buckets behind it follow it in the order of the stream.

    Args:
        module: whose communication hook this becomes, on its process group.

    Raises:
        TypeError: `module` is not a DistributedDataParallel.
        RuntimeError: it has a hook already.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(f"module: expected a DistributedDataParallel, got {type(module).__name__}")
        self._works: list[Any] = []
        self._group = module.process_group
        module.register_comm_hook(None, self._average)

    def order(self, pooled: torch.Tensor) -> torch.Tensor:
        """Let the backward pass go on behind `pooled` when the sums so far are complete.

        Args:
            pooled: what the tables' forward pass gave; once for each.

        Returns:
            The same tensor.
        """
        if backward_pass() < 0:  # else a region that torch.utils.checkpoint makes anew, while sums are under way
            self._works.clear()
        if pooled.requires_grad:
            pooled.register_hook(self._wait)
        return pooled

    def _average(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradient = bucket.buffer().mul_(1.0 / dist.get_world_size(self._group))
        work = dist.all_reduce(gradient, group=self._group, async_op=True)
        assert work is not None
        self._works.append(work)
        average: torch.futures.Future[torch.Tensor] = work.get_future().then(only_tensor)
        return average

    def _wait(self, _: torch.Tensor) -> None:
        for work in self._works:
            work.wait()  # NCCL's: the current stream does, and not the host
        self._works.clear()
