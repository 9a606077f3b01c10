"""Gradients whose elements are clamped before they are sent."""

from __future__ import annotations

import functools

import torch

__all__ = ["clamp_gradient"]


def clamp_gradient(pooled: torch.Tensor, bound: float) -> None:
    """Have the gradient of what a group of tables has pooled clamped, in its dtype, in which it is sent.

    Args:
        pooled: takes part in a backward pass.
        bound: of an element's magnitude.
    """
    most = _largest(bound, pooled.dtype)
    pooled.register_hook(functools.partial(torch.clamp, min=-most, max=most))


@functools.cache
def _largest(bound: float, dtype: torch.dtype) -> float:
    """Return a dtype's largest number of at most `bound`, which is taken as the nearest one in float32."""
    bound = torch.tensor(min(bound, torch.finfo(torch.float32).max), dtype=torch.float32, device="cpu").item()
    nearest = torch.tensor(bound, dtype=dtype, device="cpu")
    if nearest.item() > bound:
        nearest = nearest.nextafter(torch.zeros_like(nearest))
    return nearest.item()
