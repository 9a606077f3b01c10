"""Run a function on every PE, under any launcher, and exchange values between PEs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import persistent_ops as po

from ..runtime.bootstrap import launchers
from ..runtime.world import current

__all__ = ["agree", "gather", "is_first_process", "is_said_by_launch", "run_on_pes", "started_pes", "without_multicast"]


def without_multicast() -> None:
    """Keep NVLink multicast off in NCCL and torch; it is not needed, and NVSHMEM's is off too.

    Call it before the PEs start. What the environment already says stays.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def started_pes() -> int | None:
    """Return how many PEs a launcher started, or None where there is no launcher."""
    environment = launchers.detect(os.environ)
    return None if environment.launcher == "single" else environment.world_size


def is_first_process() -> bool:
    """Return whether this process is the one that prints: rank 0 of a launcher's, or the only one."""
    return launchers.detect(os.environ).rank == 0


def is_said_by_launch(error: BaseException) -> bool:
    """Return whether `po.launch` raised it for PEs that were killed or ran out of time: no traceback says more."""
    return isinstance(error, po.PersistentOpsError) and error.__cause__ is None and started_pes() is None


def run_on_pes(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float | None = None, fresh: bool = False
) -> Any:
    """Run `function(*arguments)` on every PE and return rank 0's result (under a launcher: this process's own).

    Args:
        function: calls `persistent_ops.init()` itself; importable by name.
        world_size: PEs to start where there is no launcher; a world of one runs in this process.
        arguments: of the function; picklable.
        timeout: seconds for the whole where PEs are started here; None for no bound.
        fresh: start a process for a world of one too: it leaves nothing to the worlds that follow.
    """
    if started_pes() is not None or (world_size == 1 and not fresh):
        return function(*arguments)
    return po.launch(function, world_size, *arguments, timeout=timeout)[0]


def gather(value: Any, *, timeout: float | None = None) -> list[Any]:
    """Return every PE's `value` (of JSON types) in rank order; collective, and launches nothing."""
    bootstrap = current().bootstrap
    return [json.loads(raw) for raw in bootstrap.exchange("gather", json.dumps(value).encode(), timeout=timeout)]


def agree(problem: str | None, *, timeout: float | None = None) -> str | None:
    """Return the first problem that any PE has, or None where no PE has one; collective."""
    problems = gather(problem, timeout=timeout)
    return next((f"PE {pe}: {text}" for pe, text in enumerate(problems) if text is not None), None)
