"""Comparing tensors bit for bit."""

from __future__ import annotations

import torch

__all__ = ["bits", "difference"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor as integers: -0.0 differs from 0.0, and NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def difference(found: torch.Tensor, want: torch.Tensor) -> str | None:
    """Return where two results differ in bits, or None; they may be on any devices."""
    if (found.shape, found.dtype) != (want.shape, want.dtype):
        return f"got {found.dtype} {list(found.shape)}, expected {want.dtype} {list(want.shape)}"
    found, want = found.contiguous(), want.to(found.device).contiguous()
    if torch.equal(bits(found), bits(want)):
        return None
    wrong = (bits(found) != bits(want)).nonzero()
    place = tuple(int(i) for i in wrong[0])
    return (
        f"{len(wrong)} of {found.numel()} elements differ, the first at {list(place)}: {float(found[place])} instead "
        f"of {float(want[place])}"
    )
