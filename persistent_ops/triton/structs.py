"""Offsets and constants of cuda/comm and cuda/platform, as numbers that Triton kernels can use.

They come from the descriptions of the C++ structs (runtime/compile/description.py). A kernel's cache key has them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import triton.language as tl

from ..runtime.compile.description import COMM, describe
from ..runtime.tracing import HEADER

__all__ = ["constant", "offset_of", "size_of"]

_COMM, _TRACE = describe(COMM), describe(HEADER)
_STRUCTS: dict[str, Any] = {**_COMM.structs, **_TRACE.structs}


def constant(name: str) -> tl.constexpr:
    """Return a constant that PO_CONSTANT describes."""
    return tl.constexpr({**_COMM.constants, **_TRACE.constants}[name])


def offset_of(struct: str, field: str) -> tl.constexpr:
    """Return the offset of a field, in bytes."""
    return tl.constexpr(getattr(_STRUCTS[struct], field).offset)


def size_of(struct: str) -> tl.constexpr:
    """Return the size of a struct, in bytes."""
    return tl.constexpr(ctypes.sizeof(_STRUCTS[struct]))
