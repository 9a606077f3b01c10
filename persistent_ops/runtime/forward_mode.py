"""Derivatives of the forward mode, which no operator has: torch gives zeros where nobody refuses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

from .torch_private import dual_level

__all__ = ["refuse_tangents"]


def refuse_tangents(arguments: Iterable[object], message: str) -> None:
    """Raise NotImplementedError where a tensor has a tangent, as under torch.func.jvp.

    Args:
        arguments: of an operator: tensors, lists of them, and others.
        message: of the error.
    """
    if dual_level() < 0:
        return
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            refuse_tangents(argument, message)
        elif isinstance(argument, torch.Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(message)
