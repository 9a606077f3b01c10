"""A gradient of pooled rows as kernels read it."""

from __future__ import annotations

import torch

from ...runtime.compile.literals import vector_bytes

__all__ = ["row_stride", "rows_of"]


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as kernels read it, a copy if need be.

    It is contiguous, or columns of a larger tensor, side by side, of which samples begin at multiples of 16 bytes: a
    `torch.cat` hands on such columns of its own gradient.
    """
    stride_bytes = row_stride(gradient) * gradient.itemsize
    if not gradient.is_contiguous() and (gradient.stride(1) != 1 or stride_bytes % vector_bytes()):
        gradient = gradient.contiguous()
    return gradient.clone() if gradient.data_ptr() % vector_bytes() else gradient


def row_stride(gradient: torch.Tensor) -> int:
    """Return how many elements lie between the beginnings of two rows."""
    return gradient.shape[1] if gradient.is_contiguous() else gradient.stride(0)
