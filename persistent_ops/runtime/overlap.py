"""Check that an operator's outputs do not overlap its inputs, which a kernel may read after writes."""

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
    """Raise if written memory overlaps memory that is read at another place.

    Args:
        name: of the argument that is written.
        written: contiguous.
        read: by argument, what must not overlap it at all, from its first byte to its last; None is none.
        may_be: by argument, what it may be itself, from the first byte to the last.

    Raises:
        ValueError: it overlaps; names both arguments.
    """
    begin = written.data_ptr()
    end = begin + written.nbytes
    for other_name, other in read.items():
        if other is not None and _shares(other, begin, end):
            raise ValueError(
                f"{name}: expected memory apart from {other_name}, got a tensor that overlaps it; pass another one"
            )
    for other_name, other in (may_be or {}).items():
        if other is None or (other.data_ptr() == begin and other.nbytes == end - begin):
            continue
        if _shares(other, begin, end):
            raise ValueError(
                f"{name}: expected {other_name} itself or memory apart from {other_name}, got a tensor that overlaps "
                "it; pass another one"
            )


def _shares(tensor: torch.Tensor, begin: int, end: int) -> bool:
    """Return whether a tensor has some of the bytes from `begin` to `end`."""
    first, nbytes = tensor.data_ptr(), tensor.nbytes
    if nbytes and not tensor.is_contiguous():
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (span + 1) * tensor.element_size()
    return first < end and begin < first + nbytes and begin < end and nbytes > 0
