"""The sum of the dense part's gradients, in an order with the tables' backward pass that all PEs share."""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook with types, not with their names.

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DenseGradients"]


class DenseGradients:
    """Averages the gradients of a DistributedDataParallel, before the backward pass of the embeddings begins.

    Buckets travel while autograd computes the next ones. What `order` is called with gets its gradient behind all that
    are under way by then: NCCL's kernels and the tables' backward pass both stay on the GPU until those of the other
    PEs come, and neither may keep off a GPU what the other one waits for on another. Behind them on every PE, in the
    order of its stream, the latter finds none of the former.

    Args:
        module: whose communication hook this becomes.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._works: list[Any] = []
        module.register_comm_hook(None, self._average)

    def order(self, pooled: torch.Tensor) -> None:
        """Let the backward pass go on behind `pooled` when the sums so far are complete; once for each forward pass."""
        self._works.clear()
        pooled.register_hook(self._wait)

    def _average(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradient = bucket.buffer().mul_(1.0 / dist.get_world_size())
        work = dist.all_reduce(gradient, async_op=True)
        assert work is not None
        self._works.append(work)
        return work.get_future().then(_only_tensor)

    def _wait(self, _: torch.Tensor) -> None:
        for work in self._works:
            work.wait()  # NCCL's: the current stream does, and not the host
        self._works.clear()


def _only_tensor(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
