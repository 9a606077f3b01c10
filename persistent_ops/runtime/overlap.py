"""Whether what an operator writes shares memory with what it reads: a kernel reads some of it when more is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["check_apart"]


def check_apart(
    name: str,
    written: torch.Tensor,
    read: Mapping[str, torch.Tensor | None],
    may_be: Mapping[str, torch.Tensor | None] | None = None,
) -> None:
    """Raise where what is written overlaps what is read at another place.

    Args:
        name: of the argument that is written.
        written: contiguous, as all others.
        read: by argument, what must not overlap it at all; None is none.
        may_be: by argument, what it may be itself, from the first byte to the last.

    Raises:
        ValueError: it overlaps; names both arguments.
    """
    for other_name, other in read.items():
        if other is not None and _overlap(written, other):
            raise ValueError(
                f"{name}: expected memory apart from {other_name}, got a tensor that overlaps it; pass another one"
            )
    for other_name, other in (may_be or {}).items():
        if other is None or (other.data_ptr() == written.data_ptr() and other.nbytes == written.nbytes):
            continue
        if _overlap(written, other):
            raise ValueError(
                f"{name}: expected {other_name} itself or memory apart from {other_name}, got a tensor that overlaps "
                "it; pass another one"
            )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begin, other_begin = one.data_ptr(), other.data_ptr()
    nbytes, other_bytes = one.nbytes, other.nbytes
    return begin < other_begin + other_bytes and other_begin < begin + nbytes and bool(nbytes and other_bytes)
