"""Telling the calls that may go to the kernel at once from those that torch's dispatcher has to see."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .torch_private import dual_level, function_transform, is_zero_tensor, num_dispatch_modes

__all__ = ["is_plain"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # exactly these: a subclass may have a __torch_function__ of its own


def is_plain(
    tensors: tuple[torch.Tensor, ...],
    optional: tuple[torch.Tensor | None, ...] = (),
    tables: Sequence[torch.Tensor] = (),
) -> bool:
    """Return whether nobody but the kernel wants to see a call, and all that it says of its tensors is in their memory.

    There is no autograd, of either mode, no dispatch mode, transform or tensor subclass, and no tensor that torch would
    have to negate or to fill with zeros first.

    By-passing the dispatcher saves most of the host's share of an eager call, which this is therefore a part of.

    Args:
        tensors: that the call must have. What is no tensor makes it not plain: the slow path checks and complains.
        optional: that it may have.
        tables: of which there may be many: asked for gradients alone, and only where they are recorded. Who takes them
            looks at each when it is new (table_set.py).
    """
    if num_dispatch_modes() or function_transform() is not None or dual_level() >= 0:
        return False
    is_recording = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) not in _PLAIN or (is_recording and tensor.requires_grad):
            return False
        if tensor.is_neg() or is_zero_tensor(tensor):
            return False
    for other in optional:
        if other is None:
            continue
        if type(other) not in _PLAIN or (is_recording and other.requires_grad):
            return False
        if other.is_neg() or is_zero_tensor(other):
            return False
    if is_recording:
        try:
            for table in tables:
                if table.requires_grad:
                    return False
        except (AttributeError, TypeError):
            return False
    return True
