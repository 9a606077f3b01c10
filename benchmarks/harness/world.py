"""The world that a benchmark measures in, with torch's process group beside it."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import persistent_ops as po
from persistent_ops.runtime import world as runtime_world
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import without_multicast

__all__ = ["chosen_backend", "joined_world", "more_pes_than_gpus"]

_COLLECTIVE_TIMEOUT_S = 120.0


def chosen_backend(name: str) -> str:
    """Return "cuda" or "host" for one of these or "auto"."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "host"
    return name


def more_pes_than_gpus(world_size: int) -> str:
    """Return what is said of more PEs of a host than it has GPUs."""
    if not torch.cuda.is_available():
        return "--backend cuda: there is no GPU"
    return (
        f"--pes: {world_size} PEs on {torch.cuda.device_count()} GPUs; NCCL takes one PE per GPU, and the times of PEs "
        "that share one say nothing"
    )


@contextmanager
def joined_world(*, backend: str, timeout: float, heap_bytes: int) -> Iterator[World]:
    """Join the world, and make torch's process group of the same PEs (NCCL, on the host backend gloo).

    Args:
        backend: "cuda" or "host".
        timeout: seconds that a PE waits for another.
        heap_bytes: of the symmetric heap.

    Raises:
        ValueError: there are more PEs than GPUs.
    """
    without_multicast()
    num_threads = torch.get_num_threads()
    po.init(backend=backend, operator_timeout=timeout, heap_size=heap_bytes)
    try:
        world = runtime_world.current()
        if backend == "host":
            torch.set_num_threads(1)  # the PEs share the cores
        elif po.local_world_size() > torch.cuda.device_count():
            raise ValueError(more_pes_than_gpus(po.local_world_size()))
        with (
            torch.no_grad(),
            po.process_group(timeout=_COLLECTIVE_TIMEOUT_S),
        ):
            try:
                yield world
            except BaseException as error:
                # Graphs in the frames of the traceback would keep NCCL from closing.
                traceback.clear_frames(error.__traceback__)
                gc.collect()
                raise
    finally:
        po.finalize()
        torch.set_num_threads(num_threads)
