"""Telling the calls that may go to the kernel at once from those that torch's dispatcher has to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .torch_private import (
    TensorGuards,
    dual_level,
    function_transform,
    is_zero_tensor,
    num_dispatch_modes,
    tracing_state,
)

__all__ = ["PLAIN", "PlainCalls", "is_plain", "materialized"]

PLAIN = (torch.Tensor, torch.nn.Parameter)  # exactly these: a subclass may have a __torch_function__ of its own
_is_recording = torch.is_grad_enabled
_NO_TABLES: tuple[torch.Tensor, ...] = ()  # which is one object: who passes another one loses a little time
_MOST_KINDS = 4  # of calls with so many tensors: what follows is looked at tensor by tensor


def is_plain(
    tensors: tuple[torch.Tensor, ...],
    optional: tuple[torch.Tensor | None, ...] = (),
    tables: Sequence[torch.Tensor] = (),
) -> bool:
    """Return whether nobody but the kernel wants to see a call, and all that it says of its tensors is in their memory.

    There is no autograd, of either mode, no dispatch mode, transform, tracer or tensor subclass, and no tensor that
    torch would have to negate or to fill with zeros first.

    By-passing the dispatcher saves most of the host's share of an eager call, which this is therefore a part of.

    Args:
        tensors: that the call must have. What is no tensor makes it not plain: the slow path checks and complains.
        optional: that it may have.
        tables: of which there may be many: asked for gradients alone, and only where they are recorded. Who takes them
            looks at each when it is new (table_set.py).
    """
    if num_dispatch_modes() or function_transform() is not None or dual_level() >= 0 or tracing_state() is not None:
        return False
    is_recording = _is_recording()
    for tensor in tensors:
        if type(tensor) not in PLAIN or (is_recording and tensor.requires_grad):
            return False
        if tensor.is_neg() or tensor.is_nested or is_zero_tensor(tensor):
            return False
    for other in optional:
        if other is None:
            continue
        if type(other) not in PLAIN or (is_recording and other.requires_grad):
            return False
        if other.is_neg() or other.is_nested or is_zero_tensor(other):
            return False
    return not is_recording or not _any_requires_grad(tables)


def materialized(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy whose memory says all of it: torch may have put off to negate it or to fill it.

    For what comes by another way than through torch's dispatcher, which does that.
    """
    tensor = tensor.resolve_neg()
    return tensor.clone() if is_zero_tensor(tensor) else tensor


def _any_requires_grad(tables: Sequence[torch.Tensor]) -> bool:
    """Return whether one does, or is no tensor."""
    try:
        for table in tables:
            if table.requires_grad:
                return True
    except (AttributeError, TypeError):
        return True
    return False


class PlainCalls:
    """What `is_plain` says of the calls of one operator, for most of them by one look at all tensors together.

    Calls are of a kind if their tensors are alike in type, dispatch keys (the negative bit and zeros without memory are
    some), dtype, device, dimensions and `requires_grad`: in all that `is_plain` asks of a tensor, and in more. What was
    plain once is plain again, unless gradients are recorded now and a tensor requires one. Torch compares all tensors
    in one call, which costs what two or three answers of one tensor cost.
    """

    def __init__(self) -> None:
        # By the number of different tensors: what compares a kind, and whether one of them requires a gradient.
        self._kinds: dict[int, list[tuple[Callable[..., bool], bool]]] = {}

    def has(
        self,
        tensors: tuple[torch.Tensor, ...],
        optional: tuple[torch.Tensor | None, ...] = (),
        tables: Sequence[torch.Tensor] = _NO_TABLES,
    ) -> bool:
        """Return `is_plain(tensors, optional, tables)`."""
        if num_dispatch_modes() or function_transform() is not None or dual_level() >= 0 or tracing_state() is not None:
            return False
        given, first = tensors, tensors[0]
        for other in optional:
            # A result may be an input, and what compares takes no tensor twice.
            if other is not None and other is not first and other is not given[-1]:
                given += (other,)
        for tensor in given:
            if getattr(tensor, "is_nested", False):  # torch ends the process where it compares strides
                return False
        for is_of_kind, requires_grad in self._kinds.get(len(given), ()):
            if is_of_kind(*given):
                if requires_grad or tables is not _NO_TABLES:
                    return not _is_recording() or not (requires_grad or _any_requires_grad(tables))
                return True
        if not is_plain(tensors, optional, tables):
            return False
        self._learn(given)
        return True

    def _learn(self, given: tuple[torch.Tensor, ...]) -> None:
        kinds = self._kinds.setdefault(len(given), [])
        if TensorGuards is None or len(kinds) == _MOST_KINDS or len(set(map(id, given))) < len(given):
            return
        open_sizes: list[Any] = [[None] * tensor.dim() for tensor in given]
        guards = TensorGuards(*given, dynamic_dims_sizes=open_sizes, dynamic_dims_strides=open_sizes)
        kinds.append((guards.check, _any_requires_grad(given)))
