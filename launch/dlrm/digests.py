"""Digests of data, to tell apart data of the same name and size. A checkpoint continues only with its own data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["digest_of_arrays", "digest_of_file"]

_BLOCKS = 16
_BLOCK_BYTES = 64 << 10


def digest_of_arrays(arrays: Iterable[npt.NDArray[Any]]) -> str:
    """Return a digest of all that arrays hold."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def digest_of_file(path: Path) -> str:
    """Return a digest of a file's size and of blocks from its first to its last: it may be too large to be read whole.

    Raises:
        OSError: it cannot be read.
    """
    num_bytes = path.stat().st_size
    last = max(0, num_bytes - _BLOCK_BYTES)
    state = hashlib.blake2b(str(num_bytes).encode(), digest_size=16)
    with path.open("rb") as file:
        for begin in sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}):
            file.seek(begin)
            state.update(file.read(_BLOCK_BYTES))
    return state.hexdigest()
