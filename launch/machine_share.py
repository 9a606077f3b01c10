"""What a PE of the trainings in this folder has of its machine, and which torch.distributed backend goes with that."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from persistent_ops.runtime.world import World

__all__ = ["MachineShare", "machine_share"]


class MachineShare(NamedTuple):
    """A PE's share.

    Attributes:
        group: backend of the process group: "nccl"; "gloo" on the host, and where PEs share a GPU, which NCCL refuses.
        shares_gpu: whether the PEs of this machine are more than its GPUs.
    """

    group: str
    shares_gpu: bool


def machine_share(world: World) -> MachineShare:
    """Return it; on the host torch gets as many threads as leave the other PEs theirs."""
    on_gpu, local = world.backend.name == "cuda", world.bootstrap.local_world_size
    if not on_gpu:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    shares_gpu = on_gpu and local > torch.cuda.device_count()
    return MachineShare("nccl" if on_gpu and not shares_gpu else "gloo", shares_gpu)
