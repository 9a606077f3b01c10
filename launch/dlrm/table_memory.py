"""Check of the memory for the tables. On the host, a process that takes too much is killed, and others with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import persistent_ops as po
from persistent_ops.testing.fbgemm_embedding import why_no_fbgemm
from persistent_ops.testing.machine import available_memory
from persistent_ops.testing.pes import gather

from .options import Options

__all__ = ["check_memory", "table_bytes"]

_GB = 1e9


def table_bytes(options: Options, num_rows: Sequence[int]) -> int:
    """Return the bytes of float32 tables with so many rows, and of their optimizer's states."""
    row_bytes = 4 * options.preset.dim
    states = {"sgd": 0, "adagrad": row_bytes, "rowwise_adagrad": 4}[options.optimizer]
    return sum(num_rows) * (row_bytes + states)


def check_memory(
    options: Options,
    num_rows: Sequence[int],
    *,
    available: Callable[[], int | None] = available_memory,
) -> None:
    """Raise ValueError where not even the tables fit; collective.

    Args:
        options, num_rows: of the training.
        available: returns the bytes of host memory that there are, None where nobody knows.
    """
    needed, left = table_bytes(options, num_rows), available()
    where = "this machine has"
    if po.backend() == "cuda":
        # As much as a PE has on average; other ways to train that do not fit beside this one are left out.
        pes_of_gpu = -(-po.local_world_size() // torch.cuda.device_count())
        needed = needed * pes_of_gpu // po.world_size()
        left, where = torch.cuda.mem_get_info(po.device())[0], "a GPU has"
    elif options.compare_steps:
        needed *= 2 + (why_no_fbgemm() is None)
    known = [each for each in gather(left, timeout=options.timeout) if each is not None]
    if known and needed > min(known):
        raise ValueError(
            f"tables: they and their optimizer's states take {needed / _GB:.1f} GB where {where} "
            f"{min(known) / _GB:.1f} left; pass a smaller --max-rows, which is {max(num_rows)} now"
        )
