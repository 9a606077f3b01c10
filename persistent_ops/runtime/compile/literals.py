"""Numbers of the kernels' headers that are needed where nothing may be compiled, as for fake tensors.

Every other number comes from the library that is made of a header (`description`).
"""

from __future__ import annotations

import functools
import re

from .jit import kernel_source_root

__all__ = ["literal", "vector_bytes", "warp_size"]


@functools.cache
def literal(header: str, name: str) -> int:
    """Return a constant that a header defines as a plain number; the GPU's, where the host has its own after that.

    Raises:
        ValueError: it defines none, or not as a number.
    """
    text = (kernel_source_root() / header).read_text()
    found = re.search(rf"\bconstexpr [\w:]+ {name} = (0x[0-9a-f]+|[0-9]+)u?l{{0,2}};", text)
    if found is None:
        raise ValueError(f"{header}: expected a definition of {name} as a number")
    return int(found[1], 0)


@functools.cache
def vector_bytes() -> int:
    """Return the most that a thread loads or stores at once."""
    return literal("sched/row_blocks.cuh", "kChunkBytes")


def warp_size() -> int:
    """Return the lanes of a warp on GPUs; on the host it has one."""
    return literal("platform/groups.cuh", "kWarpSize")
