"""torch's process group of a world's PEs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from kept_pes import in_processes
from worlds import error_of

import persistent_ops as po


def _enter() -> None:
    with po.process_group():
        pass


def _sums(backend: str) -> list[Any]:
    po.init(backend, heap_size=64 << 20)
    try:
        found: list[Any] = []
        for group in (None, "gloo"):
            with po.process_group(group):
                value = torch.ones(1, device=po.device() if group is None else "cpu") + po.rank()
                dist.all_reduce(value)
                found += [value.item(), dist.get_rank() == po.rank(), dist.get_world_size(), dist.get_backend()]
                told = error_of(_enter)
            found += [dist.is_initialized(), told[:2]]
        return [po.local_world_size(), *found]
    finally:
        po.finalize()


def test_a_group_has_the_world_s_pes_and_ends_with_its_context(backend: str) -> None:
    own = "nccl" if backend == "cuda" and torch.cuda.device_count() > 1 else "gloo"
    told = ("RuntimeError", "torch.distributed already has a default process group; destroy it first")
    groups = [each for group in (own, "gloo") for each in (3.0, True, 2, group, False, told)]
    assert in_processes(_sums, 2, backend, timeout=120) == [[2, *groups]] * 2
