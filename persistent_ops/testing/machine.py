"""A PE's share of its machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

import persistent_ops as po

__all__ = ["available_memory", "memory_of_pe", "share_cores", "shares_gpu"]


def share_cores() -> None:
    """Give torch as many threads on the host backend as leave the other PEs theirs."""
    if po.backend() == "host":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // po.local_world_size()))


def shares_gpu() -> bool:
    """Return whether the PEs of this host are more than its GPUs."""
    return po.backend() == "cuda" and po.local_world_size() > torch.cuda.device_count()


def memory_of_pe() -> int | None:
    """Return the free bytes of this PE's device, split equally among PEs that share it; None if unknown."""
    if po.backend() == "cuda":
        return torch.cuda.mem_get_info(po.device())[0] // -(-po.local_world_size() // torch.cuda.device_count())
    free = available_memory()
    return None if free is None else free // po.local_world_size()


def available_memory() -> int | None:
    """Return the bytes that this process can still get: of the machine, or of its control group where that has less."""
    numbers = []
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    if found:
        numbers.append(int(found.group(1)) * 1024)
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        numbers.append(max(0, int(limit) - int(used)))
    return min(numbers) if numbers else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
